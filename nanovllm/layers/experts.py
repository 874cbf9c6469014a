"""Mixture of experts: a router chooses a few MLPs for each row. Sources: Jiang et al., "Mixtral of Experts" (2024);
Yang et al., "Qwen3 Technical Report" (2025); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1; OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card" (2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nanovllm.data.network import ExpertSpec, Scoring
from nanovllm.layers.linear import DenseWeight, GatedMLP, RowAdapters, create_weight, linear
from nanovllm.layers.linear_method import LinearMethod, NamedSlots, StoredWeight, slot_of
from nanovllm.layers.packed_matrix import PackedMatrix
from nanovllm.ops.cpu_kernels import use_huge_pages
from nanovllm.ops.packed_weights import packed_linear
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


class Experts:
    """The MLP of a layer with experts: the weighted sum of those that the router chooses for a row.

    In some families also of one that all rows share.

    The rows are grouped by expert. On the CPU the bits of a row do not depend on the other rows: products compute each
    row alone, and its experts are added in the order of their numbers.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        layer: int,
        hidden_size: int,
        activation: str,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
        adds_biases: bool = True,
    ) -> None:
        """activation: one of GATED_UNITS; method: how the matrices of the experts are stored; adds_biases: see
        `DecoderSpec`."""
        self.spec = spec
        self._gated_unit = GATED_UNITS[activation]
        self._routing = {
            name: torch.empty(shape, dtype=torch.float32 if wide else dtype, device=device)
            for name, shape, wide in spec.routing_tensors(layer, hidden_size)
        }
        self.gate, *others = self._routing.values()
        self.gate_bias = others.pop(0) if spec.biases else None
        self.correction_bias = None if spec.correction_bias is None else others.pop(0)
        self.expert_scale = None if spec.expert_scale is None else others.pop(0)
        modules = [spec.expert(layer, index) for index in range(spec.num_experts)]
        inner = spec.intermediate_size
        down_biases = spec.biases and adds_biases
        gate_up = [{gate: inner, up: inner} for gate, up, _ in modules]
        self.gate_up = ExpertWeights(gate_up, hidden_size, method, dtype, device, spec.biases)
        down = [{down: hidden_size} for _, _, down in modules]
        self.down = ExpertWeights(down, inner, method, dtype, device, down_biases)
        self.shared: GatedMLP | None = None
        self.shared_gate = None if spec.shared is None or spec.shared.gate is None else others.pop(0)
        if spec.shared is not None:
            inner = spec.shared.intermediate_size
            parts = {"gate_proj": inner, "up_proj": inner}
            prefix = spec.shared_prefix(layer)
            stored = (activation, method, dtype, device)
            self.shared = GatedMLP(hidden_size, inner, parts, prefix, (False, False), *stored)

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
        if not isinstance(chosen, Tensor):
            return self._all_at_once(x, weights, chosen, shared)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, of_rows in _groups(weights, chosen):
            inner = self._gated_unit(self.gate_up.apply(expert, x[rows]))
            out.index_add_(0, rows, self.down.apply(expert, inner).float() * of_rows[:, None])
        if shared is not None:
            out += shared.float() * self._share(x)
        return out.to(x.dtype)

    def route(self, x: Tensor) -> Routing:
        """The experts of each row of x.

        As Transformers computes them: scores in fp32, then torch's top k, also among equal ones, of which a kernel on a
        GPU takes the first; or the softmax of the top k alone. The weights stay in fp32, where Transformers rounds
        those of Qwen3-MoE and gpt-oss to the dtype of x.
        """
        logits = linear(widened(x) if self.spec.fp32_router else x, self.gate, self.gate_bias)
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

    def _all_at_once(self, x: Tensor, weights: Tensor, grouping: Grouping, shared: Tensor | None) -> Tensor:
        """The same with kernels that take all experts, so that their numbers stay on the device."""
        from nanovllm.ops.triton_experts import weighted_sum

        inner = self._gated_unit(self.gate_up.all_at_once(x, grouping.ends, grouping.rows))
        return weighted_sum(self.down.all_at_once(inner, grouping.ends), grouping.entries, weights, shared)

    def slots(self) -> NamedSlots:
        for name, tensor in self._routing.items():
            yield name, slot_of(tensor)
        yield from self.gate_up.slots()
        yield from self.down.slots()
        if self.shared is not None:
            yield from self.shared.slots()

    def weights(self) -> Iterator[StoredWeight]:
        """The matrices of the experts, without the router's."""
        yield from self.gate_up
        yield from self.down
        if self.shared is not None:
            yield from self.shared.weights()


class ExpertWeights:
    """One matrix [out, in] of every expert.

    On a GPU those of all experts are one weight, one below the other, so that a kernel finds each, and where a file has
    the parts of a matrix in different forms, a weight for each part. Elsewhere, and where forms differ from expert to
    expert, they are weights of their own. Biases are [experts, out] of a stack or of the whole matrix.

    dense: all of them, [experts, out, in], if they are stored as plain numbers on the CPU; else None. Reordered there.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, int]],
        in_features: int,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        """parts: of each expert's matrix; see `LinearMethod.create`."""
        self._parts = parts
        self.dense: Tensor | None = None
        stacks = _stacks(parts, in_features, method, dtype) if stacked_on(device) else None
        self.is_stacked = stacks is not None
        self._sizes = [sum(parts[0].values())] if stacks is None or len(stacks) == 1 else list(parts[0].values())
        self._biases: list[Tensor | None] = [
            torch.empty(len(parts), size, dtype=dtype, device=device) if bias else None for size in self._sizes
        ]
        self._weights: list[StoredWeight] = []
        if stacks is not None:
            self._weights += [create_weight(method, stack, in_features, dtype, device) for stack in stacks]
        elif method is not None:
            self._weights += [method.create(of_expert, in_features, dtype, device) for of_expert in parts]
        else:
            self.dense = torch.empty(len(parts), self._sizes[0], in_features, dtype=dtype, device=device)
            use_huge_pages(self.dense)
            for of_expert, memory in zip(parts, self.dense, strict=True):
                self._weights.append(DenseWeight(of_expert, in_features, dtype, device, memory))

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

    def __iter__(self) -> Iterator[StoredWeight]:
        return iter(self._weights)

    def slots(self) -> NamedSlots:
        for weight in self._weights:
            yield from weight.slots()
        for expert, parts in enumerate(self._parts):
            biases = [biases[expert] for biases in self._biases if biases is not None]
            parts_of_bias = biases[0].split(list(parts.values())) if len(biases) == 1 else biases
            for module, part in zip(parts, parts_of_bias, strict=bool(biases)):
                yield f"{module}.bias", slot_of(part)


def stacked_on(device: torch.device) -> bool:
    """Whether the matrices of all experts are one weight there."""
    return device.type == "cuda"


def _stacks(
    parts: Sequence[Mapping[str, int]], in_features: int, method: LinearMethod | None, dtype: torch.dtype
) -> list[dict[str, int]] | None:
    """The modules of one weight for all experts, or of one for each part of their matrices; None if these have several
    forms."""

    def has_one_form(stack: dict[str, int]) -> bool:
        weight = create_weight(method, stack, in_features, dtype, torch.device("meta"))
        return weight.dense is not None or isinstance(weight, PackedMatrix)

    whole = {module: size for of_expert in parts for module, size in of_expert.items()}
    if has_one_form(whole):
        return [whole]
    by_part = [dict(of_experts) for of_experts in zip(*(of_expert.items() for of_expert in parts), strict=True)]
    return by_part if all(map(has_one_form, by_part)) else None


def _groups(weights: Tensor, chosen: Tensor) -> Iterator[Group]:
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
