"""Mixture of experts: a router chooses a few MLPs for each row. Sources: Jiang et al., "Mixtral of Experts" (2024);
Yang et al., "Qwen3 Technical Report" (2025); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1; OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card" (2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.data.network import ExpertSpec, Scoring
from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.dense_weight import DenseWeight, create_weight, linear
from nanovllm.layers.linear import RowAdapters, stored_weights
from nanovllm.layers.linear_method import (
    CheckpointTensor,
    NamedSlots,
    NamedTensors,
    StoredWeight,
    dense_tensors,
    slot_of,
)
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.module import Matrix, Module, Parameter, Weights
from nanovllm.layers.packed_matrix import PackedMatrix, StackedWeights, weights_of_one_form
from nanovllm.ops.cpu_kernels import use_huge_pages
from nanovllm.ops.packed_weights import packed_linear
from nanovllm.ops.panel_conversion import can_take_panels, take_panels_, write_matrices_
from nanovllm.ops.row_kernels import GATED_UNITS, sigmoid, softmax, widened
from nanovllm.ops.triton_support import use_triton

if TYPE_CHECKING:
    from nanovllm.ops.triton_routing import Grouping

Group = tuple[int, Tensor, Tensor]  # expert, its rows int64 [n], and their weights fp32 [n]
SCORES: Mapping[Scoring, Callable[[Tensor], Tensor]] = MappingProxyType({"softmax": softmax, "sigmoid": sigmoid})
LEAST_SUM = 1e-20  # added to a sum of scores, of which it changes only those of which nothing else is left


class Routing(NamedTuple):
    """What a router decides about rows.

    weights: fp32 [rows, k], of each row's experts; chosen: their numbers int64 [rows, k]. Where kernels take all
    experts at once: the rows of each expert, and weights are [rows, k + 1] with the shared expert's, if there is one.
    """

    weights: Tensor
    chosen: Tensor | Grouping


class HostPart(Protocol):
    """The experts of a layer that are computed on the host, where their matrices lie."""

    numbers: Set[int]

    def matrices(self, expert: int) -> AbstractContextManager[tuple[ExpertWeights, ExpertWeights]]:
        """A context in which those of one of the experts are in host memory: gate and up, and down."""
        ...

    def of_device(self, routing: Routing) -> tuple[Tensor, Grouping]:
        """Of a routing for kernels that take all experts at once the part of the others: weights and grouping.

        All sizes stay. The entry of a choice of an expert on the host is the number of all entries.
        """
        ...

    def output(self, compute: Callable[[Tensor, Iterable[Group]], Tensor]) -> Tensor:
        """What `compute` gives of rows and groups on the host, fp32 [rows, hidden], on the device."""
        ...


class ExpertLoads(Protocol):
    """Brings the matrices of experts that do not stay on the device."""

    @property
    def uses_host(self) -> bool:
        """Whether `before_experts` may give a `HostPart`."""
        ...

    def before_experts(self, x: Tensor, routing: Routing) -> HostPart | None:
        """The matrices of the chosen experts are on the device but for those of the result, until those of another
        layer or of other experts are asked for. It may wait for the device.

        x: the rows [rows, hidden] that have chosen them.
        """
        ...


class Experts(Module):
    """The MLP of a layer with experts: the weighted sum of those that the router chooses for a row.

    In some families also of one that all rows share. Each rank has some of the inner features of every expert.

    The rows are grouped by expert. On the CPU the bits of a row do not depend on the other rows: products compute each
    row alone, and its experts are added in the order of their numbers.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        spec: ExpertSpec,
        build: BuildContext,
        *,
        router: str = "gate",
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        correction_bias: str | None = None,
        expert_scale: str | None = None,
        fp32_router: bool = False,
        biases: bool = False,
        shared: GatedMLP | None = None,
        shared_gate: str | None = None,
        fused_prefix: str | None = None,
        interleaved: bool = False,
    ) -> None:
        """intermediate_size: of one expert; activation: one of GATED_UNITS.

        Names below `build`: router: a matrix [num_experts, hidden] that is never quantized; projections: of an expert
        gate, up and down; correction_bias: a tensor [num_experts] that is added to the scores that choose;
        expert_scale: one that multiplies an expert's weights; shared_gate: a matrix [1, hidden], whose product's
        sigmoid multiplies the output of the shared expert.
        fp32_router: whether the router multiplies in fp32, whatever the dtype; biases: of router, gate, up and down.
        fused_prefix: what the names of tensors begin with that hold all experts of a layer, by default as of `build`;
        interleaved: in those gate and up alternate, see `models.fused_experts`.
        """
        self.spec = replace(spec, has_shared=shared is not None)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.prefix = build.prefix
        self.fused_prefix = fused_prefix or build.prefix
        self.interleaved = interleaved
        self._gated_unit = GATED_UNITS[activation]
        self._fp32_router = fp32_router
        self._build = build
        self._routing: list[Parameter] = []  # what decides about experts, which every rank has whole
        of_experts = (spec.num_experts,)
        wide = torch.float32 if fp32_router else build.dtype
        self.gate = self._routing_tensor(f"{router}.weight", (spec.num_experts, hidden_size), wide)
        self.gate_bias = self._routing_tensor(f"{router}.bias", of_experts, wide) if biases else None
        self.correction_bias: Tensor | None = None
        self.expert_scale: Tensor | None = None
        self.shared_gate: Tensor | None = None
        if correction_bias is not None:
            self.correction_bias = self._routing_tensor(correction_bias, of_experts, torch.float32)
        if expert_scale is not None:
            self.expert_scale = self._routing_tensor(expert_scale, of_experts, build.dtype)
        if shared_gate is not None:
            self.shared_gate = self._routing_tensor(f"{shared_gate}.weight", (1, hidden_size), build.dtype)
        self.names = [
            tuple(f"{build.prefix}experts.{index}.{name}" for name in projections) for index in range(spec.num_experts)
        ]
        inner = self._split(build)
        hidden = Split.whole(hidden_size)
        self.gate_up = ExpertWeights([names[:2] for names in self.names], inner, hidden, build, bias=biases)
        down = [names[2:] for names in self.names]
        self.down = ExpertWeights(down, hidden, inner, build, bias=biases, adds_bias=build.is_first_rank)
        self.shared = shared
        self.loads: ExpertLoads | None = None  # None: all experts stay on the device

    def _routing_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        data = torch.empty(shape, dtype=dtype, device=self._build.device)
        self._routing.append(Parameter(f"{self._build.prefix}{name}", data, is_matrix=True))
        return data

    def _split(self, build: BuildContext) -> Split:
        """The inner features of this rank."""
        units: list[int] = []
        if build.group is not None and build.method is not None:
            inner, hidden = self.intermediate_size, self.hidden_size
            for gate, up, down in self.names:
                units += (build.method.units(name, inner, hidden)[0] for name in (gate, up))
                units.append(build.method.units(down, hidden, inner)[1])
        return build.split(self.intermediate_size, "expert_intermediate", units)

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]. Outputs of experts are added in fp32 and rounded once.

        adapters: of the shared expert; an adapter with tensors for the others is refused when it is loaded.
        """
        return self.mixed(x, self.route(x), adapters)

    @property
    def is_recordable(self) -> bool:
        """Whether kernels take all experts at once: the host does not wait for the router, and a CUDA graph can record
        the layer. All have the sizes that the number of rows gives them."""
        return self.gate_up.is_stacked and self.down.is_stacked and use_triton(self.gate)

    def mixed(self, x: Tensor, routing: Routing, adapters: RowAdapters | None = None) -> Tensor:
        """What the chosen experts make of the rows of x."""
        weights, chosen = routing
        shared = None if self.shared is None else self.shared(x, adapters)
        host = None if self.loads is None else self.loads.before_experts(x, routing)
        if not isinstance(chosen, Tensor):
            if host is None:
                return self._all_at_once(x, weights, chosen, shared)
            weights, others = host.of_device(routing)
            # Submitted before the host computes.
            of_device = self._all_at_once(x, weights, others, shared, is_part=True)
            return (of_device.float() + host.output(partial(self._sum, host=host))).to(x.dtype)
        out = self._sum(x, groups_of(weights, chosen), host)
        if shared is not None:
            out += shared.float() * self._share(x)
        return out.to(x.dtype)

    def _sum(self, x: Tensor, groups: Iterable[Group], host: HostPart | None) -> Tensor:
        """The weighted sum of groups of rows, one after the other: fp32 [rows, hidden].

        On a GPU without Triton each group of an expert on the host goes there and back.
        """
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, of_rows in groups:
            if host is None or expert not in host.numbers:
                output = self._output(x[rows], expert, self.gate_up, self.down)
            else:
                with host.matrices(expert) as matrices:
                    output = self._output(x[rows].cpu(), expert, *matrices).to(x.device)
            out.index_add_(0, rows, output.float() * of_rows[:, None])
        return out

    def _output(self, x: Tensor, expert: int, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
        """What an expert with these matrices makes of rows."""
        return down.apply(expert, self._gated_unit(gate_up.apply(expert, x)))

    def route(self, x: Tensor) -> Routing:
        """The experts of each row of x.

        As Transformers computes them: scores in fp32, then torch's top k, also among equal ones, of which a kernel on a
        GPU takes the first; or the softmax of the top k alone. The weights stay in fp32, where Transformers rounds
        those of Qwen3-MoE and gpt-oss to the dtype of x.
        """
        logits = linear(widened(x) if self._fp32_router else x, self.gate, self.gate_bias)
        if self.is_recordable:
            from nanovllm.ops.triton_routing import route

            share = None if self.shared_gate is None else linear(x, self.shared_gate)
            return Routing(*route(self.spec, logits, share, self.correction_bias, self.expert_scale))
        logits = logits.float()
        of_chosen = self.spec.scoring == "softmax_of_chosen"
        scores = logits if of_chosen else SCORES[self.spec.scoring](logits)
        choosing = scores if self.correction_bias is None else scores + self.correction_bias
        if self.spec.num_groups > 1:
            choosing = self._in_chosen_groups(choosing)
        chosen = choosing.topk(self.spec.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if of_chosen:
            weights = softmax(weights)
        elif self.spec.norm_topk_prob:
            # A running sum adds in order, so that the other rows have no influence, unlike torch's sum.
            weights = weights / (weights.cumsum(-1)[:, -1:] + LEAST_SUM)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return Routing(weights if self.spec.weight_scale == 1.0 else weights * self.spec.weight_scale, chosen)

    def _in_chosen_groups(self, scores: Tensor) -> Tensor:
        """The scores [rows, experts] with -inf for the experts of groups that are not chosen."""
        grouped = scores.unflatten(-1, (self.spec.num_groups, self.spec.num_experts // self.spec.num_groups))
        best = grouped.topk(2, dim=-1).values
        groups = (best[..., 0] + best[..., 1]).topk(self.spec.chosen_groups, dim=-1).indices
        hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, groups, value=False)
        return grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)

    def _share(self, x: Tensor) -> Tensor:
        """What the output of the shared expert is multiplied by: fp32 [rows, 1]."""
        if self.shared_gate is None:
            return torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
        return sigmoid(linear(x, self.shared_gate).float())

    def _all_at_once(
        self, x: Tensor, weights: Tensor, grouping: Grouping, shared: Tensor | None, *, is_part: bool = False
    ) -> Tensor:
        """The same with kernels that take all experts, so that their numbers stay on the device.

        is_part: whether the grouping is that of `HostPart.of_device`.
        """
        from nanovllm.ops.triton_experts import weighted_sum

        inner = self._gated_unit(self.gate_up.all_at_once(x, grouping.ends, grouping.rows))
        outputs = self.down.all_at_once(inner, grouping.ends)
        if is_part:
            outputs = F.pad(outputs, (0, 0, 0, 1))  # zeros, for choices of experts on the host
        return weighted_sum(outputs, grouping.entries, weights, shared)

    def tensors_of(self, expert: int) -> list[Tensor]:
        """All that the matrices of an expert are read from."""
        return [*self.gate_up.tensors_of(expert), *self.down.tensors_of(expert)]

    def routing_tensors(self) -> Iterator[str]:
        """The names of the tensors that decide about experts."""
        return (parameter.name for parameter in self._routing)


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

    def can_take(self, other: ExpertWeights) -> bool:
        """Whether `take_` knows the form of `other`: the same experts, finished on the CPU, each a weight of its own.

        Plain numbers must lie row by row there, packed ones in panels.
        """
        if not self.is_stacked or other.is_stacked or len(self._parts) != len(other._parts):
            return False
        return all(
            len(forms) == len(self._weights) and all(map(_can_take_form, self._weights, forms, self._sizes))
            for forms in (weights_of_one_form(weight) for weight in other._weights)
        )

    def take_(self, numbers: Sequence[int] | None, parts: Sequence[Tensor]) -> None:
        """Become the matrices of some experts in the form of the CPU's kernels, in the same memory as before.

        This one is stacked, and `can_take` the experts. parts: each of one expert's `tensors_of` there, of n experts
        and on this device: [n, *shape], maybe strided along the first dimension. numbers: which experts those are, each
        once; None: all, in order. Biases stay as they are.
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


def _can_take_form(stack: StoredWeight, weight: StoredWeight, out_features: int) -> bool:
    """Whether a stack can take matrices of this form with so many output features."""
    if isinstance(stack, PackedMatrix) and isinstance(weight, PackedMatrix):
        return can_take_panels(stack.packed, weight.packed, out_features)
    if not isinstance(stack, DenseWeight) or not isinstance(weight, DenseWeight):
        return False
    ((mine,), (theirs,)) = (form.tensors() for form in (stack, weight))
    return not stack.is_interleaved and not weight.is_interleaved and theirs.shape == (out_features, mine.shape[1])


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


def groups_of(weights: Tensor, chosen: Tensor) -> Iterator[Group]:
    """The rows of each expert that any row has chosen, in the order of the experts.

    Without data (on the meta device, to measure memory) all rows choose the same experts, which takes the most.
    """
    rows, k = chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    if chosen.is_meta:
        numbers = range(k)
        counts = [rows] * k
    else:
        distinct, sizes = experts.unique_consecutive(return_counts=True)
        numbers = distinct.tolist()
        counts = sizes.tolist()
    for expert, entries in zip(numbers, order.split(counts), strict=True):
        yield expert, entries // k, weights.flatten()[entries]
