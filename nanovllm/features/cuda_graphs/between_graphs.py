"""What a recorded step leaves out: it runs between the graphs, where the recording was cut for it.

That is attention that no graph can record, and weights that come from the host: which experts are needed is known when
the graph before them has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.layers.causal_lm import CausalLM, LayerWeights
from nanovllm.layers.expert_weights import ExpertWeights
from nanovllm.layers.experts import ExpertLoads, Experts, Group, HostPart, Routing
from nanovllm.layers.forward_context import ForwardContext

if TYPE_CHECKING:
    from nanovllm.ops.triton_routing import Grouping

# Takes the number of rows that a step has, before those that fill its shape, and its context.
Call = Callable[[int, ForwardContext], None]


@dataclass(slots=True)
class Cuts:
    """The ends of graphs, with the call that follows each."""

    end_graph: Callable[[], None]
    calls: list[Call] = field(default_factory=list)

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.end_graph()


# ---- attention


@dataclass(frozen=True, slots=True)
class AttentionBetweenGraphs:
    """The KV cache of a recording whose attention runs between graphs."""

    cuts: Cuts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `layers.forward_context.KVCache`. The output replaces q."""
        self.cuts.add(partial(_attend, layer, q, k, v))
        return q


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rows: int, ctx: ForwardContext) -> None:
    q, k, v = (part[:rows] for part in (q, k, v))
    q.copy_(ctx.kv_cache.attend(layer, q, k, v, ctx))


# ---- weights


@contextmanager
def weights_between_graphs(model: CausalLM, cuts: Cuts) -> Iterator[None]:
    """Context in which a pass of the model asks for no weights that stream, but is cut where it would."""
    weights = model.layer_weights
    choosing = [(experts, experts.loads) for experts in model.experts if experts.loads is not None]
    try:
        if weights is not None:
            model.layer_weights = LayersBetweenGraphs(model, weights, cuts)
            for experts, loads in choosing:
                experts.loads = ChosenBetweenGraphs(model.layer_weights, loads, cuts)
        yield
    finally:
        model.layer_weights = weights
        for experts, loads in choosing:
            experts.loads = loads


class LayersBetweenGraphs:
    """Implements `LayerWeights` for a recording.

    Before a layer that streams, and the one behind it, which frees its slot, a graph ends. Where experts are chosen
    nothing else of the layer streams, so that one cut is enough, behind the router.
    """

    def __init__(self, model: CausalLM, weights: LayerWeights, cuts: Cuts) -> None:
        self.streamed = weights.streamed
        self.streamed_bytes = weights.streamed_bytes
        self.index = 0  # of the layer that is recorded now
        self.weights = weights
        self._cuts = cuts
        whole = set(weights.streamed).difference(
            index
            for index, layer in enumerate(model.layers)
            if any(isinstance(child, Experts) and child.loads is not None for child in layer.children())
        )
        self._cut = whole.union((index + 1) % len(model.layers) for index in whole)

    def before_layer(self, index: int, rows: int) -> None:
        """See `LayerWeights`."""
        self.index = index
        if index in self._cut:
            self._cuts.add(lambda rows, _: self.weights.before_layer(index, rows))

    def is_recorded(self, rows: int) -> bool:
        """See `LayerWeights`."""
        return self.weights.is_recorded(rows)

    @property
    def loaded_bytes(self) -> int:
        """See `LayerWeights`."""
        return self.weights.loaded_bytes

    @property
    def read_bytes(self) -> int:
        """See `LayerWeights`."""
        return self.weights.read_bytes

    def close(self) -> None:
        """See `LayerWeights`."""
        self.weights.close()


@dataclass(frozen=True, slots=True)
class ChosenBetweenGraphs:
    """Implements `ExpertLoads` for a recording."""

    layers: LayersBetweenGraphs
    loads: ExpertLoads
    cuts: Cuts

    @property
    def uses_host(self) -> bool:
        return self.loads.uses_host

    def before_experts(self, x: Tensor, routing: Routing) -> HostPart | None:
        """See `ExpertLoads`. Recorded kernels expect that any expert may be on the host."""
        part = RecordedPart(self.layers, self.loads, self.cuts, x, routing)
        self.cuts.add(part.bring)
        return part if self.loads.uses_host else None


class RecordedPart:
    """Implements `HostPart` for a recording, with that of the latest step.

    The routing that the router has left in place becomes the device's part of it. What the host adds, zeros if it has
    no expert, comes when the device's part has been submitted.
    """

    def __init__(
        self, layers: LayersBetweenGraphs, loads: ExpertLoads, cuts: Cuts, x: Tensor, routing: Routing
    ) -> None:
        """x: [rows, hidden], with more rows than a step may have, as the routing."""
        self.numbers: Set[int] = frozenset()
        self._index = layers.index
        self._weights = layers.weights
        self._loads = loads
        self._cuts = cuts
        self._x = x
        self._routing = routing
        self._host: HostPart | None = None

    def bring(self, rows: int, ctx: ForwardContext) -> None:
        """Bring the experts that the first rows have chosen. Those of the others are left as they are."""
        self._weights.before_layer(self._index, rows)
        weights, chosen = self._routing
        if isinstance(chosen, Tensor):
            self._host = self._loads.before_experts(self._x[:rows], Routing(weights[:rows], chosen[:rows]))
        else:
            own = chosen._replace(entries=chosen.entries[:rows])
            routing = Routing(weights[:rows], own)
            self._host = self._loads.before_experts(self._x[:rows], routing)
            if self._host is not None:
                torch._foreach_copy_([*own], [*self._host.of_device(routing)[1]])
        self.numbers = frozenset() if self._host is None else self._host.numbers

    def matrices(self, expert: int) -> AbstractContextManager[tuple[ExpertWeights, ExpertWeights]]:
        """See `HostPart`."""
        assert self._host is not None
        return self._host.matrices(expert)

    def of_device(self, routing: Routing) -> tuple[Tensor, Grouping]:
        """See `HostPart`."""
        weights, grouping = self._routing
        assert not isinstance(grouping, Tensor)
        return weights, grouping

    def output(self, compute: Callable[[Tensor, Iterable[Group]], Tensor]) -> Tensor:
        """See `HostPart`."""
        total = torch.empty(self._x.shape, dtype=torch.float32, device=self._x.device)

        def fill(rows: int, ctx: ForwardContext) -> None:
            if self._host is None:
                total.zero_()
            else:
                total[:rows].copy_(self._host.output(compute))

        self._cuts.add(fill)
        return total
