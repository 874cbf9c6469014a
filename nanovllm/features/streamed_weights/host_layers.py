"""The layers whose matrices lie in host memory: how they get there when a model is loaded.

A layer is built like any other, with its matrices in the form that the device's kernels read. They get memory of the
device when the layer's turn to be loaded comes, and are copied to the host when they are complete, so that the device
holds one such layer at a time. In the end the tensors of every layer refer to its weight slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.layers.module import Module
from nanovllm.memory.weights import WeightPlan
from nanovllm.ops.cpu_kernels import use_huge_pages

ALIGNMENT = 256  # bytes between the starts of tensors in a slot


class Piece(NamedTuple):
    """Tensors on one storage, and where their bytes are in the memory of the layer."""

    tensors: list[Tensor]
    begin: int  # bytes
    size: int


class HostLayers:
    """Implements `layers.build_context.HostLayers` and `models.loader.LayersInTurn`."""

    def __init__(self, device: Device, plan: WeightPlan) -> None:
        self._device = device
        self.plan = plan
        self._built: list[Module] = []
        self.memory: dict[int, Tensor] = {}  # by layer, uint8 on the host
        self.slots: list[Tensor] = []  # uint8 on the device

    @property
    def layers(self) -> Sequence[int]:
        """See `LayersInTurn`."""
        return self.plan.streamed

    @property
    def device_bytes(self) -> int:
        """See `LayersInTurn`."""
        return self.plan.device_bytes

    def built(self, layer: Module) -> None:
        """See `layers.build_context.HostLayers`. Layers built after the network is loaded are of other ones."""
        if self.slots:
            return
        if len(self._built) in self.plan.streamed:
            _free(layer)
        if self._built and len(self._built) - 1 in self.plan.streamed:
            _free(self._built[-1])  # with what its class has made since
        self._built.append(layer)

    def load(self, index: int) -> Module:
        """Give the matrices of a streamed layer memory of the device, to be filled and finished."""
        layer = self._built[index]
        for storage, tensors in _storages(layer):
            if not storage.nbytes():
                end = max(_end(tensor) for tensor in tensors)
                storage.resize_(end)
        return layer

    def keep(self, index: int) -> None:
        """Copy the matrices of a layer, which are complete, to the host, and free their memory of the device."""
        layer = self._built[index]
        pieces = list(_pieces(layer))
        size = pieces[-1].begin + pieces[-1].size
        memory = self._device.empty_host(f"model: the weights of layer {index}", (size,), torch.uint8)
        use_huge_pages(memory)
        for piece in pieces:
            there = torch.empty(0, dtype=torch.uint8, device=piece.tensors[0].device)
            there.set_(piece.tensors[0].untyped_storage(), 0, (piece.size,), (1,))
            memory[piece.begin : piece.begin + piece.size].copy_(there)
        self.memory[index] = memory
        _free(layer)

    def finish(self) -> None:
        """Let the tensors of all streamed layers refer to their slots."""
        size = max(memory.nbytes for memory in self.memory.values())
        for _ in range(self.plan.num_slots):
            slot = self._device.empty("weights_memory_bytes: slots for streamed layers", (size,), torch.uint8)
            use_huge_pages(slot)
            self.slots.append(slot)
        for order, index in enumerate(self.plan.streamed):
            layer = self._built[index]
            slot = self.slots[order % len(self.slots)]
            for piece in list(_pieces(layer)):
                for tensor in piece.tensors:
                    begin = piece.begin // tensor.itemsize + tensor.storage_offset()
                    tensor.set_(slot.untyped_storage(), begin, tensor.shape, tensor.stride())
            layer.weights_moved()


def _storages(layer: Module) -> Iterator[tuple[torch.UntypedStorage, list[Tensor]]]:
    """The storages of a layer's matrices, each with its tensors."""
    found: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}
    for tensor in layer.weight_tensors():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    return iter(found.values())


def _pieces(layer: Module) -> Iterator[Piece]:
    begin = 0
    for _, tensors in _storages(layer):
        size = max(map(_end, tensors))
        yield Piece(tensors, begin, size)
        begin += -(-size // ALIGNMENT) * ALIGNMENT


def _end(tensor: Tensor) -> int:
    """The byte of its storage behind the tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0


def _free(layer: Module) -> None:
    for storage, _ in _storages(layer):
        storage.resize_(0)
