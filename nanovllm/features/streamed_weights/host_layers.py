"""The layers whose weights lie in host memory: how they get there when a model is loaded.

A layer is built like any other, with its matrices in the form that the device's kernels read. They get memory of the
device when the layer's turn to be loaded comes, and are copied to the host when they are complete, so that the device
holds one such layer at a time. In the end their tensors refer to the layer's weight slot.

On the host the matrices of a layer without experts are as they are in the slot. Those of each expert are side by side,
so that an expert is one copy; in the slot its parts may be far apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.layers.experts import Experts
from nanovllm.layers.module import Module
from nanovllm.memory.weights import WeightPlan
from nanovllm.ops.cpu_kernels import use_huge_pages

ALIGNMENT = 256  # bytes between the starts of tensors in a slot


class Part(NamedTuple):
    """A tensor that every expert of a layer has, as bytes: uint8 [experts, bytes of the tensor]."""

    on_host: Tensor
    in_slot: Tensor


class HostLayer:
    """A streamed layer.

    memory: uint8 on the host, of a layer with `parts` [experts, bytes of an expert]; there is one after `keep`. slot:
    the number of its weight slot, after `HostLayers.finish`.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.memory: Tensor
        self.slot: int
        self.parts: Sequence[Part] = ()  # () if a layer has no experts, or experts of several sizes

    @property
    def experts(self) -> Experts | None:
        return next((module for module in self._module.modules() if isinstance(module, Experts)), None)

    @property
    def streamed(self) -> Sequence[Module]:
        """What of the layer streams."""
        experts = self.experts
        return [self._module] if experts is None else [experts.gate_up, experts.down]

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, list[Tensor]]]:
        """The storages of its matrices, each with its tensors."""
        found: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}
        for tensor in (tensor for module in self.streamed for tensor in module.weight_tensors()):
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, []))[1].append(tensor)
        return iter(found.values())

    def placed(self) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Of each storage where its bytes begin in a slot, how many they are, and its tensors."""
        begin = 0
        for _, tensors in self.storages():
            size = max(map(_end, tensors))
            yield begin, size, tensors
            begin += -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        return max(begin + size for begin, size, _ in self.placed())

    def free(self) -> None:
        for storage, _ in self.storages():
            storage.resize_(0)

    def allocate(self) -> None:
        for storage, tensors in self.storages():
            if not storage.nbytes():
                storage.resize_(max(map(_end, tensors)))

    def keep(self, device: Device, name: str) -> None:
        """Copy the matrices, which are complete, to the host, and free their memory of the device."""
        of_experts = self._tensors_of_experts()
        if of_experts is None:
            self.memory = _host_memory(device, name, (self.slot_bytes,))
            for begin, size, tensors in self.placed():
                self.memory[begin : begin + size].copy_(_bytes_of(tensors[0].untyped_storage(), size))
        else:
            self.memory = _host_memory(device, name, (len(of_experts), sum(part.nbytes for part in of_experts[0])))
            for row, parts in zip(self.memory, of_experts, strict=True):
                for place, part in zip(row.split([part.nbytes for part in parts]), parts, strict=True):
                    place.copy_(part.view(torch.uint8).flatten())
        self.free()

    def _tensors_of_experts(self) -> list[list[Tensor]] | None:
        """The tensors of each expert; None if there are no experts, or if they differ in size."""
        experts = self.experts
        if experts is None:
            return None
        found = [experts.tensors_of(expert) for expert in range(experts.spec.num_experts)]
        sizes = {tuple((part.nbytes, part.is_contiguous()) for part in parts) for parts in found}
        return found if len(sizes) == 1 and all(contiguous for _, contiguous in sizes.pop()) else None

    def place_in(self, slot: Tensor) -> None:
        """Let the tensors refer to a slot."""
        for begin, _, tensors in list(self.placed()):
            for tensor in tensors:
                start = begin // tensor.itemsize + tensor.storage_offset()
                tensor.set_(slot.untyped_storage(), start, tensor.shape, tensor.stride())
        self._module.weights_moved()
        of_experts = self._tensors_of_experts()
        if of_experts is not None and self.memory.dim() == 2:
            self.parts = list(_parts(self.memory, of_experts, slot))


def _parts(memory: Tensor, of_experts: Sequence[Sequence[Tensor]], slot: Tensor) -> Iterator[Part]:
    """Where the parts of experts are on the host, and in the slot, there at equal distances."""
    num_experts = len(of_experts)
    begin = 0
    for index, first in enumerate(of_experts[0]):
        starts = [parts[index].data_ptr() - slot.data_ptr() for parts in of_experts]
        pitch = starts[1] - starts[0] if num_experts > 1 else first.nbytes
        assert starts == [starts[0] + expert * pitch for expert in range(num_experts)]
        in_slot = slot.as_strided((num_experts, first.nbytes), (pitch, 1), starts[0])
        yield Part(memory[:, begin : begin + first.nbytes], in_slot)
        begin += first.nbytes


class HostLayers:
    """Implements `models.loader.LayersInTurn`."""

    def __init__(self, device: Device, plan: WeightPlan) -> None:
        self._device = device
        self.plan = plan
        self._num_built = 0
        self._last: HostLayer | None = None  # that was built
        self.of_layer: dict[int, HostLayer] = {}  # ascending
        self.slots: list[Tensor] = []  # uint8 on the device
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
        self.of_layer[index].keep(self._device, f"model: the weights of layer {index}")

    def finish(self) -> None:
        """Allocate the slots, and let the tensors of all streamed layers refer to theirs."""
        size = max(layer.slot_bytes for layer in self.of_layer.values())
        for _ in range(self.plan.num_slots):
            slot = self._device.empty("weights_memory_bytes: a slot for streamed layers", (size,), torch.uint8)
            use_huge_pages(slot)
            self.slots.append(slot)
        for order, layer in enumerate(self.of_layer.values()):
            layer.slot = order % len(self.slots)
            layer.place_in(self.slots[layer.slot])
        sizes = [layer.memory.shape[1] for layer in self.of_layer.values() if layer.parts]
        if sizes and self.plan.cached_experts:
            shape = (self.plan.cached_experts, max(sizes))
            self.expert_cache = self._device.empty("weights_memory_bytes: the expert cache", shape, torch.uint8)


def _host_memory(device: Device, name: str, shape: tuple[int, ...]) -> Tensor:
    memory = device.empty_host(name, shape, torch.uint8)
    use_huge_pages(memory)
    return memory


def _bytes_of(storage: torch.UntypedStorage, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))


def _end(tensor: Tensor) -> int:
    """The byte of its storage behind the tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
