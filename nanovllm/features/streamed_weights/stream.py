"""The stream of weights: when a layer is computed its matrices are in its slot, and those of the next on the way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from torch import Tensor

from nanovllm.device import Device, PitchedCopy
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights.host_layers import HostLayers
from nanovllm.kvcache.transfer_order import WeightOrder

PIECE_BYTES = 64 << 20  # of one row of a copy, whose width CUDA limits


class WeightStream:
    """Implements `layers.causal_lm.LayerWeights`.

    Layers are expected in order, pass after pass. Another order costs a copy that nothing hides, and is exact too.
    """

    def __init__(self, device: Device, layers: HostLayers) -> None:
        self._device = device
        self._memory = layers.memory
        self._slots = layers.slots
        self._streamed = layers.plan.streamed
        self._slot_of = {layer: order % len(self._slots) for order, layer in enumerate(self._streamed)}
        self._order = WeightOrder(device)
        self._held: list[int | None] = [None] * len(self._slots)  # the layer that each slot has, or gets
        self._layer: int | None = None  # which is computed now
        self.loaded_bytes = 0

    def before_layer(self, index: int) -> None:
        """See `LayerWeights`. Raises EngineError if a copy has failed."""
        if index == self._layer:
            return
        self._release()
        self._layer = index
        slot = self._slot_of.get(index)
        try:
            if slot is not None:
                self._load(index)
                self._order.before_compute(slot)
                self._declare_use(slot)
            for following in self._following(index):
                self._load(following)
        except EngineError:
            self._reset()
            raise

    def _release(self) -> None:
        """The layer that was computed is done with its slot."""
        if self._layer in self._slot_of:
            slot = self._slot_of[self._layer]
            self._declare_use(slot)
            self._order.after_compute(slot)
        self._layer = None

    def _following(self, index: int) -> Iterator[int]:
        """The streamed layers after this one whose slots it leaves free, in the order in which they are computed."""
        own = self._slot_of.get(index)
        first = bisect_left(self._streamed, index if own is None else index + 1)
        for ahead in range(len(self._slots) - (own is not None)):
            layer = self._streamed[(first + ahead) % len(self._streamed)]
            if self._slot_of[layer] == own:
                return
            yield layer

    def _load(self, layer: int) -> None:
        """Copy the matrices of a layer into its slot, unless they are there or on the way."""
        slot = self._slot_of[layer]
        if self._held[slot] == layer:
            return
        stream = self._order.before_fill(slot)
        memory = self._memory[layer]
        for dst, src, width, height in _rows(self._slots[slot], memory):
            self._device.copy_2d(PitchedCopy(dst, src, width, width, width, height, "h2d"), stream)
        self._order.after_fill(slot)
        self._held[slot] = layer
        self.loaded_bytes += memory.nbytes

    def _declare_use(self, slot: int) -> None:
        self._device.declare_kernel("the products of a streamed layer", reads=(self._slots[slot],))
        self._device.end_kernel()

    def _reset(self) -> None:
        """Wait for the copies, failed or not, after which no slot has a layer."""
        self._order.reset()
        self._held = [None] * len(self._slots)
        self._layer = None


def _rows(slot: Tensor, memory: Tensor) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Destination, source, width and height of the copies of a layer: whole pieces, then the rest."""
    size = memory.nbytes
    whole = size // PIECE_BYTES
    if whole:
        yield slot, memory, PIECE_BYTES, whole
    if rest := size - whole * PIECE_BYTES:
        yield slot[size - rest :], memory[size - rest :], rest, 1
