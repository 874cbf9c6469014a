"""Where a checkpoint tensor lands in the network's own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor's place: a view into a parameter, and the shape the checkpoint must have.

    The view may be wider than the tensor (one norm weight shared by several heads); writing broadcasts.
    """

    view: Tensor
    shape: tuple[int, ...]

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (of `shape`, any floating dtype, any device) into place, converting on the way."""
        self.view.copy_(tensor)


NamedSlots = Iterator[tuple[str, WeightSlot]]


def whole(view: Tensor) -> WeightSlot:
    """The slot of a checkpoint tensor that has exactly the shape of `view`."""
    return WeightSlot(view, tuple(view.shape))
