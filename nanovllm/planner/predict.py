"""How long a step takes, and which resource it waits for, from sizes and rates. Pure arithmetic.

A layer's work on the device and its copies go on at the same time. With `overlap` o of the link,

    beside(device, link) = o * max(device, link + idle) + (1 - o) * (device + link)

idle: loads run ahead only as far as the ring is deep. While a layer computes what needs no slot, the link fills the
`ring_slots` slots and then waits, so that max(0, quiet - ring_slots * slot bytes / h2d) of the layer's quiet time is
lost to it. Not hidden at all are the output projection and the fixed costs:

    step = beside(device, link) + head + step + layers * layer + visits * visit

Blocks that the CPU arm attends to take neither link nor device. The arm works beside the device's attention, or in turn
with it where both are one processor:

    device = products + max(attention, arm), or products + attention + arm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.kvcache.budget import TransferCount
from nanovllm.kvcache.decode_shares import ONE_PROCESSOR, Bandwidths, cpu_attention_query_len
from nanovllm.kvcache.prefill_plan import LayerwisePrefill
from nanovllm.planner.cpu_attention import CpuAttentionModel
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
    cpu_attention: bool = False  # the CPU arm attends to a share of the latter
    one_processor: bool = False  # device and host are the same cores and memory


@dataclass(frozen=True, slots=True)
class StepWork:
    """Seconds that a step takes on the device, and on the CPU arm."""

    resource: str  # that the device waits for
    products: float
    attention: float
    quiet: float  # of both, in which no ring slot is needed
    head: float  # the output projection, after the layers
    cpu: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.attention + self.head


@dataclass(frozen=True, slots=True)
class StepModel:
    """The costs of steps of one sequence alone, `query_len` tokens after `context_len` stored ones."""

    network: Network
    placement: KVPlacement
    rates: Rates

    @property
    def no_cpu_attention(self) -> tuple[str, ...]:
        """Rates without which the arm's share is not known. Transfers and times are then those without the arm."""
        if not self.placement.cpu_attention or self.placement.one_processor:
            return ()
        names = ("link", "host_bandwidth", "device_bandwidth")
        return tuple(name for name in names if getattr(self.rates, name) is None)

    def transfers(self, context_len: int, query_len: int) -> TransferCount:
        placement = self.placement
        return self.network.transfers(
            placement.block_size, placement.resident_blocks, context_len, query_len, self._cpu_attention()
        )

    def prefill_transfers(self, step: LayerwisePrefill) -> TransferCount:
        """Of one of `Plan.prefill_steps`. The arm has no part in what goes layer by layer."""
        if step.num_chunks == 1:
            return self.transfers(step.begin, step.end - step.begin)
        placement = self.placement
        return self.network.transfers(
            placement.block_size, placement.resident_blocks, step.begin, step.end - step.begin
        )

    def prefill_chunk(self, context_len: int, query_len: int, samples: bool) -> Prediction:
        """A chunk of the prompt; `samples`: the last one, after which the first token is due.

        device = max(operations / compute, weights / weight bandwidth) + attention operations / attention.
        """
        moved = self.transfers(context_len, query_len)
        missing = self._missing(moved, "compute", "attention")
        net, rates = self.network, self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        products = self._matrix_seconds(query_len, rates.compute)
        operations, cpu = net.attention_operations(context_len, query_len), 0.0
        if not self.placement.one_processor:  # there the arm's operations take the same cores
            cpu_attention_keys = moved.cpu_attention_bytes // (2 * net.spec.kv_size * net.itemsize)
            operations = max(0, operations - 4 * net.spec.q_size * query_len * cpu_attention_keys)
            cpu = self._cpu_attention_seconds(moved)
        # Attention to resident blocks needs no slot either, but next to a chunk's products it is short.
        head = self._head_seconds(samples)
        work = StepWork(COMPUTE, products, operations / rates.attention, quiet=products, head=head, cpu=cpu)
        return self._step(work, moved, context_len, query_len)

    def prefill_part(self, layerwise: LayerwisePrefill, samples: bool) -> Prediction:
        """A part of the prompt that goes layer by layer: the work of all its chunks, beside the copies of one step.

        The layer buffer holds all that a layer needs, so that the link never waits for a slot.
        """
        query_len, moved = layerwise.end - layerwise.begin, self.prefill_transfers(layerwise)
        missing = self._missing(moved, "compute", "attention")
        rates = self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        lengths = [len(layerwise.positions(unit)) for unit in range(layerwise.num_chunks)]
        matrices = sum(self._matrix_seconds(length, rates.compute) for length in lengths)
        attention = self.network.attention_operations(layerwise.begin, query_len) / rates.attention
        work = StepWork(COMPUTE, matrices, attention, quiet=0.0, head=self._head_seconds(samples))
        return self._step(work, moved, layerwise.begin, query_len, steps=layerwise.num_chunks)

    def decode(self, context_len: int) -> Prediction:
        """One token after `context_len` stored ones.

        products = weights / weight bandwidth, attention = KV bytes / device bandwidth, streamed bytes being attended
        too, and arm = its bytes / host bandwidth.
        """
        moved = self.transfers(context_len, 1)
        missing = self._missing(moved, "weight_bandwidth", "head_bandwidth", "device_bandwidth")
        net, rates = self.network, self.rates
        if rates.weight_bandwidth is None or rates.head_bandwidth is None or rates.device_bandwidth is None or missing:
            return Prediction(missing=missing)
        weights = net.spec.num_layers * net.layer_weight_bytes / rates.weight_bandwidth
        attended = net.attended_bytes(context_len, 1)
        resident = max(0, attended - moved.without_cpu_attention.h2d_bytes)
        on_device = max(0, attended - moved.cpu_attention_bytes)
        work = StepWork(
            DEVICE,
            products=weights,
            attention=on_device / rates.device_bandwidth,
            quiet=weights + resident / rates.device_bandwidth,
            head=net.head_bytes / rates.head_bandwidth,
            cpu=self._cpu_attention_seconds(moved),
        )
        return self._step(work, moved, context_len, 1)

    # ---- helpers

    def _cpu_attention(self) -> CpuAttentionModel | None:
        if not self.placement.cpu_attention or self.no_cpu_attention:
            return None
        net, rates, known = self.network, self.rates, ONE_PROCESSOR
        if not self.placement.one_processor:
            assert rates.link is not None and rates.host_bandwidth is not None and rates.device_bandwidth is not None
            known = Bandwidths(rates.link.h2d, rates.host_bandwidth, rates.device_bandwidth)
        return CpuAttentionModel(
            known, net.layer_weight_bytes, cpu_attention_query_len(net.spec.num_heads, net.spec.num_kv_heads)
        )

    def _cpu_attention_seconds(self, moved: TransferCount) -> float:
        if not moved.cpu_attention_bytes:
            return 0.0
        # One processor reads all memory at one rate, so either measurement of it will do.
        rate = self.rates.host_bandwidth or self.rates.device_bandwidth
        assert rate is not None, "the arm takes nothing before its rate is known"
        return moved.cpu_attention_bytes / rate

    def _matrix_seconds(self, tokens: int, compute: float) -> float:
        net, bandwidth = self.network, self.rates.weight_bandwidth
        reading = net.spec.num_layers * net.layer_weight_bytes / bandwidth if bandwidth is not None else 0.0
        return max(net.matrix_operations(tokens) / compute, reading)

    def _head_seconds(self, samples: bool) -> float:
        bandwidth = self.rates.head_bandwidth
        return self.network.head_bytes / bandwidth if samples and bandwidth is not None else 0.0

    def _step(
        self, work: StepWork, moved: TransferCount, context_len: int, query_len: int, steps: int = 1
    ) -> Prediction:
        """The work of device and arm beside the copies, and what nothing hides."""
        net, placement, rates = self.network, self.placement, self.rates
        num_layers = net.spec.num_layers
        block_reads = (
            net.num_block_reads(placement.block_size, placement.resident_blocks, context_len, query_len)
            - moved.cpu_attention_blocks
        )
        fixed = steps * (rates.step_seconds + num_layers * rates.layer_seconds) + block_reads * rates.block_read_seconds
        terms = {work.resource: work.device, FIXED: fixed} | ({HOST: work.cpu} if work.cpu else {})
        attention = work.attention + work.cpu if placement.one_processor else max(work.attention, work.cpu)
        layers, link = work.products + attention, rates.link
        if link is None or not moved:
            return Prediction(layers + work.head + fixed, terms)
        copying = terms[LINK] = link.seconds(moved)
        ahead = placement.ring_slots * net.layout(placement.block_size).block_layer_bytes / link.h2d
        idle = num_layers * max(0.0, work.quiet / num_layers - ahead)
        hidden, in_turn = max(layers, copying + idle), layers + copying
        beside = link.overlap * hidden + (1 - link.overlap) * in_turn
        return Prediction(beside + work.head + fixed, terms)

    def _missing(self, moved: TransferCount, *needed: str) -> tuple[str, ...]:
        names = [*needed, "link"] if moved else needed
        return tuple(name for name in names if getattr(self.rates, name) is None)


def total(parts: Sequence[Prediction]) -> Prediction:
    """Steps one after the other."""
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    if missing:
        return Prediction(missing=missing)
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    return Prediction(sum(part.seconds or 0.0 for part in parts), terms)
