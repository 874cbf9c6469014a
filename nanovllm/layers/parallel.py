"""What a layer needs of the other tensor-parallel ranks: sums and collected columns, in a fixed order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
GATHERED_BYTES = 256 << 10  # a sum of fewer bytes sends them to every rank at once, see `all_reduce_bytes`


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


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that a rank receives for the sum of a tensor of `num_bytes` over the ranks.

    The other ranks' tensors, or of a larger one the others' share of a part and then the other parts, as in a ring.
    """
    if num_ranks > 2 and num_bytes > GATHERED_BYTES:
        return 2 * (num_ranks - 1) * num_bytes // num_ranks
    return (num_ranks - 1) * num_bytes


class MetaRanks:
    """The ranks of a model on meta tensors, whose memory is counted: what a collective allocates, nothing sent."""

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
