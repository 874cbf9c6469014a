"""How long a step takes, and which resource limits it, from sizes and rates. Pure arithmetic.

The device computes the layers while the link copies KV. A step takes the longer of the two, and then the output
projection. The link also copies the weights of layers that stream, of the next step's first layer during the head:

    step = max(max(device + multiplied / host's rate + chosen / link's rate + chosen read / disk's rate,
                   KV / link's rate + stall) + head,
               (KV in + weights) / link's rate, read / disk's rate)

device: in prefill max(operations / compute, weights / device bandwidth) + attention operations / compute; in decode the
bytes of weights and of KV that are read / device bandwidth.

stall: loads run ahead of attention only as far as the ring is deep. While a layer computes what needs no ring slot,
such as projections ("slot-free" work), the link fills the `ring_slots` slots and then waits. Each layer thus costs the
link max(0, slot-free seconds - ring_slots * slot bytes / link). Weights cross in that time.

weights: `WeightPlan.loaded_bytes` once a pass, which is a chunk of a prompt, a layer-by-layer prefill as a whole, or a
decode step. chosen: `WeightPlan.chosen_bytes` of them, for which the device waits behind each router. They are those of
even choices: real ones hit the cache more often. multiplied: `WeightPlan.multiplied_bytes`, with which the host
multiplies, and not the device; of layers without experts a share, so that host and link take the same time. read,
chosen read: what of all these comes from disk.

Host blocks that the CPU attends to take neither link nor device. CPU attention runs beside attention on the device, or
after it where both are one processor. Tensor-parallel ranks wait for each other in every sum, so that the device also
takes

    all-reduces * all-reduce seconds + bytes received / interconnect
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.data.batch import LayerwisePrefill
from nanovllm.data.network import Network
from nanovllm.features.cpu_attention.shares import (
    ONE_PROCESSOR,
    Bandwidths,
    HostRead,
    LayerLoad,
    blocks_for_cpu_attention,
    cpu_attention_query_len,
)
from nanovllm.features.planner.step_work import StepWork
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.weights import WeightPlan

COMPUTE = "compute"
DEVICE = "device memory bandwidth"
HOST = "host memory bandwidth"
LINK = "link"
INTERCONNECT = "interconnect"
DISK = "disk"


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations and bytes per second. None: unknown."""

    compute: float | None = None  # operations of matrix products and of attention to many rows
    device_bandwidth: float | None = None  # bytes of weights and KV that the device reads
    host_bandwidth: float | None = None  # bytes of KV on the host that CPU attention reads
    link: float | None = None  # bytes between host and device, each way; both ways at the same time
    interconnect: float | None = None  # bytes that a tensor-parallel rank receives from the others
    all_reduce_seconds: float = 0.0  # of a sum over the ranks, besides its bytes
    disk_bandwidth: float | None = None  # bytes of weights that are read from disk


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of a phase."""

    seconds: float | None = None  # None if a rate is missing
    terms: dict[str, float] = field(default_factory=dict)  # seconds of each resource, overlapped or not
    missing: tuple[str, ...] = ()  # unknown rates, as fields of Rates

    @property
    def limit(self) -> str | None:
        """The resource that is busy longest; None if the time is not known."""
        return max(self.terms, key=lambda name: self.terms[name]) if self.seconds is not None else None


@dataclass(frozen=True)
class StepModel:
    """The time of steps of one sequence that runs alone."""

    network: Network
    rates: Rates
    layout: KVLayout
    ring_slots: int
    weights: WeightPlan
    cpu_attention: bool = False  # the CPU attends to a share of the host blocks
    one_processor: bool = False  # device and host are the same cores and memory

    # ---- the share of CPU attention

    @property
    def no_cpu_attention(self) -> tuple[str, ...]:
        """Missing rates without which the CPU's share is unknown. Predictions are then without CPU attention."""
        if not self.cpu_attention or self.one_processor:
            return ()
        names = ("link", "host_bandwidth", "device_bandwidth")
        return tuple(name for name in names if getattr(self.rates, name) is None)

    def can_share(self, query_len: int) -> bool:
        """Whether the CPU attends to a share of the host blocks in a chunk of `query_len` tokens."""
        most = cpu_attention_query_len(self.network.num_heads, self.layout.num_kv_heads)
        return self.cpu_attention and not self.no_cpu_attention and query_len <= most

    def share_of(self, host_bytes: int, resident_bytes: int, block_bytes: int) -> float:
        """The share of a layer's whole host blocks that the engine leaves to the CPU.

        host_bytes, resident_bytes: of the KV that the layer attends to. block_bytes: one layer of a block.
        """
        num_blocks, rest = divmod(host_bytes, block_bytes)
        if not num_blocks:
            return 0.0
        bandwidths = ONE_PROCESSOR
        if not self.one_processor:
            rates = self.rates
            assert rates.link is not None and rates.host_bandwidth is not None and rates.device_bandwidth is not None
            bandwidths = Bandwidths(rates.link, rates.host_bandwidth, rates.device_bandwidth)
        weights = self.network.layer_weight_bytes(rows=1)
        on_link = rest + self.loaded_weights(1) // self.network.num_layers
        load = LayerLoad([HostRead(block_bytes)] * num_blocks, on_link, resident_bytes + rest, weights)
        return blocks_for_cpu_attention(load, bandwidths) / num_blocks

    # ---- phases

    def _chosen_seconds(self, rows: int) -> float:
        """For which a pass of so many rows waits for experts."""
        chosen = 0 if self.weights.multiplies(rows) else self.weights.chosen_bytes(rows, self.network.experts)
        read = self.weights.chosen_read_bytes(rows, self.network.experts)
        on_link = chosen / self.rates.link if chosen and self.rates.link is not None else 0.0
        return on_link + (read / self.rates.disk_bandwidth if read and self.rates.disk_bandwidth is not None else 0.0)

    def loaded_weights(self, rows: int) -> int:
        """Bytes of weights that a pass of so many rows copies to the device."""
        loaded = self.weights.loaded_bytes(rows, self.network.experts)
        return loaded - self.multiplied_weights(rows) if self._is_divided(rows) else loaded

    def multiplied_weights(self, rows: int) -> int:
        """Bytes of weights with which a pass of so many rows multiplies on the host.

        Layers without experts are divided between host and link so that both take the same time.
        """
        multiplied = self.weights.multiplied_bytes(rows, self.network.experts)
        link = self.rates.link
        host = self._host_rate
        if not self._is_divided(rows) or link is None or host is None:
            return multiplied
        return round(multiplied * host / (host + link))

    @property
    def _host_rate(self) -> float | None:
        """At which the host multiplies with weights: at least as fast as the link copies them."""
        return self.rates.host_bandwidth or self.rates.link

    def _is_divided(self, rows: int) -> bool:
        return self.weights.multiplies(rows) and not self.weights.in_place and self.network.experts is None

    def read_weights(self, rows: int) -> int:
        """Bytes of weights that a pass of so many rows reads from disk."""
        return self.weights.read_bytes(rows, self.network.experts)

    def prefill(self, step: LayerwisePrefill, samples: bool, moved: TransferCount) -> Prediction:
        """A chunk of the prompt, or several chunks layer by layer. samples: whether the first token follows.

        In layer-by-layer prefill the layer buffer holds a layer's KV, so that the link never waits for a ring slot.
        """
        network = self.network
        work = self._work
        compute = self.rates.compute
        bandwidth = self.rates.device_bandwidth
        query_len = step.end - step.begin
        missing = self._missing(moved, query_len, "compute", "device_bandwidth")
        if compute is None or bandwidth is None or missing:
            return Prediction(missing=missing)
        products = 0.0
        for chunk in range(step.num_chunks):
            tokens = len(step.positions(chunk))
            read = network.num_layers * network.layer_weight_bytes(tokens)  # of experts, the chosen ones
            products += max(work.matrix_operations(tokens) / compute, read / bandwidth)
        operations = work.attention_operations(step.begin, query_len)
        layout = self.layout.of_groups[0]  # as if all layers were like the first ones, which stream the most
        cpu_keys = moved.cpu_attention_bytes // layout.token_layer_bytes
        operations = max(0, operations - 4 * network.num_heads * layout.head_dim * query_len * cpu_keys)
        return self._step(
            COMPUTE,
            products,
            operations / compute,
            products if step.num_chunks == 1 else 0.0,
            network.head_bytes / bandwidth if samples else 0.0,
            query_len,
            moved,
        )

    def decode(self, context_len: int, moved: TransferCount) -> Prediction:
        """One token after `context_len` stored ones. Recurrent states are read and written."""
        network = self.network
        bandwidth = self.rates.device_bandwidth
        missing = self._missing(moved, 1, "device_bandwidth")
        if bandwidth is None or missing:
            return Prediction(missing=missing)
        weights = network.num_layers * network.layer_weight_bytes(1) / bandwidth
        attended = self._work.attended_bytes(context_len, 1)
        resident = max(0, attended - moved.without_cpu_attention.h2d_bytes)
        on_device = max(0, attended - moved.cpu_attention_bytes)
        return self._step(
            DEVICE,
            weights,
            (on_device + 2 * network.state_bytes) / bandwidth,
            weights + resident / bandwidth,
            network.head_bytes / bandwidth,
            1,
            moved,
        )

    # ---- helpers

    @property
    def _work(self) -> StepWork:
        return StepWork(self.network, self.layout)

    def _step(
        self,
        resource: str,
        products: float,
        attention: float,
        slot_free: float,
        head: float,
        query_len: int,
        moved: TransferCount,
    ) -> Prediction:
        """The formula of the module's docstring. All times in seconds; resource: what limits the device."""
        loaded = self.loaded_weights(query_len)
        read = self.read_weights(query_len)
        num_layers = self.network.num_layers
        terms = {resource: products + attention + head}
        if moved.cpu_attention_bytes:
            # One processor reads all memory at one rate, so either rate serves.
            rate = self.rates.host_bandwidth or self.rates.device_bandwidth
            assert rate is not None, "CPU attention is only predicted with known rates"
            cpu = terms[HOST] = moved.cpu_attention_bytes / rate
            attention = attention + cpu if self.one_processor else max(attention, cpu)
        sums = self._all_reduce_seconds(query_len)
        if sums:
            terms[INTERCONNECT] = sums
        layers = products + attention + sums + self._chosen_seconds(query_len)
        multiplied = self.multiplied_weights(query_len)
        if multiplied and not self.one_processor:
            host, device = self._host_rate, self.rates.device_bandwidth
            assert host is not None and device is not None, "they are among the missing rates"
            terms[HOST] = terms.get(HOST, 0.0) + multiplied / host
            terms[resource] -= multiplied / device
            layers += multiplied / host - multiplied / device
        if read and self.rates.disk_bandwidth is not None:
            terms[DISK] = read / self.rates.disk_bandwidth
        link = self.rates.link
        if link is None or not (moved or loaded):
            return Prediction(layers + head, terms)
        terms[LINK] = max(moved.h2d_bytes + loaded, moved.d2h_bytes) / link
        if moved:
            ahead = self.ring_slots * self.layout.block_layer_bytes / link
            stall = num_layers * max(0.0, (slot_free + sums) / num_layers - ahead)
            layers = max(layers, max(moved.h2d_bytes, moved.d2h_bytes) / link + stall)
        return Prediction(max(layers + head, terms[LINK], terms.get(DISK, 0.0)), terms)

    def _all_reduce_seconds(self, tokens: int) -> float:
        rates = self.rates
        if rates.interconnect is None:
            return 0.0
        received = self._work.all_reduce_bytes(tokens)
        return self._work.num_all_reduces * rates.all_reduce_seconds + received / rates.interconnect

    def _missing(self, moved: TransferCount, rows: int, *needed: str) -> tuple[str, ...]:
        """Unknown rates that the time of a step of so many rows needs."""
        on_link = ["link"] if moved or self.loaded_weights(rows) else []
        from_disk = ["disk_bandwidth"] if self.read_weights(rows) else []
        multiplies = self.multiplied_weights(rows) and not self.one_processor
        on_host = ["host_bandwidth"] if multiplies and self._host_rate is None else []
        names = [*needed, *on_link, *on_host, *from_disk, *(["interconnect"] if self.network.num_ranks > 1 else [])]
        return tuple(name for name in names if getattr(self.rates, name) is None)


def total(parts: Sequence[Prediction]) -> Prediction:
    """The sum of consecutive steps."""
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    if missing:
        return Prediction(missing=missing)
    names = dict.fromkeys(name for part in parts for name in part.terms)
    terms = {name: sum(part.terms.get(name, 0.0) for part in parts) for name in names}
    return Prediction(sum(part.seconds or 0.0 for part in parts), terms)
