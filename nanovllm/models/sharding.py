"""How tensor-parallel ranks share a decoder: plain arithmetic, without torch.

The scheme is Megatron's (Shoeybi et al., "Megatron-LM", 2019). Heads, the MLP's inner features and the vocabulary are
divided into contiguous parts. q, k, v, gate and up hold the rows of a rank's part, o and down its columns, so that the
sum of all ranks' products is the product. Norms are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanovllm.errors import ConfigError

# The part of a rank that a tensor's axis 0 or 1 is cut to, by the last name of its module.
ROWS: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": "q_rows",
        "k_proj": "kv_rows",
        "v_proj": "kv_rows",
        "gate_proj": "intermediate",
        "up_proj": "intermediate",
        "embed_tokens": "vocab",
        "lm_head": "vocab",
    }
)
COLUMNS: Mapping[str, str] = MappingProxyType({"o_proj": "q_rows", "down_proj": "intermediate"})


GATHERED_BYTES = 256 << 10  # a sum of fewer bytes sends them to every rank at once, see `all_reduce_bytes`


@dataclass(frozen=True, slots=True)
class Sharding:
    """What one of `num_ranks` ranks holds, as ranges of the indices of the whole decoder."""

    rank: int
    num_ranks: int
    heads: range
    kv_heads: range
    intermediate: range
    vocab: range
    head_dim: int
    most_kv_heads: int  # of any rank

    @property
    def q_rows(self) -> range:
        """Output features of the query projection."""
        return range(self.heads.start * self.head_dim, self.heads.stop * self.head_dim)

    @property
    def kv_rows(self) -> range:
        """Output features of the key projection, and of the value projection."""
        return range(self.kv_heads.start * self.head_dim, self.kv_heads.stop * self.head_dim)

    def slices(self, name: str) -> tuple[slice, ...]:
        """The part of the checkpoint tensor `name` that this rank reads, as slices of its first axes."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in ROWS:
            rows: range = getattr(self, ROWS[module])
            return (slice(rows.start, rows.stop),)
        if module in COLUMNS and kind == "weight":
            columns: range = getattr(self, COLUMNS[module])
            return (slice(None), slice(columns.start, columns.stop))
        return ()


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that a rank receives for the sum of a tensor of `num_bytes` over the ranks.

    The other ranks' tensors, or of a larger one the others' share of a part and then the other parts, as in a ring.
    """
    if num_ranks > 2 and num_bytes > GATHERED_BYTES:
        return 2 * (num_ranks - 1) * num_bytes // num_ranks
    return (num_ranks - 1) * num_bytes


def rank_part(total: int, rank: int, num_ranks: int) -> range:
    """The contiguous part of `total` indices that belongs to a rank. Parts differ by at most one index."""
    return range(total * rank // num_ranks, total * (rank + 1) // num_ranks)


def shard(
    num_heads: int, num_kv_heads: int, head_dim: int, intermediate: int, vocab: int, rank: int, num_ranks: int
) -> Sharding:
    """What a rank holds of a decoder with these sizes.

    With more ranks than KV heads several ranks hold the same KV head and divide its query heads. Raises ConfigError if
    a rank would have none.
    """
    held = [_heads(num_heads, num_kv_heads, each, num_ranks) for each in range(num_ranks)]
    if not all(heads for heads, _ in held) or num_ranks > min(intermediate, vocab):
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model has {num_heads} query heads and {num_kv_heads} KV heads in a "
            "layer, too few for every rank to have one; lower it"
        )
    return Sharding(
        rank=rank,
        num_ranks=num_ranks,
        heads=held[rank][0],
        kv_heads=held[rank][1],
        intermediate=rank_part(intermediate, rank, num_ranks),
        vocab=rank_part(vocab, rank, num_ranks),
        head_dim=head_dim,
        most_kv_heads=max(len(kv_heads) for _, kv_heads in held),
    )


def _heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[range, range]:
    """The query heads and KV heads of a rank.

    A rank has all query heads of its KV heads, unless ranks share one KV head.
    """
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv_heads = rank_part(num_kv_heads, rank, num_ranks)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head_of = [each * num_kv_heads // num_ranks for each in range(num_ranks)]
    kv_head = kv_head_of[rank]
    queries = rank_part(group, rank - kv_head_of.index(kv_head), kv_head_of.count(kv_head))
    first = kv_head * group
    return range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1)
