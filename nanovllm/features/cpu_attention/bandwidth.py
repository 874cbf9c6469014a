"""Measures the initial bandwidths for CPU attention when the engine starts, in some ten milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.device import Device, PitchedCopy
from nanovllm.features.cpu_attention.shares import Bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.transfer_order import NUM_GROUP_STREAMS
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import empty_task
from nanovllm.ops.kv_quantization import head_dim_of
from nanovllm.ops.timing import attend_once, call_seconds

_PROBE_BYTES = 32 << 20  # of KV: more than most processor caches hold, and quickly read
_ROUNDS = 3
_PASSES = 17  # of the device over its KV: one takes a GPU less time than its launch takes the host


def measure_bandwidths(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, host_backend: AttentionBackend
) -> Bandwidths:
    """Copy and attend to as much KV as the host pool holds, at most 32 MiB or two blocks of one layer.

    For a device with its own processor. A device that shares the host's needs no measurement: use `ONE_PROCESSOR`.
    """
    device, layout, dtype = engine.device, engine.layout.widest, engine.host.dtype
    most = max(2, _PROBE_BYTES // layout.block_layer_bytes)
    shape = (min(most, layout.planes * engine.num_host_blocks), *layout.block_shape)
    host, on_device = device.empty_host("probe", shape, dtype), device.empty("probe", shape, dtype)
    host.zero_()
    link = host.nbytes / _seconds_of_copies(device, on_device, host, layout.block_layer_bytes)
    host_rate = host.nbytes / _seconds_of_attention(host, geometry, host_backend)
    finish = device.compute_stream.synchronize
    once, often = (_seconds_of_attention(on_device, geometry, backend, finish, passes) for passes in (1, _PASSES))
    device_rate = (_PASSES - 1) * on_device.nbytes / max(often - once, 1e-9)
    return Bandwidths(link, host_rate, device_rate, round_trip=_seconds_of_round_trip(engine, host))


def _seconds_of_copies(device: Device, dst: Tensor, src: Tensor, width: int) -> float:
    """Seconds to copy all blocks, one by one as the ring loads them."""
    stream = device.new_stream("kv-probe")

    def copy() -> None:
        for to, block in zip(dst, src, strict=True):
            device.copy_2d(PitchedCopy(to, block, width, width, width, 1, "h2d"), stream)
        stream.synchronize()

    return _least_seconds(copy)


def _seconds_of_attention(
    pool: Tensor,
    geometry: AttentionGeometry,
    backend: AttentionBackend,
    finish: Callable[[], None] = lambda: None,
    passes: int = 1,
) -> float:
    """Seconds of a call for one query token over all of the pool `[blocks, 2, kv_heads, block_size, head_dim]`.

    passes: how often the sequence has these blocks.
    """
    blocks, _, _, block_size, _ = pool.shape
    q = torch.zeros(1, geometry.num_heads, head_dim_of(pool), dtype=geometry.dtype, device=pool.device)
    end = passes * blocks * block_size
    table = AttentionMetadata([SequenceMetadata(0, 1, end - 1, 0, end, [*range(blocks)] * passes)])

    return _least_seconds(lambda: attend_once(backend, q, pool, [table]), finish)


def _seconds_of_round_trip(engine: OffloadEngine, host: Tensor) -> float:
    """Seconds of a small copy to the host, an empty task and a small copy back, each waiting for the one before.

    While the ring is being loaded, as in a step: the copy back may have to wait for loads that the link has begun.
    """
    device, block, group = engine.device, engine.layout.widest.block_layer_bytes, min(engine.group_slots, len(host))
    copies, calls = device.new_stream("kv-probe-copies"), device.new_call_stream("kv-probe-calls")
    slots = range(0, engine.split.ring_slots // group * group, group)[:NUM_GROUP_STREAMS]
    loads = [(device.new_stream(f"kv-probe-load-{first}"), engine.ring[first:]) for first in slots]
    there, back = device.new_event(), device.new_event()
    small, small_on_host = device.empty("probe", (4096,), torch.uint8), device.empty_host("probe", (4096,), torch.uint8)

    def round_trip() -> float:
        for stream, to in loads:
            stream.synchronize()
            device.copy_2d(PitchedCopy(to, host, block, block, block, group, "h2d"), stream)
        start = time.perf_counter()
        device.copy_2d(PitchedCopy(small_on_host, small, 4096, 4096, 4096, 1, "d2h"), copies)
        copies.record(there)
        calls.wait(there)
        calls.launch(empty_task())
        calls.record(back)
        copies.wait(back)
        device.copy_2d(PitchedCopy(small, small_on_host, 4096, 4096, 4096, 1, "h2d"), copies)
        copies.synchronize()
        return time.perf_counter() - start

    seconds = statistics.median([round_trip() for _ in range(1 + _ROUNDS)][1:])
    for stream, _ in loads:
        stream.synchronize()
    return seconds


def _least_seconds(work: Callable[[], None], finish: Callable[[], None] = lambda: None) -> float:
    """Seconds of the fastest call, after one call to warm up."""
    return max(min(call_seconds(work, _ROUNDS, finish)), 1e-9)
