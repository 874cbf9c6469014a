"""The stream of weights: when a layer is computed its matrices are in its slot, and those of the next on the way.

In a pass of few rows products may run on the host, and of a layer with experts the chosen ones alone are brought.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from nanovllm.data.network import ExpertSpec
from nanovllm.device import Busy, Device, Event, Mark, PitchedCopy, Stream
from nanovllm.features.streamed_weights.disk_units import DiskLayer, DiskUnits
from nanovllm.features.streamed_weights.expert_cache import Expert, UsedMost
from nanovllm.features.streamed_weights.host_cache import Unit
from nanovllm.features.streamed_weights.host_layers import HostLayer, HostLayers
from nanovllm.features.streamed_weights.host_products import (
    Chosen,
    HostExchange,
    HostExperts,
    chosen_numbers,
)
from nanovllm.features.streamed_weights.host_share import HostShare, StepCost
from nanovllm.kvcache.transfer_order import WeightOrder
from nanovllm.layers.experts import Routing
from nanovllm.memory.weights import MOST_HOST_ROWS

WORD = torch.int64  # as which bytes are copied on the device
PRODUCTS = "the products of a streamed layer"
PIECE_BYTES = 64 << 20  # of one row of a copy, whose width CUDA limits
MOST_REPLACED = 2  # experts of a layer that a pass brings to the cache behind
LAYERS_AHEAD = 2  # that are read from disk, if there is room
GUESSED_LINK = 25e9  # bytes/s, until steps have been measured
GUESSED_HOST = 25e9

# Of a layer in a pass: all of it is copied, or the experts that its router chooses, or its products run on the host.
Way = Literal["whole", "chosen", "host"]


class WeightStream:
    """Implements `layers.causal_lm.LayerWeights`.

    Layers are expected in order, pass after pass. Another order costs a copy that nothing hides, and is exact too.
    """

    def __init__(self, device: Device, layers: HostLayers) -> None:
        self._device = device
        self._layers = layers.of_layer
        self._slots = layers.slots
        self._image = layers.image
        self._streamed = list(layers.of_layer)
        self._plan = layers.plan
        self._order = WeightOrder(device)
        self._held: list[int | None] = [None] * len(self._slots)  # the layer that each slot has, or gets, whole
        self._converted: int | None = None  # the layer that the image has whole
        self._layer: int | None = None  # which is computed now
        self._cache = layers.expert_cache
        self._cached = UsedMost(self._plan.cached_experts)
        self._arriving: list[tuple[Event, Mark, list[Expert]]] = []  # copied behind
        self.streamed_bytes = sum(layer.memory.nbytes for layer in self._layers.values())
        self.loaded_bytes = 0  # since the engine was made
        self.host_bytes = 0  # with which the host has multiplied since then
        # By layer, if experts are brought alone: their spec, and of each part where it is in the slot and in the cache.
        self._specs: dict[int, ExpertSpec] = {}
        self._places: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.uses_host = self._plan.host_products
        self._exchange: HostExchange | None = None
        self._share: HostShare | None = None  # None: no layer is computed on the host, or all are
        self._pass: _Pass | None = None  # the one that runs, if its times are followed
        self._ways: tuple[int, Mapping[int, Way]] | None = None  # of the streamed layers in passes of so many rows
        self._slot: int | None = None  # which the layer that is computed now uses
        disks = [layer.disk for layer in layers.of_layer.values() if layer.disk is not None]
        self._on_disk = list({id(disk.units): disk.units for disk in disks}.values())
        self._on_host: DiskLayer | None = None  # the layer on disk that is computed in host memory
        self._file = layers.file
        if self._plan.host_products:
            self._multiply_on_host()
        for index, layer in self._layers.items():
            self._take_experts(index, layer)

    def _multiply_on_host(self) -> None:
        layers = self._layers.values()
        self._exchange = HostExchange(self._device, MOST_HOST_ROWS * max(layer.result_bytes for layer in layers))
        for layer in layers:
            layer.multiply_by(self._exchange)
        if not self._plan.in_place and all(layer.experts is None for layer in layers):
            self._share = HostShare([layer.memory.nbytes for layer in layers], GUESSED_LINK, GUESSED_HOST)

    def _take_experts(self, index: int, layer: HostLayer) -> None:
        experts = layer.experts
        if experts is None or not (self._plan.in_place or (layer.has_single_experts and self._cache is not None)):
            return
        experts.loads = self
        self._specs[index] = experts.spec
        if self._cache is not None:
            self._places[index] = list(_places(layer, self._cache))

    @property
    def read_bytes(self) -> int:
        """See `LayerWeights`."""
        return 0 if self._file is None else self._file.num_bytes_read

    def close(self) -> None:
        """See `LayerWeights`."""
        if self._file is not None:
            self._file.close()

    def before_layer(self, index: int, rows: int) -> None:
        """See `LayerWeights`. Raises EngineError if a copy has failed.

        A pass of many rows may go on in the layer in which one of few rows has ended: then the layer is copied whole.
        """
        if self._share is not None:
            self._follow_times(self._share, index, rows)
        layer = self._layers.get(index)
        ways = self._ways_of(rows)
        way = None if layer is None else "whole" if self._has_whole(index) else ways[index]
        if index == self._layer and (way != "whole" or self._has_whole(index)):
            return
        try:
            self._release()
            self._layer = index
            if layer is not None:
                if way == "host":
                    self._hold_on_host(layer)
                layer.compute_on_host(way == "host")
                self.host_bytes += layer.memory.nbytes if way == "host" else 0
            if way == "whole":
                self._bring_whole(index)
            for following in self._following(index, ways):
                if (disk := self._layers[following].disk) is None or disk.is_there:
                    self._load(following)
            if self._on_disk:
                self._expect(index, ways)
        except BaseException:  # an interrupt too: nobody knows what has been copied
            self._reset()
            raise

    def before_experts(self, x: Tensor, routing: Routing) -> HostExperts | None:
        """See `layers.experts.ExpertLoads`."""
        assert self._layer is not None
        layer = self._layers[self._layer]
        if self._has_whole(self._layer):
            return None
        try:
            if self._exchange is not None:
                return self._divide(layer, Chosen(self._exchange, x, routing), self._exchange)
            self._bring(layer, chosen_numbers(routing))
            return None
        except BaseException:
            self._reset()
            raise

    @property
    def streamed(self) -> Sequence[int]:
        """See `LayerWeights`."""
        return self._streamed

    def is_recorded(self, rows: int) -> bool:
        """See `LayerWeights`."""
        if self._share is not None:
            self._end_pass(self._share)  # which may change the ways
        return "host" not in self._ways_of(rows).values()

    def _ways_of(self, rows: int) -> Mapping[int, Way]:
        if self._ways is None or self._ways[0] != rows:
            on_host = set(self._share.layers(rows) if self._share is not None and rows <= MOST_HOST_ROWS else ())
            ways = {index: self._way(index, rows, order in on_host) for order, index in enumerate(self._streamed)}
            self._ways = rows, ways
        return self._ways[1]

    def _way(self, index: int, rows: int, on_host: bool) -> Way:
        spec = self._specs.get(index)
        if spec is not None:
            return "chosen" if self._plan.chooses(rows, spec) else "whole"
        return "host" if on_host or (self._plan.in_place and self._plan.multiplies(rows)) else "whole"

    # ---- whole layers

    def _has_whole(self, index: int) -> bool:
        """Whether all of a streamed layer is where kernels read it, or on the way there."""
        return index == (self._held[self._layers[index].slot] if self._image is None else self._converted)

    def _release(self) -> None:
        """The layer that was computed is done with its slot."""
        if self._slot is not None:
            self._declare(PRODUCTS, (self._slots[self._slot],))
            self._order.after_compute(self._slot)
        if self._on_host is not None:
            self._on_host.release([0])
            self._on_host = None
        self._layer = None
        self._slot = None

    def _bring_whole(self, index: int) -> None:
        """Let compute wait for a layer's copy, and convert it if the kernels read another form."""
        layer = self._layers[index]
        slot = self._slots[layer.slot]
        if self._image is None:
            self._load(index)
            self._order.before_compute(layer.slot)
            self._declare(PRODUCTS, (slot,))
            self._slot = layer.slot
        elif self._converted != index:
            self._load(index)
            self._order.before_compute(layer.slot)
            self._declare("convert a layer", (slot,), (self._image,))
            layer.convert()
            self._order.after_compute(layer.slot)
            self._converted = index

    def _following(self, index: int, ways: Mapping[int, Way]) -> Iterator[int]:
        """The next layers that are copied whole, in the order in which they are computed, as far as slots are free."""
        needed = set() if self._slot is None else {self._slot}
        first = bisect_left(self._streamed, index + 1)
        for following in (*self._streamed[first:], *self._streamed[:first]):
            if len(needed) == len(self._slots) or following == index:
                return
            slot = self._layers[following].slot
            way = ways[following]
            if way == "host" or (way == "chosen" and self._image is not None):
                continue
            if slot in needed:
                return
            needed.add(slot)
            if way == "whole":
                yield following

    def _load(self, index: int) -> None:
        """Copy the matrices of a layer into its slot, unless they are there or on the way."""
        layer = self._layers[index]
        if self._held[layer.slot] == index:
            return
        slot = self._slots[layer.slot]
        stream = self._order.before_fill(layer.slot)
        if layer.disk is None:
            self._copy(_copies(layer, slot), stream)
        else:
            self._held[layer.slot] = None
            for found in layer.disk.in_turn():
                for number, memory in found.items():
                    self._copy(_copies_of_unit(layer, number, memory, slot), stream)
                layer.disk.release(found, self._order.after_copies())
        self._order.after_fill(layer.slot)
        self._held[layer.slot] = index
        self.loaded_bytes += layer.memory.nbytes

    def _copy(self, copies: Iterable[PitchedCopy], stream: Stream) -> None:
        for copy in copies:
            self._device.copy_2d(copy, stream)

    # ---- layers on disk

    def _hold_on_host(self, layer: HostLayer) -> None:
        """The layer is computed where it lies on the host, until another one is."""
        if layer.disk is not None:
            self._on_host = layer.disk
            layer.lie_in(0, layer.disk.need([0])[0])

    @contextmanager
    def _at_hand(self, layer: HostLayer, expert: int) -> Iterator[None]:
        """A context in which an expert is where the host computes it."""
        if layer.disk is None:
            yield
            return
        number = expert if layer.has_single_experts else 0
        try:
            try:
                layer.lie_in(number, layer.disk.need([number])[number])
            except BaseException:
                self._reset()
                raise
            yield
        finally:
            layer.disk.release([number])

    def _expect(self, index: int, ways: Mapping[int, Way], first: Sequence[Unit] = ()) -> None:
        """Begin to read what comes next: these units of the layer, and those of the layers behind it."""
        begin = bisect_left(self._streamed, index + 1)
        behind = [other for other in (*self._streamed[begin:], *self._streamed[:begin]) if other != index]
        own = self._layers[index].disk if index in self._layers else None
        for units in self._on_disk:
            wanted = [*first] if own is not None and own.units is units else []
            for other in islice((other for other in behind if self._reads(other, units)), LAYERS_AHEAD):
                wanted += self._next_units(other, ways[other])
            units.expect(wanted)

    def _next_units(self, index: int, way: Way) -> Sequence[Unit]:
        """What is probably read of a layer: of chosen experts those that the host computed last."""
        disk = self._layers[index].disk
        assert disk is not None
        if way == "chosen":
            return () if self._exchange is None else disk.likely()
        return disk.everything

    def _read_chosen(self, layer: HostLayer, experts: Sequence[int]) -> None:
        """The host computes experts of the layer next."""
        if layer.disk is not None and layer.has_single_experts:
            assert self._layer is not None and self._ways is not None
            layer.disk.use(experts)
            self._expect(self._layer, self._ways[1], layer.disk.units_of(experts))

    def _reads(self, index: int, units: DiskUnits) -> bool:
        """Whether the layer is among these units, and not in its slot."""
        disk = self._layers[index].disk
        return disk is not None and disk.units is units and not self._has_whole(index)

    # ---- chosen experts

    def _bring(self, layer: HostLayer, chosen: Sequence[int]) -> None:
        """Copy experts to the cache that it lacks, then all that are chosen from there to where kernels read them."""
        assert self._layer is not None
        places, missing = self._cached.take((self._layer, expert) for expert in chosen)
        if layer.disk is not None:
            layer.disk.use([expert for _, expert in missing])
        if missing:
            self._fill_cache(layer, [(expert, places[index, expert]) for index, expert in missing])
            self._order.after_fill(self._order.cache)
            self._order.before_compute(self._order.cache)
        self._place(layer, {expert: place for (_, expert), place in places.items()})

    def _divide(self, layer: HostLayer, chosen: Chosen, exchange: HostExchange) -> HostExperts | None:
        """Let the device compute the chosen experts that its cache has, and bring behind what it had better have.

        Returns the others, which are computed on the host.
        """
        assert self._layer is not None
        assert layer.host_experts is not None
        places: dict[int, int] = {}
        replacements: list[tuple[Expert, int]] = []
        if not self._plan.in_place:
            self._note_arrivals()
            experts = [(self._layer, expert) for expert in chosen.numbers]
            found, replacements = self._cached.follow(experts, MOST_REPLACED)
            places = {expert: place for (_, expert), place in found.items()}
        on_host = [expert for expert in chosen.numbers if expert not in places]
        self._read_chosen(layer, on_host)
        if places:
            self._place(layer, places)
        if replacements:
            self._fill_cache(layer, [(expert, place) for (_, expert), place in replacements])
            self._arriving.append((*self._order.after_fill_behind(), [expert for expert, _ in replacements]))
        self.host_bytes += len(on_host) * layer.memory.nbytes // self._specs[self._layer].num_experts
        at_hand = partial(self._at_hand, layer)
        return HostExperts(chosen, set(on_host), layer.host_experts, exchange, at_hand) if on_host else None

    def _note_arrivals(self) -> None:
        """Experts whose copies have ended may be used."""
        while self._arriving and self._arriving[0][1].seconds() is not None:
            event, _, experts = self._arriving.pop(0)
            self._order.before_arrived(event)
            for expert in experts:
                self._cached.arrived(expert)

    def _fill_cache(self, layer: HostLayer, experts: Sequence[tuple[int, int]]) -> None:
        """Copy experts to the cache. experts: their numbers and places."""
        assert self._cache is not None
        size = layer.memory.shape[1]
        stream = self._order.before_fill(self._order.cache)
        places = dict(experts)
        if layer.disk is None:
            self._copy((_copy_of(self._cache[place], layer.memory[expert], size) for expert, place in experts), stream)
        else:
            for found in layer.disk.in_turn(places):
                pairs = found.items()
                self._copy((_copy_of(self._cache[places[expert]], memory, size) for expert, memory in pairs), stream)
                layer.disk.release(found, self._order.after_copies())
        self.loaded_bytes += len(experts) * size

    def _place(self, layer: HostLayer, places: Mapping[int, int]) -> None:
        """Bring experts from their places in the cache to where kernels read them."""
        assert self._layer is not None
        if self._image is not None:
            self._convert_experts(layer, places)
            return
        if self._held[layer.slot] is not None:  # a copy may be under way
            self._order.before_compute(layer.slot)
            self._held[layer.slot] = None
        self._slot = layer.slot
        parts = self._places[self._layer]
        targets = [in_slot[expert] for in_slot, _ in parts for expert in places]
        sources = [in_cache[place] for _, in_cache in parts for place in places.values()]
        self._declare("chosen experts", sources, targets)
        torch._foreach_copy_(targets, sources)
        self._order.after_compute(self._order.cache)

    def _convert_experts(self, layer: HostLayer, places: Mapping[int, int]) -> None:
        assert self._cache is not None and self._image is not None
        size = layer.memory.shape[1]
        rows = [self._cache[place, :size] for place in places.values()]
        self._declare("convert experts", rows, (self._image,))
        layer.convert_experts([*places], torch.stack(rows))
        self._converted = None
        self._order.after_compute(self._order.cache)

    # ---- which layers the host computes

    def _follow_times(self, share: HostShare, index: int, rows: int) -> None:
        """Note when a pass began, and its last layer."""
        assert self._exchange is not None
        if self._pass is not None and index < self._pass.index:
            self._end_pass(share)
        now = time.perf_counter()
        if self._pass is None:
            link = self._device.link_busy()
            self._pass = _Pass(now, now, rows, index, link, self.host_bytes, self._exchange.seconds)
        self._pass.index = index
        self._pass.until = now
        self._pass.rows = max(self._pass.rows, rows)

    def _end_pass(self, share: HostShare) -> None:
        """Tell the policy what the last pass took, unless it knows."""
        assert self._exchange is not None
        if self._pass is not None and self._pass.rows <= MOST_HOST_ROWS:
            share.observe(self._pass.cost(self._device.link_busy(), self.host_bytes, self._exchange))
            self._ways = None
        self._pass = None

    # ---- helpers

    def _declare(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> None:
        self._device.declare_kernel(name, reads, writes)
        self._device.end_kernel()

    def _reset(self) -> None:
        """Wait for the copies, failed or not, after which no slot has a layer, and the cache no expert."""
        self._order.reset()
        self._held = [None] * len(self._slots)
        self._converted = None
        self._cached.clear()
        self._arriving = []
        for units in self._on_disk:
            units.reset()
        self._on_host = None
        self._layer = None
        self._slot = None


@dataclass(slots=True)
class _Pass:
    """What is known of a pass: when it began, when its last layer did, and the counters before it."""

    since: float
    until: float
    rows: int
    index: int  # of its last layer
    link: Busy
    host_bytes: int
    host_seconds: float

    def cost(self, link: Busy, host_bytes: int, exchange: HostExchange) -> StepCost:
        """Of a pass that has ended. link, host_bytes: until now."""
        link = link - self.link
        host_seconds = exchange.seconds - self.host_seconds
        seconds = self.until - self.since  # without what follows the last layer: it may be a long wait
        return StepCost(self.rows, seconds, link.num_bytes, link.seconds, host_bytes - self.host_bytes, host_seconds)


def _copies(layer: HostLayer, slot: Tensor) -> Iterator[PitchedCopy]:
    """The copies of a layer to its slot."""
    for begin, in_slot in layer.parts:
        experts, width = in_slot.shape
        on_host = layer.memory[:, begin : begin + width]
        yield PitchedCopy(in_slot, on_host, in_slot.stride(0), on_host.stride(0), width, experts, "h2d")
    if not layer.parts:
        yield from _pieces(slot, layer.memory.flatten())


def _copies_of_unit(layer: HostLayer, number: int, memory: Tensor, slot: Tensor) -> Iterator[PitchedCopy]:
    """The copies to a slot of a unit that has been read into memory."""
    for begin, in_slot in layer.parts:
        yield _copy_of(in_slot[number], memory[begin:], in_slot.shape[1])
    if not layer.parts:
        size = layer.memory.shape[-1]
        yield from _pieces(slot[number * size :], memory[:size])


def _pieces(target: Tensor, source: Tensor) -> Iterator[PitchedCopy]:
    """The copies of memory uint8 [bytes] to the beginning of another."""
    size = source.nbytes
    whole = size // PIECE_BYTES
    if whole:
        yield PitchedCopy(target, source, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, whole, "h2d")
    if rest := size - whole * PIECE_BYTES:
        yield _copy_of(target[size - rest :], source[size - rest :], rest)


def _copy_of(target: Tensor, source: Tensor, size: int) -> PitchedCopy:
    return PitchedCopy(target, source, size, size, size, 1, "h2d")


def _places(layer: HostLayer, cache: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each part of an expert its places in the slot and in the cache, [experts, words] and [places, words]."""
    for begin, in_slot in layer.parts:
        end = begin + in_slot.shape[1]
        both = in_slot, cache[:, begin:end]
        has_words = all(value % WORD.itemsize == 0 for own in both for value in (*own.stride()[:1], begin, end))
        yield both if not has_words else (both[0].view(WORD), both[1].view(WORD))
