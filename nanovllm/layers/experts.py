"""Mixture of experts: a router chooses a few MLPs for each row. Sources: Jiang et al., "Mixtral of Experts" (2024);
Yang et al., "Qwen3 Technical Report" (2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanovllm.data.network import ExpertSpec
from nanovllm.layers.linear import DenseWeight, RowAdapters, linear
from nanovllm.layers.linear_method import LinearMethod, NamedSlots, StoredWeight, slot_of
from nanovllm.ops.cpu_kernels import use_huge_pages
from nanovllm.ops.row_kernels import GATED_UNITS, softmax
from nanovllm.ops.triton_support import use_triton

Group = tuple[int, Tensor, Tensor]  # expert, its rows int64 [n], and their weights fp32 [n]


class Experts:
    """The MLP of a layer with experts: the weighted sum of those that the router chooses for a row.

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
    ) -> None:
        """activation: one of GATED_UNITS; method: how the matrices of the experts are stored."""
        self.spec = spec
        self._gated_unit = GATED_UNITS[activation]
        self._router = spec.router(layer)
        self.gate = torch.empty(spec.num_experts, hidden_size, dtype=dtype, device=device)
        modules = [spec.expert(layer, index) for index in range(spec.num_experts)]
        inner = spec.intermediate_size
        gate_up = [{gate: inner, up: inner} for gate, up, _ in modules]
        self.gate_up = ExpertWeights(gate_up, hidden_size, method, dtype, device)
        self.down = ExpertWeights([{down: hidden_size} for _, _, down in modules], inner, method, dtype, device)

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]. Outputs of experts are added in fp32 and rounded once.

        adapters: have nothing for experts; an adapter with tensors for them is refused when it is loaded.
        """
        weights, chosen = self.route(x)
        if self.gate_up.dense is not None and self.down.dense is not None and use_triton(x):
            return self._all_at_once(x, weights, chosen, self.gate_up.dense, self.down.dense)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, rows, of_rows in _groups(weights, chosen):
            inner = self._gated_unit(self.gate_up[expert].apply(x[rows], None))
            out.index_add_(0, rows, self.down[expert].apply(inner, None).float() * of_rows[:, None])
        return out.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights fp32 [rows, k] and the numbers int64 [rows, k] of each row's k experts.

        As Transformers computes them: softmax in fp32 over all experts, then torch's top k, also among equal ones. The
        weights stay in fp32, where Transformers rounds those of Qwen3-MoE to the dtype of x.
        """
        weights, chosen = softmax(linear(x, self.gate).float()).topk(self.spec.num_experts_per_tok, dim=-1)
        if self.spec.norm_topk_prob:
            # A running sum adds in order, so that the other rows have no influence, unlike torch's sum.
            weights = weights / weights.cumsum(-1)[:, -1:]
        return weights, chosen

    def _all_at_once(self, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The same with a kernel that takes all experts, so that their numbers stay on the device."""
        from nanovllm.ops.triton_experts import grouped_linear, weighted_sum

        k = self.spec.num_experts_per_tok
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(len(gate_up), device=x.device), right=True)
        inner = self._gated_unit(grouped_linear(x, gate_up, ends, order // k))
        return weighted_sum(grouped_linear(inner, down, ends), order.argsort().view(-1, k), weights)

    def slots(self) -> NamedSlots:
        yield f"{self._router}.weight", slot_of(self.gate)
        yield from self.gate_up.slots()
        yield from self.down.slots()

    def weights(self) -> Iterator[StoredWeight]:
        """The matrices of the experts, without the router's."""
        yield from self.gate_up
        yield from self.down


class ExpertWeights:
    """One matrix [out, in] of every expert.

    dense: all of them, [experts, out, in], if they are stored as plain numbers; else None. Reordered on the CPU.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, int]],
        in_features: int,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: of each expert's matrix; see `LinearMethod.create`."""
        self.dense: Tensor | None = None
        self._weights: list[StoredWeight] = []
        if method is not None:
            self._weights += [method.create(of_expert, in_features, dtype, device) for of_expert in parts]
            return
        self.dense = torch.empty(len(parts), sum(parts[0].values()), in_features, dtype=dtype, device=device)
        use_huge_pages(self.dense)
        for of_expert, memory in zip(parts, self.dense, strict=True):
            self._weights.append(DenseWeight(of_expert, in_features, dtype, device, memory))

    def __getitem__(self, expert: int) -> StoredWeight:
        return self._weights[expert]

    def __iter__(self) -> Iterator[StoredWeight]:
        return iter(self._weights)

    def slots(self) -> NamedSlots:
        for weight in self._weights:
            yield from weight.slots()


def _groups(weights: Tensor, chosen: Tensor) -> Iterator[Group]:
    """The rows of each expert that any row has chosen, in the order of the experts.

    Without data (on the meta device, to measure memory) all rows choose the same experts, which takes the most.
    """
    rows, k = chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    if chosen.is_meta:
        numbers, counts = range(k), [rows] * k
    else:
        distinct, sizes = experts.unique_consecutive(return_counts=True)
        numbers, counts = distinct.tolist(), sizes.tolist()
    for expert, entries in zip(numbers, order.split(counts), strict=True):
        yield expert, entries // k, weights.flatten()[entries]
