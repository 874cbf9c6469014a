"""The stream of weights: when a layer is computed its matrices are in its slot, and those of the next on the way.

In a pass of few rows the experts that its router has chosen are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nanovllm.data.network import ExpertSpec
from nanovllm.device import Device, PitchedCopy
from nanovllm.features.streamed_weights.expert_cache import LastUsed
from nanovllm.features.streamed_weights.host_layers import HostLayer, HostLayers
from nanovllm.kvcache.transfer_order import WeightOrder

WORD = torch.int64  # as which bytes are copied on the device
PRODUCTS = "the products of a streamed layer"
PIECE_BYTES = 64 << 20  # of one row of a copy, whose width CUDA limits


class WeightStream:
    """Implements `layers.causal_lm.LayerWeights`.

    Layers are expected in order, pass after pass. Another order costs a copy that nothing hides, and is exact too.
    """

    def __init__(self, device: Device, layers: HostLayers) -> None:
        self._device = device
        self._layers = layers.of_layer
        self._slots = layers.slots
        self._streamed = list(layers.of_layer)
        self._plan = layers.plan
        self._order = WeightOrder(device)
        self._held: list[int | None] = [None] * len(self._slots)  # the layer that each slot has, or gets, whole
        self._layer: int | None = None  # which is computed now
        self._cache = layers.expert_cache
        self._cached = LastUsed(self._plan.cached_experts)
        self.streamed_bytes = sum(layer.memory.nbytes for layer in self._layers.values())
        self.loaded_bytes = 0  # since the engine was made
        # By layer, if experts are copied alone: their spec, and of each part where it is in the slot and in the cache.
        self._specs: dict[int, ExpertSpec] = {}
        self._places: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for index, layer in self._layers.items():
            if layer.parts and layer.experts is not None and self._cache is not None:
                layer.experts.loads = self
                self._specs[index] = layer.experts.spec
                self._places[index] = list(_places(layer, self._cache))

    def before_layer(self, index: int, rows: int) -> None:
        """See `LayerWeights`. Raises EngineError if a copy has failed.

        A pass of many rows may go on in the layer in which one of few rows has ended: then the layer is copied whole.
        """
        layer = self._layers.get(index)
        is_whole = layer is not None and self._held[layer.slot] == index
        chooses = self._chooses(index, rows)
        if index == self._layer and (layer is None or is_whole or chooses):
            return
        try:
            self._release()
            self._layer = index
            if layer is not None and (is_whole or not chooses):
                self._load(index)
                self._order.before_compute(layer.slot)
                self._declare(PRODUCTS, (self._slots[layer.slot],))
            for following in self._following(index):
                if not self._chooses(following, rows):
                    self._load(following)
        except BaseException:  # an interrupt too: nobody knows what has been copied
            self._reset()
            raise

    def before_experts(self, chosen: Callable[[], Sequence[int]]) -> None:
        """See `layers.experts.ExpertLoads`."""
        assert self._layer is not None
        layer = self._layers[self._layer]
        if self._held[layer.slot] != self._layer:
            try:
                self._bring(layer, chosen())
            except BaseException:
                self._reset()
                raise

    # ---- whole layers

    def _release(self) -> None:
        """The layer that was computed is done with its slot."""
        if self._layer in self._layers:
            slot = self._layers[self._layer].slot
            self._declare(PRODUCTS, (self._slots[slot],))
            self._order.after_compute(slot)
        self._layer = None

    def _following(self, index: int) -> Iterator[int]:
        """The streamed layers after this one whose slots it leaves free, in the order in which they are computed."""
        own = self._layers[index].slot if index in self._layers else None
        first = bisect_left(self._streamed, index if own is None else index + 1)
        for ahead in range(len(self._slots) - (own is not None)):
            layer = self._streamed[(first + ahead) % len(self._streamed)]
            if self._layers[layer].slot == own:
                return
            yield layer

    def _load(self, index: int) -> None:
        """Copy the matrices of a layer into its slot, unless they are there or on the way."""
        layer = self._layers[index]
        if self._held[layer.slot] == index:
            return
        stream = self._order.before_fill(layer.slot)
        for copy in _copies(layer, self._slots[layer.slot]):
            self._device.copy_2d(copy, stream)
        self._order.after_fill(layer.slot)
        self._held[layer.slot] = index
        self.loaded_bytes += layer.memory.nbytes

    # ---- chosen experts

    def _chooses(self, index: int, rows: int) -> bool:
        """Whether the experts that rows choose in a layer are copied alone."""
        return index in self._specs and self._plan.chooses(rows, self._specs[index])

    def _bring(self, layer: HostLayer, chosen: Sequence[int]) -> None:
        """Copy experts to the cache that it lacks, then all that are chosen from there to their places in the slot."""
        assert self._layer is not None
        cache = self._order.cache
        places, missing = self._cached.take((self._layer, expert) for expert in chosen)
        if missing:
            self._fill_cache(layer, [(expert, places[index, expert]) for index, expert in missing])
        if self._held[layer.slot] is not None:  # a copy may be under way
            self._order.before_compute(layer.slot)
            self._held[layer.slot] = None
        parts = self._places[self._layer]
        targets = [in_slot[expert] for in_slot, _ in parts for _, expert in places]
        sources = [in_cache[place] for _, in_cache in parts for place in places.values()]
        self._declare("chosen experts", sources, targets)
        torch._foreach_copy_(targets, sources)
        self._order.after_compute(cache)

    def _fill_cache(self, layer: HostLayer, experts: Sequence[tuple[int, int]]) -> None:
        """Copy experts to the cache, from where compute takes them next. experts: their numbers and places."""
        assert self._cache is not None
        cache = self._order.cache
        size = layer.memory.shape[1]
        stream = self._order.before_fill(cache)
        for expert, place in experts:
            copy = PitchedCopy(self._cache[place], layer.memory[expert], size, size, size, 1, "h2d")
            self._device.copy_2d(copy, stream)
        self._order.after_fill(cache)
        self._order.before_compute(cache)
        self.loaded_bytes += len(experts) * size

    # ---- helpers

    def _declare(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> None:
        self._device.declare_kernel(name, reads, writes)
        self._device.end_kernel()

    def _reset(self) -> None:
        """Wait for the copies, failed or not, after which no slot has a layer, and the cache no expert."""
        self._order.reset()
        self._held = [None] * len(self._slots)
        self._cached.clear()
        self._layer = None


def _copies(layer: HostLayer, slot: Tensor) -> Iterator[PitchedCopy]:
    """The copies of a layer to its slot."""
    for part in layer.parts:
        experts, width = part.in_slot.shape
        pitches = part.in_slot.stride(0), part.on_host.stride(0)
        yield PitchedCopy(part.in_slot, part.on_host, *pitches, width, experts, "h2d")
    if layer.parts:
        return
    memory = layer.memory.flatten()
    size = memory.nbytes
    whole = size // PIECE_BYTES
    if whole:
        yield PitchedCopy(slot, memory, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, whole, "h2d")
    if rest := size - whole * PIECE_BYTES:
        yield PitchedCopy(slot[size - rest :], memory[size - rest :], rest, rest, rest, 1, "h2d")


def _places(layer: HostLayer, cache: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each part of an expert its places in the slot and in the cache, [experts, words] and [places, words]."""
    begin = 0
    for part in layer.parts:
        end = begin + part.in_slot.shape[1]
        both = part.in_slot, cache[:, begin:end]
        has_words = all(value % WORD.itemsize == 0 for own in both for value in (*own.stride()[:1], begin, end))
        yield both if not has_words else (both[0].view(WORD), both[1].view(WORD))
        begin = end
