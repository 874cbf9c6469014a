"""What a layer needs of the other tensor-parallel ranks: sums and collected columns, in a fixed order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from nanovllm.layers.linear_method import StoredWeight

T = TypeVar("T")


class RankGroup(Protocol):
    """The ranks that compute one model together. Every rank makes the same calls in the same order.

    local_size: ranks on this machine, which share its memory and cores.
    """

    rank: int
    size: int
    local_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x [rows, columns] over the ranks, on every rank.

        Each element is summed in fp32 in the order of the ranks and rounded once, so that it does not depend on the
        other rows.
        """
        ...

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """x [rows, widths[rank]] of all ranks next to each other, on rank 0; None on the others."""
        ...

    def exchange(self, value: T) -> list[T]:
        """A picklable value of every rank, in order of the ranks. Waits for all ranks, however long that takes."""
        ...


class MetaRanks:
    """The ranks of a decoder on meta tensors, whose memory is counted: what a collective allocates, nothing sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = self.local_size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `RankGroup`."""
        return x.new_empty(self.size, *x.shape)[0].float().to(x.dtype)

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `RankGroup`."""
        return x.new_empty(2, x.shape[0], sum(widths))[0] if self.rank == 0 else None

    def exchange(self, value: T) -> list[T]:
        """See `RankGroup`."""
        return [value] * self.size


def embedding(token_ids: Tensor, table: StoredWeight, vocab: range, group: RankGroup) -> Tensor:
    """Rows of an embedding whose rows are divided: int64 [tokens] -> [tokens, hidden]. table holds those of `vocab`.

    A token's row is on one rank. The others add zeros to it, which is exact.
    """
    elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
    rows = table.rows((token_ids - vocab.start).masked_fill(elsewhere, 0))
    return group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))
