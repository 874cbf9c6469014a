"""The stream of weights: when a layer is computed its matrices are in its slot, and those of the next on the way.

In a pass of few rows products may run on the host, and of a layer with experts the chosen ones alone are brought.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from torch import Tensor

from nanovllm.data.network import ExpertSpec
from nanovllm.device import Device, PitchedCopy, Stream
from nanovllm.features.streamed_weights.chosen_experts import ChosenExperts, copy_of
from nanovllm.features.streamed_weights.disk_units import DiskLayer, DiskUnits
from nanovllm.features.streamed_weights.host_layer import HostLayer
from nanovllm.features.streamed_weights.host_layers import HostLayers
from nanovllm.features.streamed_weights.host_products import HostExchange, HostExperts
from nanovllm.features.streamed_weights.host_share import HostShare
from nanovllm.features.streamed_weights.uses import Unit
from nanovllm.features.streamed_weights.ways import LayerWays, PassTimes, Way
from nanovllm.kvcache.transfer_order import WeightOrder
from nanovllm.layers.experts import Routing
from nanovllm.memory.weights import MOST_HOST_ROWS

PRODUCTS = "the products of a streamed layer"
PIECE_BYTES = 64 << 20  # of one row of a copy, whose width CUDA limits
LAYERS_AHEAD = 2  # that are read from disk, if there is room
GUESSED_RATE = 25e9  # bytes/s of link and host, until steps have been measured


class WeightStream:
    """Implements `layers.causal_lm.LayerWeights`, `layers.experts.ExpertLoads` and `chosen_experts.LayerMemory`.

    Layers are expected in order, pass after pass. Another order costs a copy that nothing hides, and is exact too.
    """

    def __init__(self, device: Device, layers: HostLayers) -> None:
        self._device = device
        self._layers = layers.of_layer
        self._slots = layers.slots
        self._image = layers.image
        self.streamed: Sequence[int] = list(layers.of_layer)  # see `LayerWeights`
        self.uses_host = layers.plan.host_products  # see `ExpertLoads`
        self._order = WeightOrder(device)
        self._held: list[int | None] = [None] * len(self._slots)  # the layer that each slot has, or gets, whole
        self._converted: int | None = None  # the layer that the image has whole
        self._layer: int | None = None  # which is computed now
        self._slot: int | None = None  # which that one uses
        self.streamed_bytes = sum(layer.memory.nbytes for layer in self._layers.values())
        self._loaded_bytes = 0  # of whole layers
        self._file = layers.file
        disks = [layer.disk for layer in self._layers.values() if layer.disk is not None]
        self._on_disk = list({id(disk.units): disk.units for disk in disks}.values())
        self._on_host: DiskLayer | None = None  # the layer on disk that is computed in host memory
        self._exchange = self._make_exchange() if self.uses_host else None
        self._chosen = ChosenExperts(device, layers, self._order, self._exchange)
        self._ways = self._make_ways(layers)

    def _make_exchange(self) -> HostExchange:
        most = max(layer.result_bytes for layer in self._layers.values())
        exchange = HostExchange(self._device, MOST_HOST_ROWS * most)
        for layer in self._layers.values():
            layer.multiply_by(exchange)
        return exchange

    def _make_ways(self, layers: HostLayers) -> LayerWays:
        plan = layers.plan
        specs: dict[int, ExpertSpec] = {}
        for index, layer in self._layers.items():
            is_alone = layer.has_single_experts and layers.expert_cache is not None
            if layer.experts is not None and (plan.in_place or is_alone):
                layer.experts.loads = self
                specs[index] = layer.experts.spec
        if self._exchange is None or plan.in_place or any(layer.experts is not None for layer in self._layers.values()):
            return LayerWays(plan, specs, None, None)
        share = HostShare([layer.memory.nbytes for layer in self._layers.values()], GUESSED_RATE, GUESSED_RATE)
        return LayerWays(plan, specs, share, PassTimes(self._device, self._exchange, self.streamed[-1]))

    # ---- what a model asks for

    @property
    def loaded_bytes(self) -> int:
        """See `LayerWeights`."""
        return self._loaded_bytes + self._chosen.loaded_bytes

    @property
    def host_bytes(self) -> int:
        """Of weights with which the host has multiplied."""
        return 0 if self._exchange is None else self._exchange.num_bytes

    @property
    def read_bytes(self) -> int:
        """See `LayerWeights`."""
        return 0 if self._file is None else self._file.num_bytes_read

    def close(self) -> None:
        """See `LayerWeights`."""
        if self._file is not None:
            self._file.close()

    def is_recorded(self, rows: int) -> bool:
        """See `LayerWeights`."""
        self._ways.end_pass()  # which may change the ways
        return "host" not in self._ways.of(rows).values()

    def before_layer(self, index: int, rows: int) -> None:
        """See `LayerWeights`. Raises EngineError if a copy has failed.

        A pass of many rows may go on in the layer in which one of few rows has ended: then the layer is copied whole.
        """
        self._ways.before_layer(index, rows)
        ways = self._ways.of(rows)
        layer = self._layers.get(index)
        way = None if layer is None else "whole" if self._has_whole(index) else ways[index]
        if index == self._layer and (way != "whole" or self._has_whole(index)):
            return
        try:
            self._release()
            self._layer = index
            if layer is not None:
                self._choose_place(layer, way == "host")
            if way == "whole":
                self._bring_whole(index)
            for following in self._following(index, ways):
                if (disk := self._layers[following].disk) is None or disk.is_there:
                    self._load(following)
            if self._on_disk:
                self._expect(index, ways)
        except BaseException:  # an interrupt too: nobody knows what has been copied
            self.reset()
            raise

    def before_experts(self, x: Tensor, routing: Routing) -> HostExperts | None:
        """See `layers.experts.ExpertLoads`."""
        assert self._layer is not None
        if self._has_whole(self._layer):
            return None
        try:
            return self._chosen.bring(self._layer, self._layers[self._layer], x, routing, self)
        except BaseException:
            self.reset()
            raise

    # ---- the layer that is computed

    def _has_whole(self, index: int) -> bool:
        """Whether all of a streamed layer is where kernels read it, or on the way there."""
        return index == (self._held[self._layers[index].slot] if self._image is None else self._converted)

    def _choose_place(self, layer: HostLayer, on_host: bool) -> None:
        """Let the layer's products run on the host, or where kernels of the device read matrices."""
        if on_host:
            assert self._exchange is not None
            self._exchange.num_bytes += layer.memory.nbytes
            if layer.disk is not None:
                self._on_host = layer.disk
                layer.lie_in(0, layer.disk.need([0])[0])
        layer.compute_on_host(on_host)

    def _release(self) -> None:
        """The layer that was computed is done with its memory."""
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

    def take_memory(self, layer: HostLayer) -> None:
        """Chosen experts of the layer that is computed are written to its slot or to the image."""
        if self._image is not None:
            self._converted = None
            return
        if self._held[layer.slot] is not None:  # a copy may be under way
            self._order.before_compute(layer.slot)
            self._held[layer.slot] = None
        self._slot = layer.slot

    # ---- the layers that follow

    def _behind(self, index: int) -> Iterator[int]:
        """The other streamed layers, in the order in which they are computed behind this one."""
        end = bisect_left(self.streamed, index)
        first = bisect_left(self.streamed, index + 1)
        return chain(islice(self.streamed, first, None), islice(self.streamed, end))

    def _following(self, index: int, ways: Mapping[int, Way]) -> Iterator[int]:
        """The next layers that are copied whole, in the order in which they are computed, as far as slots are free."""
        needed = set() if self._slot is None else {self._slot}
        for following in self._behind(index):
            slot = self._layers[following].slot
            way = ways[following]
            if way == "host" or (way == "chosen" and self._image is not None):
                continue
            if slot in needed:
                return
            needed.add(slot)
            if way == "whole":
                yield following
            if len(needed) == len(self._slots):
                return

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
        self._loaded_bytes += layer.memory.nbytes

    def _copy(self, copies: Iterable[PitchedCopy], stream: Stream) -> None:
        for copy in copies:
            self._device.copy_2d(copy, stream)

    # ---- what is read from disk

    def _expect(self, index: int, ways: Mapping[int, Way], first: Sequence[Unit] = ()) -> None:
        """Begin to read what comes next: these units of the layer, and those of the layers behind it."""
        behind = list(self._behind(index))
        own = self._layers[index].disk if index in self._layers else None
        for units in self._on_disk:
            wanted = [*first] if own is not None and own.units is units else []
            for other in islice((other for other in behind if self._reads(other, units)), LAYERS_AHEAD):
                wanted += self._next_units(other, ways[other])
            units.expect(wanted)

    def expect_chosen(self, units: Sequence[Unit]) -> None:
        """The host needs these of the layer that is computed."""
        assert self._layer is not None
        self._expect(self._layer, self._ways.latest, units)

    def _next_units(self, index: int, way: Way) -> Sequence[Unit]:
        """What is probably read of a layer: of chosen experts those that the host computed last."""
        disk = self._layers[index].disk
        assert disk is not None
        if way == "chosen":
            return () if self._exchange is None else disk.likely()
        return disk.everything

    def _reads(self, index: int, units: DiskUnits) -> bool:
        """Whether the layer is among these units, and not in its slot."""
        disk = self._layers[index].disk
        return disk is not None and disk.units is units and not self._has_whole(index)

    # ---- helpers

    def _declare(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> None:
        self._device.declare_kernel(name, reads, writes)
        self._device.end_kernel()

    def reset(self) -> None:
        """Wait for the copies, failed or not, after which no slot has a layer, and the cache no expert."""
        self._order.reset()
        self._ways.forget_pass()
        self._held = [None] * len(self._slots)
        self._converted = None
        self._chosen.clear()
        for units in self._on_disk:
            units.reset()
        self._on_host = None
        self._layer = None
        self._slot = None


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
        yield copy_of(in_slot[number], memory[begin:], in_slot.shape[1])
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
        yield copy_of(target[size - rest :], source[size - rest :], rest)
