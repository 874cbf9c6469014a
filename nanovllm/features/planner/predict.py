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
from functools import cached_property

from nanovllm.data.batch import LayerwisePrefill
from nanovllm.features.cpu_attention.shares import (
    ONE_PROCESSOR,
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    cpu_attention_query_len,
)
from nanovllm.features.planner.dry_run import StepMoves
from nanovllm.features.planner.network import Network
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layout import KVLayout

COMPUTE = "compute"
DEVICE = "device memory bandwidth"
HOST = "host memory bandwidth"
LINK = "link"
INTERCONNECT = "interconnect"
FIXED = "fixed costs"


@dataclass(frozen=True, slots=True)
class Link:
    """The link between host and device during a step, in bytes per second each way.

    overlap: the share of the shorter of copying and computing that the longer one hides. 1 with copy engines; less if
    copies take cores and memory bandwidth from the computation, as on the CPU.
    """

    h2d: float
    d2h: float
    duplex: bool = True  # both directions at the same time
    overlap: float = 1.0

    def seconds(self, moved: TransferCount) -> float:
        """Time of the copies alone."""
        ways = (moved.h2d_bytes / self.h2d, moved.d2h_bytes / self.d2h)
        return max(ways) if self.duplex else sum(ways)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, and fixed costs of a step in seconds. None: unknown."""

    compute: float | None = None  # operations of projections and MLPs on many rows, with norms and activations
    attention: float | None = None  # operations of attention on many rows
    weight_bandwidth: float | None = None  # bytes of a layer's weights that a step of few rows reads
    head_bandwidth: float | None = None  # bytes of the output projection
    device_bandwidth: float | None = None  # bytes of KV cache on the device that decode attends to
    host_bandwidth: float | None = None  # bytes of KV cache on the host that CPU cores attend to
    link: Link | None = None
    disk_bandwidth: float | None = None  # bytes of KV cache that are read from `kv_cache_dir`
    interconnect: float | None = None  # bytes that a tensor-parallel rank receives from the others
    all_reduce_seconds: float = 0.0  # of a sum over the ranks, besides its bytes
    step_seconds: float = 0.0  # of a step: batch, embedding, final norm, choosing the token
    layer_seconds: float = 0.0  # of a layer in a step
    block_read_seconds: float = 0.0  # of one block that passes through the ring in a layer


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


@dataclass(frozen=True)
class StepModel:
    """The costs of steps of one sequence alone, `query_len` tokens after `context_len` stored ones."""

    network: Network
    rates: Rates
    layout: KVLayout
    ring_slots: int
    cpu_attention: bool = False  # the CPU attends to a share of the host blocks
    one_processor: bool = False  # device and host are the same cores and memory

    @property
    def no_cpu_attention(self) -> tuple[str, ...]:
        """Missing rates without which the CPU's share is unknown. Predictions are then without CPU attention."""
        if not self.cpu_attention or self.one_processor:
            return ()
        names = ("link", "host_bandwidth", "device_bandwidth")
        return tuple(name for name in names if getattr(self.rates, name) is None)

    def can_share(self, query_len: int) -> bool:
        """Whether the CPU attends to a share of the host blocks in a chunk of `query_len` tokens."""
        spec = self.network.spec
        most = cpu_attention_query_len(spec.num_heads, spec.num_kv_heads)
        return self.cpu_attention and not self.no_cpu_attention and query_len <= most

    def share_of(self, host_bytes: int, resident_bytes: int, block_bytes: int) -> float:
        """`cpu_share` of a layer that attends to so much KV on the host and on the device."""
        rates = self.rates
        known = ONE_PROCESSOR
        if not self.one_processor:
            assert rates.link is not None and rates.host_bandwidth is not None and rates.device_bandwidth is not None
            known = Bandwidths(rates.link.h2d, rates.host_bandwidth, rates.device_bandwidth)
        return cpu_share(host_bytes, resident_bytes, block_bytes, self._layer_weight_bytes, known)

    @cached_property
    def _layer_weight_bytes(self) -> int:
        return self.network.spec.layer_weight_bytes(self.network.itemsize, rows=1)

    def prefill(self, step: LayerwisePrefill, samples: bool, moves: StepMoves) -> Prediction:
        """A chunk of the prompt, or several chunks layer by layer. `samples`: the first token follows.

        device = max(operations / compute, weights / weight bandwidth) + attention operations / attention. In
        layer-by-layer prefill, the layer buffer holds a layer's KV, so that the link never waits for a ring slot.
        """
        query_len = step.end - step.begin
        moved = moves.transfers
        missing = self._missing(moved, "compute", "attention")
        net = self.network
        rates = self.rates
        if rates.compute is None or rates.attention is None or missing:
            return Prediction(missing=missing)
        lengths = [len(step.positions(chunk)) for chunk in range(step.num_chunks)]
        products = sum(self._matrix_seconds(length, rates.compute) for length in lengths)
        operations = net.attention_operations(step.begin, query_len)
        cpu = 0.0
        if not self.one_processor:  # on one processor, CPU attention takes the same operations
            layout = self.layout.of_groups[0]  # as if all were of layers like the first, which stream the most
            cpu_keys = moved.cpu_attention_bytes // layout.token_layer_bytes
            operations = max(0, operations - 4 * net.spec.num_heads * layout.head_dim * query_len * cpu_keys)
            cpu = self._cpu_attention_seconds(moved)
        # Attention to resident blocks needs no slot either, but is short compared with a chunk's products.
        slot_free = products if step.num_chunks == 1 else 0.0
        work = StepWork(
            COMPUTE, products, operations / rates.attention, slot_free, head=self._head_seconds(samples), cpu=cpu
        )
        return self._step(work, moves, query_len, steps=step.num_chunks)

    def decode(self, context_len: int, moves: StepMoves, rows: int = 1) -> Prediction:
        """One token after `context_len` stored ones.

        rows: with rows - 1 drafts, whose operations come on top of one row's reading, where their rates are known.

        products = weights / weight bandwidth, attention = KV bytes that the device attends to, resident or streamed,
        with recurrent states that it reads and writes, / device bandwidth, and CPU attention = its bytes / host
        bandwidth.
        """
        moved = moves.transfers
        missing = self._missing(moved, "weight_bandwidth", "head_bandwidth", "device_bandwidth")
        net = self.network
        rates = self.rates
        if rates.weight_bandwidth is None or rates.head_bandwidth is None or rates.device_bandwidth is None or missing:
            return Prediction(missing=missing)
        weights = net.spec.num_layers * net.spec.layer_weight_bytes(net.itemsize, rows) / rates.weight_bandwidth
        weights += net.matrix_operations(rows - 1) / rates.compute if rates.compute is not None else 0.0
        scores = net.attention_operations(context_len + 1, rows - 1)
        attended = net.attended_bytes(context_len, 1)
        resident = max(0, attended - moved.without_cpu_attention.h2d_bytes)
        on_device = max(0, attended - moved.cpu_attention_bytes)
        work = StepWork(
            DEVICE,
            products=weights,
            attention=(on_device + 2 * net.state_bytes) / rates.device_bandwidth
            + (scores / rates.attention if rates.attention is not None else 0.0),
            slot_free=weights + resident / rates.device_bandwidth,
            head=net.spec.head_bytes(net.itemsize) / rates.head_bandwidth,
            cpu=self._cpu_attention_seconds(moved),
        )
        return self._step(work, moves, rows)

    # ---- helpers

    def _cpu_attention_seconds(self, moved: TransferCount) -> float:
        if not moved.cpu_attention_bytes:
            return 0.0
        # One processor reads all memory at one rate, so either measurement serves.
        rate = self.rates.host_bandwidth or self.rates.device_bandwidth
        assert rate is not None, "CPU attention is only predicted with known rates"
        return moved.cpu_attention_bytes / rate

    def _all_reduce_seconds(self, tokens: int) -> float:
        net = self.network
        rates = self.rates
        if rates.interconnect is None:
            return 0.0
        return net.num_all_reduces * rates.all_reduce_seconds + net.all_reduce_bytes(tokens) / rates.interconnect

    def _matrix_seconds(self, tokens: int, compute: float) -> float:
        net = self.network
        bandwidth = self.rates.weight_bandwidth
        read = net.spec.num_layers * net.spec.layer_weight_bytes(net.itemsize, tokens)  # of experts, the chosen ones
        return max(net.matrix_operations(tokens) / compute, 0.0 if bandwidth is None else read / bandwidth)

    def _head_seconds(self, samples: bool) -> float:
        bandwidth = self.rates.head_bandwidth
        if not samples or bandwidth is None:
            return 0.0
        return self.network.spec.head_bytes(self.network.itemsize) / bandwidth

    def _step(self, work: StepWork, moves: StepMoves, query_len: int, steps: int = 1) -> Prediction:
        """The formula for a step in the module's docstring."""
        net = self.network
        rates = self.rates
        moved = moves.transfers
        num_layers = net.spec.num_layers
        reading = moves.block_reads * rates.block_read_seconds
        fixed = steps * (rates.step_seconds + num_layers * rates.layer_seconds) + reading
        terms = {work.resource: work.device, FIXED: fixed} | ({HOST: work.cpu} if work.cpu else {})
        attention = work.attention + work.cpu if self.one_processor else max(work.attention, work.cpu)
        sums = self._all_reduce_seconds(query_len)
        terms |= {INTERCONNECT: sums} if sums else {}
        layers = work.products + attention + sums
        link = rates.link
        if link is None or not moved:
            return Prediction(layers + work.head + fixed, terms)
        copying = terms[LINK] = link.seconds(moved)
        ahead = self.ring_slots * self.layout.block_layer_bytes / link.h2d
        stall = num_layers * max(0.0, (work.slot_free + sums) / num_layers - ahead)
        overlapped = max(layers, copying + stall)
        in_turn = layers + copying
        together = link.overlap * overlapped + (1 - link.overlap) * in_turn
        return Prediction(together + work.head + fixed, terms)

    def _missing(self, moved: TransferCount, *needed: str) -> tuple[str, ...]:
        names = [*needed, *(["link"] if moved else []), *(["interconnect"] if self.network.num_ranks > 1 else [])]
        return tuple(name for name in names if getattr(self.rates, name) is None)


def cpu_share(host_bytes: int, resident_bytes: int, block_bytes: int, weight_bytes: int, rates: Bandwidths) -> float:
    """The share of a layer's whole host blocks that the engine leaves to the CPU.

    host_bytes, resident_bytes: of the KV that the layer attends to; block_bytes: one layer of a block; weight_bytes: of
    the layer.
    """
    num_blocks, rest = divmod(host_bytes, block_bytes)
    load = LayerLoad([HostRead(block_bytes)] * num_blocks, rest, resident_bytes + rest, weight_bytes)
    return blocks_for_cpu_attention(load, rates) / num_blocks if num_blocks else 0.0


def total(parts: Sequence[Prediction]) -> Prediction:
    """The sum of consecutive steps."""
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    if missing:
        return Prediction(missing=missing)
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    return Prediction(sum(part.seconds or 0.0 for part in parts), terms)
