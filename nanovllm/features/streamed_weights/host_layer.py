"""A layer whose weights lie in host memory or in a file: what of it streams, and where that lies.

On the host the matrices of a layer without experts are as they are in the slot. Those of each expert are side by side,
so that an expert is one copy; in the slot its parts may be far apart.

With products on the host the host has the form that the CPU's kernels read. Where the device's kernels read another
one, slots hold the host's form, and the tensors refer to an *image*, into which a layer is converted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.features.streamed_weights.disk_units import DiskLayer, DiskUnits
from nanovllm.features.streamed_weights.host_products import HostExchange, PlacedWeight
from nanovllm.features.streamed_weights.storages import (
    Span,
    begin_in,
    packed_bytes,
    packed_views,
    refer_to,
    same_place,
    spans,
    views,
)
from nanovllm.layers.expert_weights import ExpertWeights
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import Linear
from nanovllm.layers.linear_method import StoredWeight
from nanovllm.layers.module import Module

HostMemory = Callable[[tuple[int, ...]], Tensor]  # gives host memory uint8 of a shape


class Part(NamedTuple):
    """A tensor that every expert of a layer has, as bytes."""

    begin: int  # on the host, in the bytes of an expert
    in_slot: Tensor  # uint8 [experts, bytes of the tensor]


class HostLayer:
    """A streamed layer.

    memory: uint8 on the host, [experts, bytes of an expert] if experts stream and are alike; there is one after `keep`.
    It has no data if the layer lies in a file. slot: the number of its weight slot, after `HostLayers.finish`.
    """

    def __init__(self, module: Module) -> None:
        self._module_ref = weakref.ref(module)  # whose experts may have the stream, and that has this
        self.disk: DiskLayer | None = None  # if the layer lies in a file
        self._host_tensors: list[list[tuple[Tensor, int]]] = []  # then, of each unit, with where they begin in it
        self._lies_at: dict[int, int] = {}  # by the number of a unit, the address at which they lie
        self.memory: Tensor
        self.slot: int
        self.parts: Sequence[Part] = ()  # of experts that are in the slot as on the host
        self.host_experts: tuple[ExpertWeights, ExpertWeights] | None = None  # gate and up, and down, on the host
        self._host_weights: list[StoredWeight] = []  # of `_linears`, on the host
        # In the slot, if it is converted from there: the matrices of `_linears`, and experts.
        self._sources: list[StoredWeight] = []
        self._expert_rows: Tensor  # uint8 [experts, bytes of an expert]
        self._single: list[tuple[StoredWeight, StoredWeight]] = []  # if they differ: each matrix in image and slot

    @property
    def _module(self) -> Module:
        module = self._module_ref()
        assert module is not None, "the model has it"
        return module

    @property
    def experts(self) -> Experts | None:
        return next((module for module in self._module.modules() if isinstance(module, Experts)), None)

    @property
    def _expert_weights(self) -> list[ExpertWeights]:
        experts = self.experts
        return [] if experts is None else [experts.gate_up, experts.down]

    @property
    def _linears(self) -> list[Linear]:
        return [module for module in self._module.modules() if isinstance(module, Linear)]

    @property
    def streamed(self) -> Sequence[Module]:
        """What of the layer streams."""
        return self._expert_weights or [self._module]

    @property
    def has_single_experts(self) -> bool:
        """Whether each expert is one copy."""
        return self.memory.dim() == 2

    def _spans(self) -> list[Span]:
        return spans(tensor for module in self.streamed for tensor in module.weight_tensors())

    # ---- loading

    def free(self) -> None:
        for span in self._spans():
            span.storage.resize_(0)

    def allocate(self) -> None:
        for begin, end, tensors in self._spans():
            storage = tensors[0].untyped_storage()
            if not storage.nbytes():
                storage.resize_(end - begin)

    def keep(self, new_memory: HostMemory, *, for_cpu: bool) -> None:
        """Copy the matrices, which are complete, to the host, and free their memory of the device.

        for_cpu: to the form of the CPU's kernels.
        """
        if self._expert_weights:
            self._keep_experts(new_memory, for_cpu=for_cpu)
        else:
            self._keep_linears(new_memory, for_cpu=for_cpu)
        self.free()

    def _keep_linears(self, new_memory: HostMemory, *, for_cpu: bool) -> None:
        weights = [linear.weight.for_cpu() if for_cpu else linear.weight for linear in self._linears]
        placed = spans(tensor for weight in weights for tensor in weight.tensors()) if for_cpu else self._spans()
        found = self._copied(new_memory, placed)
        self._host_weights = [weight.read_from([found[id(part)] for part in weight.tensors()]) for weight in weights]

    def _keep_experts(self, new_memory: HostMemory, *, for_cpu: bool) -> None:
        weights = [own.for_cpu() if for_cpu else own for own in self._expert_weights]
        of_experts = [[list(own.tensors_of(expert)) for own in weights] for expert in range(weights[0].num_experts)]
        tensors = [[tensor for parts in of_expert for tensor in parts] for of_expert in of_experts]
        if _are_alike(tensors):
            memory = new_memory((len(tensors), packed_bytes(tensors[0])))
            self.memory = memory
            copies = [packed_views(parts, row) for parts, row in zip(tensors, memory, strict=True)]
            for parts, of_copy in zip(tensors, copies, strict=True):
                for tensor, copy in zip(parts, of_copy, strict=True):
                    copy.copy_(tensor)
        else:
            placed = spans(tensor for parts in tensors for tensor in parts) if for_cpu else self._spans()
            found = self._copied(new_memory, placed)
            copies = [[found[id(tensor)] for tensor in parts] for parts in tensors]
        if any(own.is_stacked for own in weights):
            return
        firsts = [len(of_expert[0]) for of_expert in of_experts]
        gate_up = weights[0].read_from([copy[:first] for copy, first in zip(copies, firsts, strict=True)])
        down = weights[1].read_from([copy[first:] for copy, first in zip(copies, firsts, strict=True)])
        self.host_experts = gate_up, down

    def _copied(self, new_memory: HostMemory, placed: Sequence[Span]) -> dict[int, Tensor]:
        """Copy storages to the host, one behind the other. Returns their tensors there; see `storages.views`."""
        self.memory = new_memory((placed[-1].end,))
        for span in placed:
            self.memory[span.begin : span.end].copy_(span.bytes)
        return views(placed, self.memory)

    # ---- when all layers are loaded

    @property
    def slot_bytes(self) -> int:
        """Of its matrices in the form of the device's kernels."""
        return self._spans()[-1].end

    def place_in(self, slot: Tensor) -> None:
        """Let the tensors refer to memory of the device: a slot, or the image."""
        placed = self._spans()
        found = views(placed, slot)
        for tensor in [tensor for span in placed for tensor in span.tensors]:
            view = found[id(tensor)]
            tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        self._module.weights_moved()

    def find_parts(self, slot: Tensor) -> None:
        """Find where the parts of experts are in the slot in which they lie as on the host."""
        if self._expert_weights and self.has_single_experts:
            self.parts = list(_parts(self._tensors_of_experts(), slot))

    def _tensors_of_experts(self) -> list[list[Tensor]]:
        experts = self.experts
        return [] if experts is None else [experts.tensors_of(expert) for expert in range(experts.spec.num_experts)]

    # ---- if the layer lies in a file

    @property
    def num_units(self) -> int:
        return len(self.memory) if self.has_single_experts else 1

    def note_units(self) -> None:
        """Find where the tensors of the host lie in the memory of each unit."""
        if self._expert_weights and self.host_experts is None:
            return
        if self.host_experts is None:
            tensors = [tensor for weight in self._host_weights for tensor in weight.tensors()]
            self._host_tensors = [[(tensor, begin_in(tensor, self.memory)) for tensor in tensors]]
            return
        of_experts = [[*gate_up, *down] for gate_up, down in zip(*map(_tensors_of_all, self.host_experts), strict=True)]
        if self.has_single_experts:
            pairs = zip(of_experts, self.memory, strict=True)
            self._host_tensors = [[(tensor, begin_in(tensor, row)) for tensor in parts] for parts, row in pairs]
        else:
            parts = [tensor for parts in of_experts for tensor in parts]
            self._host_tensors = [[(tensor, begin_in(tensor, self.memory)) for tensor in parts]]

    def lie_in(self, number: int, memory: Tensor) -> None:
        """Let the tensors of a unit refer to memory that has its bytes. number: 0, or of an expert."""
        if self._lies_at.get(number) == memory.data_ptr() or not self._host_tensors:
            return
        self._lies_at[number] = memory.data_ptr()
        for tensor, begin in self._host_tensors[number]:
            refer_to(tensor, memory, begin)
        if not self._expert_weights:
            self._module.weights_moved()

    def leave_memory(self, index: int, units: DiskUnits) -> None:
        """The units are read from their file. Until then the tensors refer to memory that has other bytes.

        index: of the layer.
        """
        self.disk = DiskLayer(units, index, self.num_units)
        self.memory = torch.empty(self.memory.shape, dtype=torch.uint8, device="meta")
        for number in range(self.num_units):
            self.lie_in(number, units.first_place)

    # ---- products on the host

    def multiply_by(self, exchange: HostExchange) -> None:
        """Let products run where `compute_on_host` says."""
        for linear, weight in zip(self._linears if self._host_weights else [], self._host_weights, strict=True):
            in_slot = linear.weight.in_slot if isinstance(linear.weight, PlacedWeight) else linear.weight
            bias = None if linear.bias is None else linear.bias.cpu()
            linear.weight = PlacedWeight(in_slot, weight, bias, exchange)

    @property
    def result_bytes(self) -> int:
        """Of the longest row that products give on the host."""
        experts = self.experts
        if experts is not None:
            return experts.hidden_size * torch.float32.itemsize
        return max(sum(linear.parts.values()) for linear in self._linears) * torch.float32.itemsize

    def compute_on_host(self, on_host: bool) -> None:
        """Whether the products of a layer without experts are computed on the host from now on."""
        placed = [linear.weight for linear in self._linears if isinstance(linear.weight, PlacedWeight)]
        if placed and placed[0].is_on_host != on_host:
            for weight in placed:
                weight.is_on_host = on_host
            self._module.weights_moved()

    # ---- conversion from the host's form in a slot to the image

    def find_sources(self, slot: Tensor) -> None:
        """Find the matrices in the slot in which they lie as on the host."""
        self._sources = [
            weight.read_from([same_place(tensor, self.memory, slot) for tensor in weight.tensors()])
            for weight in self._host_weights
        ]
        if self._expert_weights and self.has_single_experts:
            self._expert_rows = slot[: self.memory.nbytes].view(self.memory.shape)
        elif self.host_experts is not None:
            for own, on_host in zip(self._expert_weights, self.host_experts, strict=True):
                for expert in range(own.num_experts):
                    parts = [same_place(tensor, self.memory, slot) for tensor in on_host.tensors_of(expert)]
                    self._single.append((own[expert], on_host[expert].read_from(parts)))

    def convert(self) -> None:
        """Convert all that is in the slot."""
        for linear, source in zip(self._linears if self._sources else [], self._sources, strict=True):
            linear.weight.take_(source)
        if self._expert_weights and self.has_single_experts:
            self.convert_experts(None, self._expert_rows)
        for weight, source in self._single:
            weight.take_(source)

    def convert_experts(self, numbers: Sequence[int] | None, rows: Tensor) -> None:
        """Convert some experts, None for all. rows: on the device in the host's form, uint8 [number, bytes of one]."""
        assert self.host_experts is not None
        gate_up, down = ([*own.tensors_of(0)] for own in self.host_experts)
        parts = packed_views([*gate_up, *down], rows)
        of_both = parts[: len(gate_up)], parts[len(gate_up) :]
        for own, on_host, of_own in zip(self._expert_weights, self.host_experts, of_both, strict=True):
            if own.is_stacked:
                own.take_(numbers, of_own)
                continue
            for index, expert in enumerate(range(own.num_experts) if numbers is None else numbers):
                own[expert].take_(on_host[expert].read_from([part[index] for part in of_own]))


def _are_alike(tensors: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of all experts have one size."""
    return len({tuple((tensor.nbytes, tensor.is_contiguous()) for tensor in parts) for parts in tensors}) == 1 and all(
        tensor.is_contiguous() for tensor in tensors[0]
    )


def _parts(of_experts: Sequence[Sequence[Tensor]], slot: Tensor) -> Iterator[Part]:
    """Where the parts of experts are on the host, and in the slot, there at equal distances."""
    num_experts = len(of_experts)
    row = torch.empty(packed_bytes(of_experts[0]), dtype=torch.uint8, device="meta")
    for index, on_host in enumerate(packed_views([_bytes_like(tensor) for tensor in of_experts[0]], row)):
        starts = [parts[index].data_ptr() - slot.data_ptr() for parts in of_experts]
        pitch = starts[1] - starts[0] if num_experts > 1 else on_host.nbytes
        assert starts == [starts[0] + expert * pitch for expert in range(num_experts)]
        in_slot = slot.as_strided((num_experts, on_host.nbytes), (pitch, 1), starts[0])
        yield Part(int(on_host.storage_offset()), in_slot)


def _tensors_of_all(weights: ExpertWeights) -> Iterator[Sequence[Tensor]]:
    return (list(weights.tensors_of(expert)) for expert in range(weights.num_experts))


def _bytes_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")
