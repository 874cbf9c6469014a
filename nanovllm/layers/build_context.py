"""What a layer is given when it is built, besides its sizes: where it lies, how it is stored, and its rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import torch

from nanovllm.errors import ConfigError
from nanovllm.layers.linear_method import LinearMethod
from nanovllm.layers.module import Module
from nanovllm.layers.parallel import RankGroup


class Split(NamedTuple):
    """How tensor-parallel ranks share `total` neighbouring things, such as heads: this rank has those of `held`."""

    total: int
    held: range

    @classmethod
    def whole(cls, total: int) -> Split:
        return cls(total, range(total))

    @property
    def size(self) -> int:
        return len(self.held)

    @property
    def parts(self) -> tuple[range, ...]:
        """What this rank has, as one range; () if it has all."""
        return () if self.size == self.total else (self.held,)

    def times(self, width: int) -> Split:
        """Of the rows of a matrix that has `width` for each thing."""
        return Split(self.total * width, range(self.held.start * width, self.held.stop * width))


def held_ranges(splits: Iterable[Split]) -> list[range]:
    """This rank's rows of a matrix in which several things that ranks share stand one below the other."""
    ranges: list[range] = []
    start = 0
    for split in splits:
        ranges.append(range(start + split.held.start, start + split.held.stop))
        start += split.total
    return ranges


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What goes down through the constructors of a network."""

    dtype: torch.dtype
    device: torch.device
    method: LinearMethod | None = None  # how the matrices are stored; None: as numbers of the dtype
    group: RankGroup | None = None  # the ranks that share the network, of which this is one; None: there are no others
    prefix: str = ""  # what the names of tensors begin with in the checkpoint
    longest: int = (
        0  # tokens of the longest sequence, for RoPE that depends on it; 0: any that the network was trained on
    )
    rope_factors: tuple[float, ...] = ()  # what a GGUF file says that RoPE's frequencies are divided by
    is_gguf: bool = False  # a GGUF file has some merged matrices in parts
    # Called for every layer, in order, when its matrices are allocated and nothing is in them.
    layer_built: Callable[[Module], None] | None = None

    def at(self, name: str) -> BuildContext:
        """For a module of this name below the present one."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def is_first_rank(self) -> bool:
        return self.group is None or self.group.rank == 0

    def split(self, total: int, what: str, units: Iterable[int] = ()) -> Split:
        """This rank's contiguous part of `total` things, called `what` in messages; see `splits`."""
        return self.splits(total, what, units)[0 if self.group is None else self.group.rank]

    def splits(self, total: int, what: str, units: Iterable[int] = ()) -> list[Split]:
        """Every rank's part of `total` things. Parts begin at multiples of all `units`.

        Raises ConfigError if a rank would have none.
        """
        if self.group is None:
            return [Split.whole(total)]
        unit = lcm(*units)
        parts = [rank_part(total, rank, self.num_ranks, unit) for rank in range(self.num_ranks)]
        if total and not all(parts):
            groups = f" in groups of {unit}" if unit > 1 else ""
            raise ConfigError(
                f"tensor_parallel_size={self.num_ranks}: the model's {what} size is {total}{groups}, too little for "
                "every rank to have a part; lower it"
            )
        return [Split(total, part) for part in parts]

    def units(self, name: str, rows: int, columns: int) -> tuple[int, int]:
        """The multiples at which ranks may divide the rows and the columns of a matrix of this name."""
        if self.method is None or self.group is None:
            return 1, 1
        return self.method.units(f"{self.prefix}{name}", rows, columns)

    def split_heads(self, heads: int, kv_heads: int) -> tuple[Split, Split]:
        """The query heads and the KV heads of this rank, which has all query heads of its KV heads.

        With more ranks than KV heads several ranks have the same KV head and divide its query heads.
        """
        parts = self.heads_of_ranks(heads, kv_heads)
        queries, keys = parts[0 if self.group is None else self.group.rank]
        return Split(heads, queries), Split(kv_heads, keys)

    def heads_of_ranks(self, heads: int, kv_heads: int) -> list[tuple[range, range]]:
        """Of every rank the query heads and the KV heads. Raises ConfigError if there are too few."""
        parts = [rank_heads(heads, kv_heads, rank, self.num_ranks) for rank in range(self.num_ranks)]
        if not all(queries for queries, _ in parts):
            raise ConfigError(
                f"tensor_parallel_size={self.num_ranks}: the model has {heads} query heads and {kv_heads} KV heads "
                "in a layer, too few for every rank to have one; lower it"
            )
        return parts


def rank_part(total: int, rank: int, num_ranks: int, unit: int = 1) -> range:
    """The contiguous part of `total` indices that belongs to a rank, from a multiple of `unit` to another or the end.

    Parts differ by at most one unit.
    """
    units = -(-total // unit)
    first = units * rank // num_ranks
    last = units * (rank + 1) // num_ranks
    return range(min(first * unit, total), min(last * unit, total))


def rank_heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[range, range]:
    """The query heads and KV heads of a rank; see `BuildContext.split_heads`."""
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv_heads = rank_part(num_kv_heads, rank, num_ranks)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head_of = [other * num_kv_heads // num_ranks for other in range(num_ranks)]
    kv_head = kv_head_of[rank]
    queries = rank_part(group, rank - kv_head_of.index(kv_head), kv_head_of.count(kv_head))
    first = kv_head * group
    return range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1)
