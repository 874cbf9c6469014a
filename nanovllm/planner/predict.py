"""How long a step takes, and which resource it waits for, from sizes and rates. Pure arithmetic.

A layer's work on the device and its copies go on at the same time. With `overlap` o of the link,

    beside(device, link) = o * max(device, link + idle) + (1 - o) * (device + link)

idle: loads run ahead only as far as the ring is deep. While a layer computes what needs no slot, the link fills the
`ring_slots` slots and then waits, so that max(0, quiet - ring_slots * slot bytes / h2d) of the layer's quiet time is
lost to it. Not hidden at all are the output projection and the fixed costs:

    step = beside(device, link) + head + step + layers * layer + visits * visit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.kvcache.budget import TransferCount
from nanovllm.kvcache.prefill_plan import PrefillSpan
from nanovllm.planner.machine import Rates
from nanovllm.planner.network import Network

COMPUTE, DEVICE, HOST, LINK, FIXED = (
    "compute",
    "device memory bandwidth",
    "host memory bandwidth",
    "link",
    "fixed costs",
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a phase takes. Where a rate is missing that it depends on, `seconds` and `limit` are None."""

    seconds: float | None = None
    terms: dict[str, float] = field(default_factory=dict)  # seconds by resource, overlapped or not, where known
    missing: tuple[str, ...] = ()  # rates that are not known, as fields of Rates

    @property
    def limit(self) -> str | None:
        """The resource that works longest."""
        return max(self.terms, key=lambda name: self.terms[name]) if self.seconds is not None else None


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """Where a lone sequence's blocks are: the first `resident_blocks` on the device, the others behind the ring."""

    block_size: int
    resident_blocks: int
    ring_slots: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Seconds that a step takes on the device."""

    resource: str  # that they wait for
    layers: float
    quiet: float  # of the layers', in which no ring slot is needed
    head: float  # the output projection, after the layers


@dataclass(frozen=True, slots=True)
class StepModel:
    """The costs of steps of one sequence alone, `query_len` tokens after `context_len` stored ones."""

    network: Network
    placement: KVPlacement
    rates: Rates

    def transfers(self, context_len: int, query_len: int) -> TransferCount:
        place = self.placement
        return self.network.transfers(place.block_size, place.resident_blocks, context_len, query_len)

    def prefill_chunk(self, context_len: int, query_len: int, samples: bool) -> Prediction:
        """A chunk of the prompt; `samples`: the last one, after which the first token is due.

        device = max(operations / compute, weights / weight bandwidth) + attention operations / attention.
        """
        missing = self._missing(context_len, query_len, "compute", "attention")
        net, rates = self.network, self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        matrices = self._matrix_seconds(query_len, rates.compute)
        attention = net.attention_operations(context_len, query_len) / rates.attention
        # Attention to resident blocks needs no slot either, but next to a chunk's products it is short.
        work = DeviceWork(COMPUTE, matrices + attention, matrices, self._head_seconds(samples))
        return self._step(work, context_len, query_len)

    def prefill_span(self, span: PrefillSpan, samples: bool) -> Prediction:
        """A part of the prompt that goes layer by layer: the work of all its chunks, beside the copies of one step.

        The layer buffer holds all that a layer needs, so that the link never waits for a slot.
        """
        query_len = span.end - span.begin
        missing = self._missing(span.begin, query_len, "compute", "attention")
        rates = self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        lengths = [len(span.positions(unit)) for unit in range(span.num_chunks)]
        matrices = sum(self._matrix_seconds(length, rates.compute) for length in lengths)
        attention = self.network.attention_operations(span.begin, query_len) / rates.attention
        work = DeviceWork(COMPUTE, matrices + attention, 0.0, self._head_seconds(samples))
        return self._step(work, span.begin, query_len, steps=span.num_chunks)

    def decode(self, context_len: int) -> Prediction:
        """One token after `context_len` stored ones.

        device = weights / weight bandwidth + attended KV bytes / device bandwidth, streamed bytes being attended too.
        """
        missing = self._missing(context_len, 1, "weight_bandwidth", "head_bandwidth", "device_bandwidth")
        net, rates = self.network, self.rates
        if rates.weight_bandwidth is None or rates.head_bandwidth is None or rates.device_bandwidth is None or missing:
            return Prediction(missing=missing)
        weights = net.spec.num_layers * net.layer_weight_bytes / rates.weight_bandwidth
        attended = net.attended_bytes(context_len, 1)
        resident = max(0, attended - self.transfers(context_len, 1).h2d_bytes)
        layers, quiet = (weights + size / rates.device_bandwidth for size in (attended, resident))
        return self._step(DeviceWork(DEVICE, layers, quiet, net.head_bytes / rates.head_bandwidth), context_len, 1)

    # ---- helpers

    def _matrix_seconds(self, tokens: int, compute: float) -> float:
        net, bandwidth = self.network, self.rates.weight_bandwidth
        reading = net.spec.num_layers * net.layer_weight_bytes / bandwidth if bandwidth is not None else 0.0
        return max(net.matrix_operations(tokens) / compute, reading)

    def _head_seconds(self, samples: bool) -> float:
        bandwidth = self.rates.head_bandwidth
        return self.network.head_bytes / bandwidth if samples and bandwidth is not None else 0.0

    def _step(self, work: DeviceWork, context_len: int, query_len: int, steps: int = 1) -> Prediction:
        """The device's work beside the copies, and what nothing hides."""
        net, place, rates = self.network, self.placement, self.rates
        num_layers = net.spec.num_layers
        visits = net.visits(place.block_size, place.resident_blocks, context_len, query_len)
        fixed = steps * (rates.step_seconds + num_layers * rates.layer_seconds) + visits * rates.visit_seconds
        terms = {work.resource: work.layers + work.head, FIXED: fixed}
        moved, link = self.transfers(context_len, query_len), rates.link
        if link is None or not moved:
            return Prediction(work.layers + work.head + fixed, terms)
        copying = terms[LINK] = link.seconds(moved)
        ahead = place.ring_slots * net.layout(place.block_size).block_layer_bytes / link.h2d
        idle = num_layers * max(0.0, work.quiet / num_layers - ahead)
        hidden, in_turn = max(work.layers, copying + idle), work.layers + copying
        beside = link.overlap * hidden + (1 - link.overlap) * in_turn
        return Prediction(beside + work.head + fixed, terms)

    def _missing(self, context_len: int, query_len: int, *needed: str) -> tuple[str, ...]:
        names = [*needed, "link"] if self.transfers(context_len, query_len) else needed
        return tuple(name for name in names if getattr(self.rates, name) is None)


def total(parts: Sequence[Prediction]) -> Prediction:
    """Steps one after the other."""
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    if missing:
        return Prediction(missing=missing)
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    return Prediction(sum(part.seconds or 0.0 for part in parts), terms)
