"""Mixture of experts: a router chooses a few MLPs for each row. Sources: Jiang et al., "Mixtral of Experts" (2024);
Yang et al., "Qwen3 Technical Report" (2025); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1; OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card" (2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.data.network import ExpertSpec, Scoring
from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.dense_weight import linear
from nanovllm.layers.expert_weights import ExpertWeights
from nanovllm.layers.linear import RowAdapters
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.module import Module, Parameter
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
