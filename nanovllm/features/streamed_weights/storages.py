"""Where tensors lie in one piece of memory: storage behind storage, or tensor behind tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SPAN_ALIGNMENT = 256  # bytes between the starts of storages
TENSOR_ALIGNMENT = 16  # and of tensors that lie behind each other, which CPU kernels read in words


class Span(NamedTuple):
    """The bytes of a storage in other memory, and the tensors that refer to it."""

    begin: int
    end: int
    tensors: list[Tensor]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensors[0].untyped_storage()

    @property
    def bytes(self) -> Tensor:
        """What is copied: uint8 [end - begin]."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.tensors[0].device)
        return empty.set_(self.storage, 0, (self.end - self.begin,), (1,))


def spans(tensors: Iterable[Tensor]) -> list[Span]:
    """The storages of some tensors, one behind the other."""
    of_storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        of_storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    placed = []
    begin = 0
    for found in of_storages.values():
        end = begin + max(map(_end, found))
        placed.append(Span(begin, end, found))
        begin = _aligned(end, SPAN_ALIGNMENT)
    return placed


def views(placed: Iterable[Span], memory: Tensor) -> dict[int, Tensor]:
    """Tensors like those of the spans over memory uint8 [bytes], each by the `id` of the one that it is like."""
    found = {}
    for begin, _, tensors in placed:
        for tensor in tensors:
            start = (memory.storage_offset() + begin) // tensor.itemsize + tensor.storage_offset()
            view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            found[id(tensor)] = view.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())
    return found


def same_place(tensor: Tensor, memory: Tensor, other: Tensor) -> Tensor:
    """A tensor that lies in `memory`, in `other` memory, where it lies as there. Both are uint8."""
    view = torch.empty(0, dtype=tensor.dtype, device=other.device)
    begin = (begin_in(tensor, memory) + other.storage_offset()) // tensor.itemsize
    return view.set_(other.untyped_storage(), begin, tensor.shape, tensor.stride())


def begin_in(tensor: Tensor, memory: Tensor) -> int:
    """The byte of memory uint8 at which a tensor begins that lies there."""
    return int(tensor.storage_offset() * tensor.itemsize - memory.storage_offset())


def refer_to(tensor: Tensor, memory: Tensor, begin: int) -> None:
    """Let a tensor lie in other memory uint8 from this byte on."""
    start = (memory.storage_offset() + begin) // tensor.itemsize
    tensor.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """What contiguous tensors take one behind the other, the next ones behind them included."""
    return sum(_aligned(tensor.nbytes, TENSOR_ALIGNMENT) for tensor in tensors)


def packed_views(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Tensors like these, one behind the other in the last dimension of memory uint8 [..., bytes].

    [..., *shape of the tensor]: with the other dimensions of the memory.
    """
    found = []
    begin = 0
    for tensor in tensors:
        part = memory[..., begin : begin + tensor.nbytes]
        found.append(part.view(tensor.dtype).unflatten(-1, tensor.shape))
        begin += _aligned(tensor.nbytes, TENSOR_ALIGNMENT)
    return found


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _end(tensor: Tensor) -> int:
    """The byte of its storage behind the tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
