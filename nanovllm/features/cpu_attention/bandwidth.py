"""Measures the initial bandwidths for CPU attention when the engine starts, in some ten milliseconds.

On the engine's own memory and streams: up to 256 MiB of the host pool, which no processor's cache holds, and the ring.
Link and CPU attention are measured at the same time, as they work in a step, since both read host memory; the link is
measured alone too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanovllm.device import PitchedCopy
from nanovllm.features.cpu_attention.shares import Bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import empty_task
from nanovllm.ops.kv_quantization import head_dim_of
from nanovllm.ops.timing import attend_once, call_seconds

_PROBE_BYTES = 256 << 20  # of KV
_ROUNDS = 3
_PASSES = 17  # of the device over its KV: one takes a GPU less time than its launch takes the host
_BESIDE = 3  # times that CPU attention takes alone, for which the link is kept busy beside it
_MOST_LOADS = 32  # of all of the probe


def measure_bandwidths(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, host_backend: AttentionBackend
) -> Bandwidths:
    """Copy and attend to as much KV as the host pool holds, at most 256 MiB or two blocks of one layer.

    For a device with its own processor, whose engine has the stream of CPU attention. A device that shares the host's
    processor needs no measurement: use `ONE_PROCESSOR`.
    """
    probe = Probe(engine, geometry, backend, host_backend)
    loading = _least_seconds(probe.load)
    attending = _least_seconds(probe.attend_on_host)
    loads = min(math.ceil(_BESIDE * attending / loading), _MOST_LOADS)
    link, host = probe.rates_beside(loads) or (probe.loaded_bytes / loading, probe.attended_bytes / attending)
    return Bandwidths(
        link, host, probe.device_rate(), probe.seconds_of_round_trip(), link_alone=probe.loaded_bytes / loading
    )


class Probe:
    """Loads through the ring, and attention over host blocks and over the ring's slots, without a step."""

    def __init__(
        self,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        host_backend: AttentionBackend,
    ) -> None:
        self._engine = engine
        self._device = engine.device
        self._backend = backend
        self._host_backend = host_backend
        layout = engine.layout
        self._geometry = geometry
        widest = max(range(len(layout.groups)), key=lambda index: layout.of_groups[index].token_layer_bytes)
        block = layout.block_layer_bytes
        most = max(2, _PROBE_BYTES // block)  # layers of blocks
        blocks = min(most, engine.num_host_blocks)
        planes = min(layout.planes, max(1, most // blocks))
        host = engine.host_of[widest]
        slots = layout.views(engine.ring)[widest]
        self._pools: Sequence[Tensor] = [host[:blocks, plane] for plane in range(planes)]
        self.attended_bytes = blocks * planes * slots[0].nbytes
        resident = engine.resident_of[widest][0]
        self._on_device = resident if len(resident) > len(slots) else slots
        group = engine.group_slots
        self._copies = [
            (index, plane, min(group, planes - plane)) for index in range(blocks) for plane in range(0, planes, group)
        ]
        self.loaded_bytes = blocks * planes * block
        self._stream = engine.order.before_fill(0)

    # ---- the link

    def load(self) -> None:
        self._begin_loads()
        self._stream.synchronize()

    def _begin_loads(self) -> None:
        """All blocks, in groups of planes, which are neighbours; one group of the ring after the other."""
        engine = self._engine
        block = self._engine.layout.block_layer_bytes
        group = self._engine.group_slots
        for number, (index, plane, count) in enumerate(self._copies):
            to = engine.ring[number % max(1, engine.split.ring_slots // group) * group :]
            self._device.copy_2d(
                PitchedCopy(to, engine.host[index, plane], block, block, block, count, "h2d"), self._stream
            )

    # ---- CPU attention

    def attend_on_host(self) -> None:
        for pool in self._pools:
            self._attend(self._host_backend, pool)

    def rates_beside(self, loads: int) -> tuple[float, float] | None:
        """Bytes per second of the link and of CPU attention at the same time; None if they did not meet."""
        begin = self._stream.mark()
        for _ in range(loads):
            self._begin_loads()
        end = self._stream.mark()
        attended = 0
        start = time.perf_counter()
        now = 0.0
        while end.seconds() is None:
            self.attend_on_host()
            attended = attended + self.attended_bytes
            now = time.perf_counter()
        self._stream.synchronize()
        times = begin.seconds(), end.seconds()
        if not attended or times[0] is None or times[1] is None or times[1] <= times[0]:
            return None
        return loads * self.loaded_bytes / (times[1] - times[0]), attended / (now - start)

    # ---- the device

    def device_rate(self) -> float:
        finish = self._device.compute_stream.synchronize
        pool = self._on_device
        once, often = (
            _least_seconds(lambda passes=passes: self._attend(self._backend, pool, passes), finish)  # type: ignore[misc]
            for passes in (1, _PASSES)
        )
        return (_PASSES - 1) * pool.nbytes / max(often - once, 1e-9)

    def seconds_of_round_trip(self) -> float:
        """From queries on the device to a partial state that was read there, without attention, while the link loads.

        Submitted while the device is busy, as in a step, and timed by the device.
        """
        device = self._device
        order = self._engine.order
        on_device = device.empty("probe", (4096,), torch.uint8)
        host = device.empty_host("probe", (4096,), torch.uint8)
        mapped = device.mapped(host)
        assert mapped is not None, "without it there is no CPU attention"

        def round_trip() -> float:
            self._begin_loads()
            self._attend(self._backend, self._on_device, _PASSES)
            begin = device.compute_stream.mark()
            torch.mul(on_device, 1, out=mapped)
            order.before_cpu_attention_call().launch(empty_task())
            order.after_cpu_attention_call()
            order.before_merge()
            torch.mul(mapped, 1, out=on_device)
            end = device.compute_stream.mark()
            device.compute_stream.synchronize()
            self._stream.synchronize()
            times = begin.seconds(), end.seconds()
            return 0.0 if times[0] is None or times[1] is None else times[1] - times[0]

        seconds = statistics.median([round_trip() for _ in range(1 + _ROUNDS)][1:])
        order.finish_cpu_attention()
        return seconds

    def _attend(self, backend: AttentionBackend, pool: Tensor, passes: int = 1) -> None:
        """One query token over all of the pool `[blocks, 2, kv_heads, block_size, head_dim]`, so often."""
        blocks, _, _, block_size, _ = pool.shape
        q = torch.zeros(1, self._geometry.num_heads, head_dim_of(pool), dtype=self._geometry.dtype, device=pool.device)
        end = passes * blocks * block_size
        table = AttentionMetadata([SequenceMetadata(0, 1, end - 1, 0, end, [*range(blocks)] * passes)])
        attend_once(backend, q, pool, [table])


def _least_seconds(work: Callable[[], None], finish: Callable[[], None] = lambda: None) -> float:
    """Seconds of the fastest call, after one call to warm up."""
    return max(min(call_seconds(work, _ROUNDS, finish)), 1e-9)
