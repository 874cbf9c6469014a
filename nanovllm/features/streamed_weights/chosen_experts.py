"""The experts that the rows of a pass have chosen: brought to where kernels read them, or left to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.device import Device, Event, Mark, PitchedCopy, Stream
from nanovllm.features.streamed_weights.expert_cache import Expert, UsedMost
from nanovllm.features.streamed_weights.host_layer import HostLayer
from nanovllm.features.streamed_weights.host_layers import HostLayers
from nanovllm.features.streamed_weights.host_products import Chosen, HostExchange, HostExperts, chosen_numbers
from nanovllm.features.streamed_weights.uses import Unit
from nanovllm.kvcache.transfer_order import WeightOrder
from nanovllm.layers.experts import Routing

WORD = torch.int64  # as which bytes are copied on the device
MOST_REPLACED = 2  # experts of a layer that a pass brings to the cache behind


class LayerMemory(Protocol):
    """What is where of the layer that is computed."""

    def take_memory(self, layer: HostLayer) -> None:
        """Experts of the layer are written to where kernels read them."""
        ...

    def expect_chosen(self, units: Sequence[Unit]) -> None:
        """The host needs these units of the layer next, which are on disk."""
        ...

    def reset(self) -> None:
        """One of them cannot be read."""
        ...


class ChosenExperts:
    """The expert cache of the device, and what experts take from there.

    Of a network whose products run on the host, that computes what the cache lacks.
    """

    def __init__(self, device: Device, layers: HostLayers, order: WeightOrder, exchange: HostExchange | None) -> None:
        self._device = device
        self._order = order
        self._exchange = exchange
        self._image = layers.image
        self._in_place = layers.plan.in_place
        self._cache = layers.expert_cache
        self._cached = UsedMost(layers.plan.cached_experts)
        self._arriving: list[tuple[Event, Mark, list[Expert]]] = []  # copied behind
        self.loaded_bytes = 0
        self.places: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer, see `_places`
        if self._cache is not None:
            self.places = {index: list(_places(layer, self._cache)) for index, layer in layers.of_layer.items()}

    def bring(
        self, index: int, layer: HostLayer, x: Tensor, routing: Routing, memory: LayerMemory
    ) -> HostExperts | None:
        """See `layers.experts.ExpertLoads`."""
        if self._exchange is not None:
            return self._divide(index, layer, Chosen(self._exchange, x, routing), self._exchange, memory)
        self._bring_all(index, layer, chosen_numbers(routing), memory)
        return None

    def clear(self) -> None:
        """Forget what the cache has. No copy is under way."""
        self._cached.clear()
        self._arriving = []

    def _bring_all(self, index: int, layer: HostLayer, chosen: Sequence[int], memory: LayerMemory) -> None:
        """Copy experts to the cache that it lacks, then all that are chosen from there to where kernels read them."""
        places, missing = self._cached.take((index, expert) for expert in chosen)
        if layer.disk is not None:
            layer.disk.use([expert for _, expert in missing])
        if missing:
            self._fill_cache(layer, {expert: places[index, expert] for _, expert in missing})
            self._order.after_fill(self._order.cache)
            self._order.before_compute(self._order.cache)
        memory.take_memory(layer)
        self._place(index, layer, {expert: place for (_, expert), place in places.items()})

    def _divide(
        self, index: int, layer: HostLayer, chosen: Chosen, exchange: HostExchange, memory: LayerMemory
    ) -> HostExperts | None:
        """Let the device compute the chosen experts that its cache has, and bring behind what it had better have.

        Returns the others, which are computed on the host.
        """
        assert layer.host_experts is not None
        places: dict[int, int] = {}
        replacements: list[tuple[Expert, int]] = []
        if not self._in_place:
            self._note_arrivals()
            found, replacements = self._cached.follow([(index, expert) for expert in chosen.numbers], MOST_REPLACED)
            places = {expert: place for (_, expert), place in found.items()}
        on_host = [expert for expert in chosen.numbers if expert not in places]
        if layer.disk is not None and layer.has_single_experts:
            layer.disk.use(on_host)
            memory.expect_chosen(layer.disk.units_of(on_host))
        if places:
            memory.take_memory(layer)
            self._place(index, layer, places)
        if replacements:
            self._fill_cache(layer, {expert: place for (_, expert), place in replacements})
            self._arriving.append((*self._order.after_fill_behind(), [expert for expert, _ in replacements]))
        exchange.num_bytes += len(on_host) * layer.memory.nbytes // layer.host_experts[0].num_experts
        at_hand = partial(_at_hand, layer, memory)
        return HostExperts(chosen, set(on_host), layer.host_experts, exchange, at_hand) if on_host else None

    def _note_arrivals(self) -> None:
        """Experts whose copies have ended may be used."""
        while self._arriving and self._arriving[0][1].seconds() is not None:
            event, _, experts = self._arriving.pop(0)
            self._order.before_arrived(event)
            for expert in experts:
                self._cached.arrived(expert)

    def _fill_cache(self, layer: HostLayer, places: Mapping[int, int]) -> None:
        """Copy experts to their places in the cache."""
        assert self._cache is not None
        cache = self._cache
        size = layer.memory.shape[1]
        stream = self._order.before_fill(self._order.cache)
        if layer.disk is None:
            self._copy((copy_of(cache[place], layer.memory[expert], size) for expert, place in places.items()), stream)
        else:
            for found in layer.disk.in_turn(places):
                pairs = found.items()
                self._copy((copy_of(cache[places[expert]], memory, size) for expert, memory in pairs), stream)
                layer.disk.release(found, self._order.after_copies())
        self.loaded_bytes += len(places) * size

    def _copy(self, copies: Iterable[PitchedCopy], stream: Stream) -> None:
        for copy in copies:
            self._device.copy_2d(copy, stream)

    def _place(self, index: int, layer: HostLayer, places: Mapping[int, int]) -> None:
        """Bring experts from their places in the cache to where kernels read them."""
        if self._image is not None:
            self._convert(layer, places, self._image)
            return
        parts = self.places[index]
        targets = [in_slot[expert] for in_slot, _ in parts for expert in places]
        sources = [in_cache[place] for _, in_cache in parts for place in places.values()]
        self._device.declare_kernel("chosen experts", sources, targets)
        torch._foreach_copy_(targets, sources)
        self._device.end_kernel()
        self._order.after_compute(self._order.cache)

    def _convert(self, layer: HostLayer, places: Mapping[int, int], image: Tensor) -> None:
        assert self._cache is not None
        rows = [self._cache[place, : layer.memory.shape[1]] for place in places.values()]
        self._device.declare_kernel("convert experts", rows, (image,))
        layer.convert_experts([*places], torch.stack(rows))
        self._device.end_kernel()
        self._order.after_compute(self._order.cache)


@contextmanager
def _at_hand(layer: HostLayer, memory: LayerMemory, expert: int) -> Iterator[None]:
    """A context in which an expert is where the host computes it."""
    if layer.disk is None:
        yield
        return
    number = expert if layer.has_single_experts else 0
    try:
        try:
            layer.lie_in(number, layer.disk.need([number])[number])
        except BaseException:
            memory.reset()
            raise
        yield
    finally:
        layer.disk.release([number])


def copy_of(target: Tensor, source: Tensor, size: int) -> PitchedCopy:
    """The copy of so many bytes of memory uint8 [bytes] to the device."""
    return PitchedCopy(target, source, size, size, size, 1, "h2d")


def _places(layer: HostLayer, cache: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each part of an expert its places in the slot and in the cache, [experts, words] and [places, words]."""
    for begin, in_slot in layer.parts:
        end = begin + in_slot.shape[1]
        both = in_slot, cache[:, begin:end]
        has_words = all(value % WORD.itemsize == 0 for own in both for value in (*own.stride()[:1], begin, end))
        yield both if not has_words else (both[0].view(WORD), both[1].view(WORD))
