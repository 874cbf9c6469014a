"""The matrices of the experts of a layer, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.dense_weight import DenseWeight, create_weight, linear
from nanovllm.layers.linear import stored_weights
from nanovllm.layers.linear_method import (
    CheckpointTensor,
    NamedSlots,
    NamedTensors,
    StoredWeight,
    dense_tensors,
    slot_of,
)
from nanovllm.layers.module import Matrix, Module, Weights
from nanovllm.layers.packed_matrix import PackedMatrix, StackedWeights
from nanovllm.ops.cpu_kernels import use_huge_pages
from nanovllm.ops.packed_weights import packed_linear
from nanovllm.ops.panel_conversion import take_panels_, write_matrices_


class ExpertWeights(Module):
    """One matrix [out, in] of every expert.

    On a GPU those of all experts are one weight, one below the other, so that a kernel finds each, and where a file has
    the parts of a matrix in different forms, a weight for each part. Elsewhere, and where forms differ from expert to
    expert, they are weights of their own. Biases are [experts, out] of a stack or of the whole matrix.

    dense: all of them, [experts, out, in], if they are stored as plain numbers on the CPU; else None. Reordered there.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        rows: Split,
        columns: Split,
        build: BuildContext,
        *,
        bias: bool = False,
        adds_bias: bool = True,
    ) -> None:
        """names: of each expert's modules in the checkpoint; rows: the output features of one module; columns: inputs.

        adds_bias: False on a rank to whose products another one adds the biases.
        """
        self._build = build
        self._rows = rows
        self._columns = columns
        self._has_bias = bias
        self._parts = [dict.fromkeys(of_expert, rows.size) for of_expert in names]
        self.dense: Tensor | None = None
        stacks = _stacks(self._parts, columns.size, build) if stacked_on(build.device) else None
        self._stacked = stacks
        self.is_stacked = stacks is not None
        whole = rows.size * len(names[0])
        self._sizes = [whole] if stacks is None or len(stacks) == 1 else list(self._parts[0].values())
        self._biases: list[Tensor | None] = [
            torch.empty(len(names), size, dtype=build.dtype, device=build.device) if bias and adds_bias else None
            for size in self._sizes
        ]
        if stacks is None and build.method is None:
            shape = (len(names), whole, columns.size)
            self.dense = torch.empty(shape, dtype=build.dtype, device=build.device)
            use_huge_pages(self.dense)
        if build.device.type != "meta":
            self._weights  # noqa: B018 # memory is taken now

    @cached_property
    def _weights(self) -> list[StoredWeight]:
        """Of all experts together, or of each. On the meta device only a pass needs them: there may be thousands."""
        build = self._build
        stored = (self._columns.size, build.dtype, build.device)
        if self._stacked is not None:
            return [create_weight(build.method, stack, *stored) for stack in self._stacked]
        if self.dense is None:
            return [create_weight(build.method, of_expert, *stored) for of_expert in self._parts]
        pairs = zip(self._parts, self.dense, strict=True)
        return [DenseWeight(of_expert, *stored, memory) for of_expert, memory in pairs]

    def __getitem__(self, expert: int) -> StoredWeight:
        return self._weights[expert]

    def apply(self, expert: int, x: Tensor) -> Tensor:
        """x times the transposed matrix of an expert, plus its bias: [rows, in] -> [rows, out]."""
        if not self.is_stacked:
            return self._weights[expert].apply(x, None if self._biases[0] is None else self._biases[0][expert])
        outputs = []
        for weight, size, biases in zip(self._weights, self._sizes, self._biases, strict=True):
            own = slice(expert * size, (expert + 1) * size)
            bias = None if biases is None else biases[expert]
            if isinstance(weight, PackedMatrix):
                outputs.append(packed_linear(x, weight.packed.rows(own), bias))
            else:
                assert weight.dense is not None
                outputs.append(linear(x, weight.dense[own], bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def all_at_once(self, x: Tensor, ends: Tensor, rows: Tensor | None = None) -> Tensor:
        """x times each row's own matrix; see `triton_experts.grouped_linear`."""
        from nanovllm.ops.triton_experts import grouped_linear, grouped_packed_linear

        outputs = []
        for weight, size, biases in zip(self._weights, self._sizes, self._biases, strict=True):
            if isinstance(weight, PackedMatrix):
                outputs.append(grouped_packed_linear(x, weight.packed, ends, rows, biases))
            else:
                assert weight.dense is not None
                outputs.append(grouped_linear(x, weight.dense.view(len(ends), size, -1), ends, rows, biases))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def own_weights(self) -> Iterable[StoredWeight]:
        return self._weights

    def tensors_of(self, expert: int) -> Iterable[Tensor]:
        """What the matrix of an expert is read from: of a stack its rows."""
        if not self.is_stacked:
            return self._weights[expert].tensors()
        tensors = [tensor for weight in self._weights for tensor in weight.tensors()]
        return [tensor.unflatten(0, (len(self._parts), -1))[expert] for tensor in tensors]

    @property
    def num_experts(self) -> int:
        return len(self._parts)

    def read_from(self, tensors: Sequence[Sequence[Tensor]]) -> ExpertWeights:
        """The same matrices, which are not stacked, read from other tensors: of each expert like its `tensors_of`."""
        assert not self.is_stacked
        experts = copy(self)
        experts.dense = None
        experts._weights = [weight.read_from(own) for weight, own in zip(self._weights, tensors, strict=True)]
        return experts

    def for_cpu(self) -> ExpertWeights:
        """A copy on the CPU, each expert a weight of its own; see `StoredWeight.for_cpu`."""
        experts = copy(self)
        experts.is_stacked = False
        experts.dense = None
        experts._weights = [self._of_expert(expert).for_cpu() for expert in range(self.num_experts)]
        biases = [biases.cpu() for biases in self._biases if biases is not None]
        experts._biases = [torch.cat(biases, dim=1) if biases else None]
        return experts

    def _of_expert(self, expert: int) -> StoredWeight:
        """The weight of an expert, in the same memory."""
        if not self.is_stacked:
            return self._weights[expert]
        weights: list[StoredWeight] = []
        for weight, size in zip(self._weights, self._sizes, strict=True):
            own = slice(expert * size, (expert + 1) * size)
            if isinstance(weight, PackedMatrix):
                weights.append(PackedMatrix(weight.packed.rows(own), {"": size}, self._build.dtype))
            else:
                assert weight.dense is not None
                matrix = weight.dense[own]
                weights.append(DenseWeight({"": size}, matrix.shape[1], matrix.dtype, matrix.device, matrix))
        return weights[0] if len(weights) == 1 else StackedWeights(weights, self._sizes, self._build.dtype)

    def take_(self, numbers: Sequence[int] | None, parts: Sequence[Tensor]) -> None:
        """Become the matrices of some experts in the form of the CPU's kernels, in the same memory as before.

        This one is stacked. parts: each of one expert's `tensors_of` after `for_cpu`, of n experts and on this device:
        [n, *shape], maybe strided along the first dimension. numbers: which experts those are, each once; None: all, in
        order. Biases stay as they are.
        """
        left = iter(parts)
        for weight, size in zip(self._weights, self._sizes, strict=True):
            own = [next(left) for _ in weight.tensors()]
            if isinstance(weight, PackedMatrix):
                take_panels_(weight.packed, own, size, numbers)
            else:
                (matrix,) = weight.tensors()
                write_matrices_(matrix.unflatten(0, (-1, size)), own[0], numbers)

    def own_weight_tensors(self) -> Iterator[Tensor]:
        if self.dense is not None:
            yield self.dense
        yield from super().own_weight_tensors()

    def own_slots(self) -> NamedSlots:
        for weight in self._weights:
            yield from weight.slots()
        for expert, parts in enumerate(self._parts):
            biases = [biases[expert] for biases in self._biases if biases is not None]
            parts_of_bias = biases[0].split(list(parts.values())) if len(biases) == 1 else biases
            for module, part in zip(parts, parts_of_bias, strict=bool(biases)):
                yield f"{module}.bias", slot_of(part)

    def own_tensors(self) -> NamedTensors:
        method = self._build.method
        shape = (self._rows.total, self._columns.total)
        held = (self._rows.parts, self._columns.parts)
        for module in (module for of_expert in self._parts for module in of_expert):
            tensors = dense_tensors(module, *shape) if method is None else method.tensors(module, *shape)
            for name, tensor in tensors:
                yield name, tensor._replace(held=held)
            if self._has_bias:
                yield f"{module}.bias", CheckpointTensor(shape[:1], held=held)

    def own_matrices(self) -> Iterable[Matrix]:
        columns = self._columns.size
        return ((module, rows, columns) for of_expert in self._parts for module, rows in of_expert.items())

    @cached_property
    def _in_memory(self) -> Weights:
        return stored_weights(self.own_matrices(), self._build)

    def own_matrix_weights(self) -> Weights:
        return self._in_memory

    def own_expert_weights(self) -> Weights:
        return self._in_memory

    def own_vector_weights(self) -> Weights:
        biases = [biases for biases in self._biases if biases is not None]
        return Weights(sum(biases.numel() for biases in biases), sum(biases.nbytes for biases in biases))


def stacked_on(device: torch.device) -> bool:
    """Whether the matrices of all experts are one weight there."""
    return device.type == "cuda"


def _stacks(parts: Sequence[Mapping[str, int]], in_features: int, build: BuildContext) -> list[dict[str, int]] | None:
    """The modules of one weight for all experts, or of one for each part of their matrices; None if these have several
    forms."""

    def has_one_form(stack: dict[str, int]) -> bool:
        weight = create_weight(build.method, stack, in_features, build.dtype, torch.device("meta"))
        return weight.dense is not None or isinstance(weight, PackedMatrix)

    whole = {module: size for of_expert in parts for module, size in of_expert.items()}
    if has_one_form(whole):
        return [whole]
    by_part = [dict(of_experts) for of_experts in zip(*(of_expert.items() for of_expert in parts), strict=True)]
    return by_part if all(map(has_one_form, by_part)) else None
