"""Measures where the share of CPU attention begins, when the engine starts, in some ten milliseconds.

On the engine's own memory and streams: up to 256 MiB of the host pool, which no processor's cache holds, and the ring.
Each rate is measured alone. That both read the same memory in a step, and what a task costs besides, is left to the
closed loop (`balance.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nanovllm.device import PitchedCopy
from nanovllm.features.cpu_attention.shares import Bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.kv_quantization import head_dim_of
from nanovllm.ops.timing import call_seconds

_PROBE_BYTES = 256 << 20  # of KV
_ROUNDS = 3
_PASSES = 17  # of the device over its KV: one takes a GPU less time than its launch takes the host


def measure_bandwidths(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, host_backend: AttentionBackend
) -> Bandwidths:
    """Copy and attend to as much KV as the host pool holds, at most 256 MiB or two blocks of one layer.

    For a device with its own processor. One that shares the host's processor needs no measurement: use `ONE_PROCESSOR`.
    """
    probe = Probe(engine, geometry)
    return Bandwidths(probe.link_rate(), probe.host_rate(host_backend), probe.device_rate(backend))


class Probe:
    """Loads through the ring, and attention over host blocks and over the ring's slots, without a step."""

    def __init__(self, engine: OffloadEngine, geometry: AttentionGeometry) -> None:
        self._engine = engine
        self._geometry = geometry
        layout = engine.layout
        most = max(2, _PROBE_BYTES // layout.block_layer_bytes)  # layers of blocks
        self._blocks = min(most, engine.num_host_blocks)
        self._planes = min(layout.planes, max(1, most // self._blocks))
        self._widest = max(range(len(layout.groups)), key=lambda index: layout.of_groups[index].token_layer_bytes)

    def link_rate(self) -> float:
        """Bytes per second of loads, of neighbouring planes together, through all groups of the ring in turn."""
        engine = self._engine
        block = engine.layout.block_layer_bytes
        group = engine.group_slots
        groups_of_ring = max(1, engine.split.ring_slots // group)
        stream = engine.order.before_fill(0)
        parts = [(index, plane) for index in range(self._blocks) for plane in range(0, self._planes, group)]

        def load() -> None:
            for number, (index, plane) in enumerate(parts):
                slots = engine.ring[number % groups_of_ring * group :]
                count = min(group, self._planes - plane)
                copy = PitchedCopy(slots, engine.host[index, plane], block, block, block, count, "h2d")
                engine.device.copy_2d(copy, stream)
            stream.synchronize()

        return self._blocks * self._planes * block / _least_seconds(load)

    def host_rate(self, backend: AttentionBackend) -> float:
        """Bytes per second of CPU attention."""
        host = self._engine.host_of[self._widest]
        pools: Sequence[Tensor] = [host[: self._blocks, plane] for plane in range(self._planes)]

        def attend() -> None:
            for pool in pools:
                self._attend(backend, pool)

        return sum(pool.nbytes for pool in pools) / _least_seconds(attend)

    def device_rate(self, backend: AttentionBackend) -> float:
        """Bytes per second of attention on the device, without the launch of a call."""
        engine = self._engine
        slots = engine.layout.views(engine.ring)[self._widest]
        resident = engine.resident_of[self._widest][0]
        pool = resident if len(resident) > len(slots) else slots
        finish = engine.device.compute_stream.synchronize
        once = _least_seconds(partial(self._attend, backend, pool, 1), finish)
        often = _least_seconds(partial(self._attend, backend, pool, _PASSES), finish)
        return (_PASSES - 1) * pool.nbytes / max(often - once, 1e-9)

    def _attend(self, backend: AttentionBackend, pool: Tensor, passes: int = 1) -> None:
        """One query token over all of the pool `[blocks, 2, kv_heads, block_size, head_dim]`, so often."""
        blocks, _, _, block_size, _ = pool.shape
        q = torch.zeros(1, self._geometry.num_heads, head_dim_of(pool), dtype=self._geometry.dtype, device=pool.device)
        end = passes * blocks * block_size
        table = AttentionMetadata([SequenceMetadata(0, 1, end - 1, 0, end, [*range(blocks)] * passes)])
        backend.attend(q, pool, table, AttentionState.empty(q), q.shape[-1] ** -0.5, None)


def _least_seconds(work: Callable[[], None], finish: Callable[[], None] = lambda: None) -> float:
    """Seconds of the fastest call, after one call to warm up."""
    return max(min(call_seconds(work, _ROUNDS, finish)), 1e-9)
