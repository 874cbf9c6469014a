"""How tensor-parallel ranks share a decoder: plain arithmetic, without torch.

The scheme is Megatron's (Shoeybi et al., "Megatron-LM", 2019). Heads, the inner features of the MLP or of each expert,
and the vocabulary are divided into contiguous parts. q, k, v, gate and up hold the rows of a rank's part, o and down
its columns, so that the sum of all ranks' products is the product. Norms and routers are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.layers.linear_method import COLUMNS, ROWS, Axis

# By the last name of a module: along which dimension its matrix is divided, and what is divided; merged projections
# hold several things one below the other.
DIVIDED: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "q_proj": (ROWS, ("gated_q_rows",)),
        "k_proj": (ROWS, ("kv_rows",)),
        "v_proj": (ROWS, ("kv_rows",)),
        "qkv_proj": (ROWS, ("q_rows", "kv_rows", "kv_rows")),
        "o_proj": (COLUMNS, ("q_rows",)),
        "gate_proj": (ROWS, ("intermediate",)),
        "up_proj": (ROWS, ("intermediate",)),
        "gate_up_proj": (ROWS, ("intermediate", "intermediate")),
        "down_proj": (COLUMNS, ("intermediate",)),
        "q_norm": (ROWS, ("q_rows",)),  # of all heads together
        "k_norm": (ROWS, ("kv_rows",)),
        "embed_tokens": (ROWS, ("vocab",)),
        "lm_head": (ROWS, ("vocab",)),
        "w1": (ROWS, ("intermediate",)),  # Mixtral's names of gate, up and down
        "w3": (ROWS, ("intermediate",)),
        "w2": (COLUMNS, ("intermediate",)),
        "self_attn": (ROWS, ("heads",)),  # its own tensor, the sinks: one for each head
        "in_proj_qkv": (ROWS, ("state_key_rows", "state_key_rows", "state_value_rows")),
        "in_proj_z": (ROWS, ("state_value_rows",)),
        "in_proj_b": (ROWS, ("state_value_heads",)),
        "in_proj_a": (ROWS, ("state_value_heads",)),
        "in_proj_qkvz": (ROWS, ("state_rows",)),  # of each key head q, k, v and z
        "in_proj_ba": (ROWS, ("state_double_heads",)),
        "conv1d": (ROWS, ("state_key_rows", "state_key_rows", "state_value_rows")),
        "out_proj": (COLUMNS, ("state_value_rows",)),
        "linear_attn": (ROWS, ("state_value_heads",)),  # its own tensors, for the decay of each value head
    }
)

GATHERED_BYTES = 256 << 10  # a sum of fewer bytes sends them to every rank at once, see `all_reduce_bytes`

# Of each axis of a tensor the slices that are read, one behind the other; () is the whole tensor.
Part = Sequence[Sequence[slice]]


class Heads(NamedTuple):
    """Sizes of recurrent layers. Value heads of equal number share a key head, and go to its rank with it."""

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class Sizes(NamedTuple):
    """The sizes of a decoder that ranks divide.

    expert_intermediate, shared_intermediate: the inner features of an expert and of the shared one, if there are.
    gated: whether the query projection has a gate behind each head's query. states: of recurrent layers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    gated: bool = False
    states: Heads = Heads()

    def width(self, thing: str) -> int:
        """Of how many there are of something, by its name in `DIVIDED`; see `Sharding.held`."""
        state = self.states
        repeats = state.value_heads // max(1, state.key_heads)
        widths = {
            "q_rows": self.heads * self.head_dim,
            "gated_q_rows": self.heads * self.head_dim * (1 + self.gated),
            "kv_rows": self.kv_heads * self.head_dim,
            "state_key_rows": state.key_heads * state.key_dim,
            "state_value_rows": state.value_heads * state.value_dim,
            "state_value_heads": state.value_heads,
            "state_double_heads": 2 * state.value_heads,
            "state_rows": 2 * state.key_heads * (state.key_dim + repeats * state.value_dim),
        }
        return widths[thing] if thing in widths else int(getattr(self, thing))

    @property
    def q_rows(self) -> int:
        """Width of the queries of a token."""
        return self.width("q_rows")

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.width("kv_rows")


class DividedMatrix(NamedTuple):
    """A matrix, and the multiples at which its storage lets its rows and its columns be divided."""

    module: str
    shape: tuple[int, int]
    units: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What one of `num_ranks` ranks holds, as ranges of the indices of the whole decoder, whose sizes are `whole`."""

    rank: int
    num_ranks: int
    whole: Sizes
    heads: range
    kv_heads: range
    intermediate: range
    expert_intermediate: range
    shared_intermediate: range
    vocab: range
    most_kv_heads: int  # of any rank
    vocab_widths: tuple[int, ...]  # of every rank
    key_heads: range = range(0)  # of recurrent layers

    def held(self, thing: str) -> range:
        """The part of something that this rank holds, by its name in `DIVIDED`."""
        if thing in ("q_rows", "gated_q_rows"):
            return self._of_heads(self.heads, self.whole.heads, thing)
        if thing == "kv_rows":
            return self._of_heads(self.kv_heads, self.whole.kv_heads, thing)
        if thing.startswith("state_"):
            return self._of_heads(self.key_heads, self.whole.states.key_heads, thing)
        held: range = getattr(self, thing)
        return held

    def _of_heads(self, held: range, total: int, thing: str) -> range:
        """The rows of some of `total` heads, each of which has as many."""
        width = self.whole.width(thing) // max(1, total)
        return range(held.start * width, held.stop * width)

    def ranges(self, module: str) -> tuple[Sequence[range], Sequence[range]]:
        """The rows and the columns of a matrix that this rank holds; () stands for all."""
        dimension, things = _divided(module)
        held_ranges: list[range] = []
        start = 0
        for thing in things:
            held = self.held(thing)
            held_ranges.append(range(start + held.start, start + held.stop))
            start += self.whole.width(thing)
        return (held_ranges, ()) if dimension == ROWS else ((), held_ranges)

    def part(self, module: str, axes: Sequence[Axis | None], shape: Sequence[int]) -> Part:
        """The part of a checkpoint tensor of `module` that this rank reads.

        axes: what an entry along each axis stands for, None where the tensor is not divided. An axis with one entry is
        not divided either: the entry holds for all rows or columns.
        """
        ranges = self.ranges(module)
        slices_of_axes = [
            [slice(span.start // axis.size, -(-span.stop // axis.size)) for span in ranges[axis.dimension]]
            if axis is not None and size > 1
            else []
            for axis, size in zip(axes, shape, strict=False)
        ]
        return [slices or [slice(None)] for slices in slices_of_axes] if any(slices_of_axes) else ()


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that a rank receives for the sum of a tensor of `num_bytes` over the ranks.

    The other ranks' tensors, or of a larger one the others' share of a part and then the other parts, as in a ring.
    """
    if num_ranks > 2 and num_bytes > GATHERED_BYTES:
        return 2 * (num_ranks - 1) * num_bytes // num_ranks
    return (num_ranks - 1) * num_bytes


def rank_part(total: int, rank: int, num_ranks: int, unit: int = 1) -> range:
    """The contiguous part of `total` indices that belongs to a rank, from a multiple of `unit` to another or the end.

    Parts differ by at most one unit.
    """
    units = -(-total // unit)
    first = units * rank // num_ranks
    last = units * (rank + 1) // num_ranks
    return range(min(first * unit, total), min(last * unit, total))


def shard(sizes: Sizes, num_ranks: int, matrices: Collection[DividedMatrix] = (), form: str = "") -> Sequence[Sharding]:
    """What each rank holds of a decoder with these sizes.

    With more ranks than KV heads several ranks hold the same KV head and divide its query heads. matrices: those whose
    storage, called `form`, cannot be divided everywhere. Raises ConfigError if a rank would have none of something, or
    a part of a matrix that cannot be stored.
    """
    held = [_heads(sizes.heads, sizes.kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    if not all(heads for heads, _ in held):
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model has {sizes.heads} query heads and {sizes.kv_heads} KV heads "
            "in a layer, too few for every rank to have one; lower it"
        )
    if sizes.states.key_heads % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model has {sizes.states.key_heads} key heads in a recurrent layer, "
            "which cannot be divided evenly; take another number of ranks"
        )
    parts = {
        thing: _parts(thing, getattr(sizes, thing), num_ranks, matrices)
        for thing in ("intermediate", "expert_intermediate", "shared_intermediate", "vocab")
    }
    shardings = [
        Sharding(
            rank=rank,
            num_ranks=num_ranks,
            whole=sizes,
            heads=held[rank][0],
            kv_heads=held[rank][1],
            intermediate=parts["intermediate"][rank],
            expert_intermediate=parts["expert_intermediate"][rank],
            shared_intermediate=parts["shared_intermediate"][rank],
            vocab=parts["vocab"][rank],
            most_kv_heads=max(len(kv_heads) for _, kv_heads in held),
            vocab_widths=tuple(map(len, parts["vocab"])),
            key_heads=rank_part(sizes.states.key_heads, rank, num_ranks),
        )
        for rank in range(num_ranks)
    ]
    for matrix in matrices:
        for sharding in shardings:
            _check_boundaries(matrix, sharding, form)
    return shardings


def kind_of_mlp(module: str) -> str:
    """What the sizes of the MLP begin with to which a module belongs: an expert, the shared one or the only one."""
    return "expert_" if ".experts." in module else "shared_" if ".shared_expert" in module else ""


def _divided(module: str) -> tuple[int, Sequence[str]]:
    """Along which dimension a matrix is divided, and what; see `DIVIDED`."""
    dimension, things = DIVIDED.get(module.rpartition(".")[2], (ROWS, ()))
    return dimension, [f"{kind_of_mlp(module)}{thing}" for thing in things]


def _parts(thing: str, total: int, num_ranks: int, matrices: Collection[DividedMatrix]) -> list[range]:
    """The part of every rank of the inner features or the vocabulary, so that all matrices can be divided there."""
    divisions = [(_divided(matrix.module), matrix.units) for matrix in matrices]
    unit = lcm(*(units[dimension] for (dimension, things), units in divisions if thing in things))
    parts = [rank_part(total, rank, num_ranks, unit) for rank in range(num_ranks)]
    if total and not all(parts):
        groups = f" in groups of {unit}" if unit > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the model's {thing} size is {total}{groups}, too little for every rank "
            "to have a part; lower it"
        )
    return parts


def _check_boundaries(matrix: DividedMatrix, sharding: Sharding, form: str) -> None:
    """Raise ConfigError if a rank's part of the matrix begins or ends where it cannot be divided."""
    for held, total, unit, what in zip(
        sharding.ranges(matrix.module), matrix.shape, matrix.units, ("rows", "columns"), strict=True
    ):
        if any(part.start % unit or (part.stop % unit and part.stop != total) for part in held):
            parts = " and ".join(f"{part.start} to {part.stop - 1}" for part in held)
            raise ConfigError(
                f"tensor_parallel_size={sharding.num_ranks}: rank {sharding.rank} would hold {what} {parts} of "
                f"{matrix.module}, and its {form} form can be divided at multiples of {unit} only; take another "
                "number of ranks, or a checkpoint in another form"
            )


def _heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[range, range]:
    """The query heads and KV heads of a rank.

    A rank has all query heads of its KV heads, unless ranks share one KV head.
    """
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv_heads = rank_part(num_kv_heads, rank, num_ranks)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head_of = [other * num_kv_heads // num_ranks for other in range(num_ranks)]
    kv_head = kv_head_of[rank]
    queries = rank_part(group, rank - kv_head_of.index(kv_head), kv_head_of.count(kv_head))
    first = kv_head * group
    return range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1)
