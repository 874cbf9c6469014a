"""How the layers whose weights stream get to host memory, or to a file, when a model is loaded.

A layer is built like any other, with its matrices in the form that the device's kernels read. They get memory of the
device when the layer's turn to be loaded comes, and are copied to the host when they are complete, so that the device
holds one such layer at a time. In the end their tensors refer to the layer's weight slot.

What the host has no room for is written to a file, unit by unit: a layer without experts, or an expert. It is read into
places that units share, to which the tensors of the host refer while they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.features.streamed_weights.disk_units import DiskUnits, bytes_of, rows_of_blocks
from nanovllm.features.streamed_weights.host_cache import HostCache
from nanovllm.features.streamed_weights.host_layer import HostLayer
from nanovllm.features.streamed_weights.uses import Unit
from nanovllm.features.streamed_weights.weight_file import WeightFile, whole_blocks
from nanovllm.layers.module import Module
from nanovllm.memory.weights import HOST_PLACES, LEAST_ROWS, WeightPlan
from nanovllm.ops.cpu_kernels import use_huge_pages

PASSING_SHARE = 8  # 1 / PASSING_SHARE of the host's places for experts are for those that pass, see `HostCache`


class HostLayers:
    """Implements `models.loader.LayersInTurn`."""

    def __init__(self, device: Device, plan: WeightPlan, file: WeightFile | None = None) -> None:
        """file: for what the plan has on disk."""
        self._device = device
        self.plan = plan
        self.file = file
        self._spans: dict[Unit, tuple[int, int]] = {}  # where units begin in the file, and their bytes there
        self._staging = torch.empty(0, dtype=torch.uint8)  # of a layer that is written there
        self._num_built = 0
        self._last: HostLayer | None = None  # that was built
        self.of_layer: dict[int, HostLayer] = {}  # ascending
        self.slots: list[Tensor] = []  # uint8 on the device
        self.image: Tensor | None = None  # uint8 on the device, if layers are converted
        self.expert_cache: Tensor | None = None  # uint8 [places, bytes of an expert] on the device

    @property
    def layers(self) -> Sequence[int]:
        """See `LayersInTurn`."""
        return self.plan.streamed

    @property
    def device_bytes(self) -> int:
        """See `LayersInTurn`. On the CPU the device is in host memory too."""
        return self.plan.device_bytes + (self.plan.host_bytes if self._device.shares_host else 0)

    def built(self, layer: Module) -> None:
        """See `BuildContext.layer_built`. Layers built after the network is loaded are of other ones."""
        if self.slots:
            return
        if self._last is not None:  # only now has its class made all of it
            self._last.free()
        self._last = None
        if self._num_built in self.plan.streamed:
            self._last = self.of_layer[self._num_built] = HostLayer(layer)
        self._num_built += 1

    def load(self, index: int) -> Sequence[Module]:
        """See `LayersInTurn`."""
        layer = self.of_layer[index]
        layer.allocate()
        return layer.streamed

    def keep(self, index: int) -> None:
        """See `LayersInTurn`."""
        for_cpu = self.plan.host_products and self._device.torch_device.type != "cpu"
        layer = self.of_layer[index]
        if index not in self.plan.on_disk:
            layer.keep(partial(_host_memory, self._device, f"model: the weights of layer {index}"), for_cpu=for_cpu)
            return
        layer.keep(self._staged, for_cpu=for_cpu)
        layer.note_units()
        assert self.file is not None
        for number, unit in enumerate(self._staging.split(whole_blocks(layer.memory.shape[-1]))[: layer.num_units]):
            self._spans[index, number] = self.file.append(bytes_of(unit)), len(unit)

    def _staged(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for the units of a layer, each of which begins at a block. That of the last layer is used again."""
        num_units = shape[0] if len(shape) == 2 else 1
        pitch = whole_blocks(shape[-1])
        if self._staging.nbytes < num_units * pitch:
            self._staging = rows_of_blocks(self._device, 1, num_units * pitch)[0]
        return self._staging.as_strided(shape, (pitch, 1)[-len(shape) :], self._staging.storage_offset())

    def finish(self) -> None:
        """Allocate the slots, and let the tensors of all streamed layers refer to theirs, or to the image."""
        size = max(layer.slot_bytes for layer in self.of_layer.values())
        if self.plan.converts:
            self.image = self._device_memory("what a streamed layer is converted to", size)
            size = max(layer.memory.nbytes for layer in self.of_layer.values())
        self.slots += [self._device_memory("a slot for streamed layers", size) for _ in range(self.plan.num_slots)]
        for order, layer in enumerate(self.of_layer.values()):
            layer.slot = order % len(self.slots)
            slot = self.slots[layer.slot]
            if self.image is None:
                layer.place_in(slot)
                layer.find_parts(slot)
            else:
                layer.place_in(self.image)
                layer.find_sources(slot)
        sizes = [layer.memory.shape[1] for layer in self.of_layer.values() if layer.has_single_experts]
        if sizes and self.plan.cached_experts:
            shape = (self.plan.cached_experts, max(sizes))
            self.expert_cache = self._device.empty("weights_memory_bytes: the expert cache", shape, torch.uint8)
        self._read_from_disk()

    def _read_from_disk(self) -> None:
        """Give what lies in the file its places on the host."""
        on_disk = {index: self.of_layer[index] for index in self.plan.on_disk}
        experts = {index: layer for index, layer in on_disk.items() if layer.has_single_experts}
        whole = {index: layer for index, layer in on_disk.items() if index not in experts}
        num_whole = min(HOST_PLACES, len(whole))
        least = LEAST_ROWS * self.plan.sizes.experts_per_token
        num_places = self._expert_places(least, experts, num_whole * max(map(_num_bytes, whole.values()), default=0))
        self._give_places(experts, num_places, min(max(num_places // PASSING_SHARE, least), num_places))
        self._give_places(whole, num_whole, num_whole)
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _expert_places(self, least: int, layers: Mapping[int, HostLayer], whole_bytes: int) -> int:
        """Places for the experts of layers, at least so many if there are.

        Fewer than planned where experts of other layers differ in form, which are read whole. whole_bytes: of places
        for what is read whole.
        """
        plan = self.plan
        beyond = max(0, whole_bytes - plan.host_places * plan.host_place_bytes)
        num_places = max(least, plan.host_experts - -(-beyond // max(1, plan.expert_bytes)))
        return min(num_places, sum(layer.num_units for layer in layers.values()))

    def _give_places(self, layers: Mapping[int, HostLayer], num_places: int, num_passing: int) -> None:
        if layers:
            assert self.file is not None
            spans = {unit: span for unit, span in self._spans.items() if unit[0] in layers}
            units = DiskUnits(self._device, self.file, spans, HostCache(num_places, num_passing))
            for index, layer in layers.items():
                layer.leave_memory(index, units)

    def _device_memory(self, what: str, num_bytes: int) -> Tensor:
        memory = self._device.empty(f"weights_memory_bytes: {what}", (num_bytes,), torch.uint8)
        use_huge_pages(memory)
        return memory


def _num_bytes(layer: HostLayer) -> int:
    return layer.memory.nbytes


def _host_memory(device: Device, name: str, shape: tuple[int, ...]) -> Tensor:
    memory = device.empty_host(name, shape, torch.uint8)
    use_huge_pages(memory)
    return memory
