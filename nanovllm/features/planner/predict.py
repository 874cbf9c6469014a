"""How long a step takes, and which resource limits it, from sizes and rates. Pure arithmetic.

The device computes a layer while the link copies KV. With the link's `overlap` o, the layers take

    together(device, link) = o * max(device, link + stall) + (1 - o) * (device + link)

stall: loads run ahead of attention only as far as the ring is deep. While a layer computes what needs no ring slot
("slot-free" work, such as projections), the link fills the `ring_slots` slots and then waits. Each layer thus costs the
link max(0, slot-free seconds - ring_slots * slot bytes / h2d). The output projection and the fixed costs are not
overlapped:

    step = together(device, link) + head + step + layers * layer + block reads * block read

Host blocks that the CPU attends to take neither link nor device. CPU attention runs at the same time as attention on
the device, or after it if both are one processor:

    device = products + max(attention, CPU attention), or products + attention + CPU attention

Tensor-parallel ranks wait for each other in every sum, while the link copies: to `device` come

    all-reduces * all-reduce + bytes received / interconnect
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.data.layerwise import LayerwisePrefill
from nanovllm.features.cpu_attention.shares import ONE_PROCESSOR, Bandwidths, cpu_attention_query_len
from nanovllm.features.planner.machine import Rates
from nanovllm.features.planner.network import CpuAttentionModel, Network
from nanovllm.memory.budget import TransferCount

COMPUTE, DEVICE, HOST, LINK, INTERCONNECT, FIXED = (
    "compute",
    "device memory bandwidth",
    "host memory bandwidth",
    "link",
    "interconnect",
    "fixed costs",
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of a phase. `seconds` and `limit` are None if a rate that they depend on is missing."""

    seconds: float | None = None
    terms: dict[str, float] = field(default_factory=dict)  # seconds by resource, overlapped or not, where known
    missing: tuple[str, ...] = ()  # unknown rates, as fields of Rates

    @property
    def limit(self) -> str | None:
        """The resource that is busy longest."""
        return max(self.terms, key=lambda name: self.terms[name]) if self.seconds is not None else None


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """The blocks of a lone sequence: the first `resident_blocks` are on the device, the others stream through the ring.

    cpu_attention: the CPU attends to a share of the others. one_processor: device and host are the same cores and
    memory.
    """

    block_size: int
    resident_blocks: int
    ring_slots: int
    cpu_attention: bool = False
    one_processor: bool = False


@dataclass(frozen=True, slots=True)
class StepWork:
    """Seconds of a step's work on the device and on the CPU."""

    resource: str  # that limits the device
    products: float
    attention: float
    slot_free: float  # of both, work that needs no ring slot
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
        """Missing rates without which the CPU's share is unknown. Predictions are then without CPU attention."""
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
        """Of one of `Plan.prefill_steps`. The CPU attends to nothing of a layer-by-layer prefill."""
        placement, query_len = self.placement, step.end - step.begin
        if step.num_chunks == 1:
            return self.transfers(step.begin, query_len)
        return self.network.transfers(placement.block_size, placement.resident_blocks, step.begin, query_len)

    def prefill(self, step: LayerwisePrefill, samples: bool) -> Prediction:
        """A chunk of the prompt, or several chunks layer by layer. `samples`: the first token follows.

        device = max(operations / compute, weights / weight bandwidth) + attention operations / attention. In
        layer-by-layer prefill, the layer buffer holds a layer's KV, so that the link never waits for a ring slot.
        """
        query_len, moved = step.end - step.begin, self.prefill_transfers(step)
        missing = self._missing(moved, "compute", "attention")
        net, rates = self.network, self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        lengths = [len(step.positions(chunk)) for chunk in range(step.num_chunks)]
        products = sum(self._matrix_seconds(length, rates.compute) for length in lengths)
        operations, cpu = net.attention_operations(step.begin, query_len), 0.0
        if not self.placement.one_processor:  # on one processor, CPU attention takes the same operations
            cpu_keys = moved.cpu_attention_bytes // net.layout(1).token_layer_bytes
            operations = max(0, operations - 4 * net.spec.q_size * query_len * cpu_keys)
            cpu = self._cpu_attention_seconds(moved)
        # Attention to resident blocks needs no slot either, but is short compared with a chunk's products.
        slot_free = products if step.num_chunks == 1 else 0.0
        work = StepWork(
            COMPUTE, products, operations / rates.attention, slot_free, head=self._head_seconds(samples), cpu=cpu
        )
        return self._step(work, moved, step.begin, query_len, steps=step.num_chunks)

    def decode(self, context_len: int) -> Prediction:
        """One token after `context_len` stored ones.

        products = weights / weight bandwidth, attention = KV bytes that the device attends to, resident or streamed,
        / device bandwidth, and CPU attention = its bytes / host bandwidth.
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
            slot_free=weights + resident / rates.device_bandwidth,
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
        # One processor reads all memory at one rate, so either measurement serves.
        rate = self.rates.host_bandwidth or self.rates.device_bandwidth
        assert rate is not None, "CPU attention is only predicted with known rates"
        return moved.cpu_attention_bytes / rate

    def _all_reduce_seconds(self, tokens: int) -> float:
        net, rates = self.network, self.rates
        if rates.interconnect is None:
            return 0.0
        return net.num_all_reduces * rates.all_reduce_seconds + net.all_reduce_bytes(tokens) / rates.interconnect

    def _matrix_seconds(self, tokens: int, compute: float) -> float:
        net, bandwidth = self.network, self.rates.weight_bandwidth
        reading = net.spec.num_layers * net.layer_bytes_read(tokens) / bandwidth if bandwidth is not None else 0.0
        return max(net.matrix_operations(tokens) / compute, reading)

    def _head_seconds(self, samples: bool) -> float:
        bandwidth = self.rates.head_bandwidth
        return self.network.head_bytes / bandwidth if samples and bandwidth is not None else 0.0

    def _step(
        self, work: StepWork, moved: TransferCount, context_len: int, query_len: int, steps: int = 1
    ) -> Prediction:
        """The formula for a step in the module's docstring."""
        net, placement, rates = self.network, self.placement, self.rates
        num_layers = net.spec.num_layers
        block_reads = (
            net.num_block_reads(placement.block_size, placement.resident_blocks, context_len, query_len)
            - moved.cpu_attention_blocks
        )
        fixed = steps * (rates.step_seconds + num_layers * rates.layer_seconds) + block_reads * rates.block_read_seconds
        terms = {work.resource: work.device, FIXED: fixed} | ({HOST: work.cpu} if work.cpu else {})
        attention = work.attention + work.cpu if placement.one_processor else max(work.attention, work.cpu)
        sums = self._all_reduce_seconds(query_len)
        terms |= {INTERCONNECT: sums} if sums else {}
        layers, link = work.products + attention + sums, rates.link
        if link is None or not moved:
            return Prediction(layers + work.head + fixed, terms)
        copying = terms[LINK] = link.seconds(moved)
        ahead = placement.ring_slots * net.layout(placement.block_size).block_layer_bytes / link.h2d
        stall = num_layers * max(0.0, (work.slot_free + sums) / num_layers - ahead)
        overlapped, in_turn = max(layers, copying + stall), layers + copying
        together = link.overlap * overlapped + (1 - link.overlap) * in_turn
        return Prediction(together + work.head + fixed, terms)

    def _missing(self, moved: TransferCount, *needed: str) -> tuple[str, ...]:
        names = [*needed, *(["link"] if moved else []), *(["interconnect"] if self.network.num_ranks > 1 else [])]
        return tuple(name for name in names if getattr(self.rates, name) is None)


def total(parts: Sequence[Prediction]) -> Prediction:
    """The sum of consecutive steps."""
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    if missing:
        return Prediction(missing=missing)
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    return Prediction(sum(part.seconds or 0.0 for part in parts), terms)
