"""The rates that decode shares begin with, measured when the engine starts: some ten milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.device import Device, PitchedCopy
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.decode_shares import Bandwidths
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.host_attention import empty_task

_PROBE_BYTES = 32 << 20  # of KV: more than most caches hold, less than anyone waits for
_ROUNDS = 3


def measure_bandwidths(
    engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, host_backend: AttentionBackend
) -> Bandwidths:
    """Copies and attends to as much KV as the host pool holds, at most 32 MiB or two blocks of one layer.

    Of a device that is a processor of its own; where it is not, there is nothing to choose by (`ONE_PROCESSOR`).
    """
    device, layout, dtype = engine.device, engine.layout, engine.host.dtype
    most = max(2, _PROBE_BYTES // layout.block_layer_bytes)
    shape = (min(most, layout.num_layers * engine.num_host_blocks), *layout.block_shape)
    host, on_device = device.empty_host("probe", shape, dtype), device.empty("probe", shape, dtype)
    host.zero_()
    link = host.nbytes / _seconds_of_copies(device, on_device, host, layout.block_layer_bytes)
    host_rate = host.nbytes / _seconds_of_attention(host, geometry, host_backend)
    finish = device.compute_stream.synchronize
    device_rate = host.nbytes / _seconds_of_attention(on_device, geometry, backend, finish)
    return Bandwidths(link, host_rate, device_rate, round_trip=_seconds_of_round_trip(device, on_device, host))


def _seconds_of_copies(device: Device, dst: Tensor, src: Tensor, width: int) -> float:
    """Block by block, as the ring loads them."""
    stream = device.new_stream("kv-probe")

    def copy() -> None:
        for to, block in zip(dst, src, strict=True):
            device.copy_2d(PitchedCopy(to, block, width, width, width, 1, "h2d"), stream)
        stream.synchronize()

    return _least_seconds(copy)


def _seconds_of_attention(
    pool: Tensor, geometry: AttentionGeometry, backend: AttentionBackend, finish: Callable[[], None] = lambda: None
) -> float:
    """One query token over the whole pool `[blocks, 2, kv_heads, block_size, head_dim]`."""
    blocks, _, _, block_size, head_dim = pool.shape
    q = torch.zeros(1, geometry.num_heads, head_dim, dtype=pool.dtype, device=pool.device)
    end = blocks * block_size
    table = AttentionMetadata([KVMetadata(0, 1, end - 1, 0, end, range(blocks))])

    def attend() -> None:
        backend.attend(q, pool, table, AttentionState.empty(q), geometry.scale, None)
        finish()

    return _least_seconds(attend)


def _seconds_of_round_trip(device: Device, on_device: Tensor, host: Tensor) -> float:
    """A small copy down, a task that does nothing, a small copy up, each waiting for the one before."""
    copies, calls = device.new_stream("kv-probe-arm"), device.new_call_stream("kv-probe-calls")
    there, back = device.new_event(), device.new_event()
    width = min(4096, host[0].nbytes)

    def round_trip() -> None:
        device.copy_2d(PitchedCopy(host, on_device, width, width, width, 1, "d2h"), copies)
        copies.record(there)
        calls.wait(there)
        calls.launch(empty_task())
        calls.record(back)
        copies.wait(back)
        device.copy_2d(PitchedCopy(on_device, host, width, width, width, 1, "h2d"), copies)
        copies.synchronize()

    return _least_seconds(round_trip)


def _least_seconds(work: Callable[[], None]) -> float:
    """Of the fastest call after a first one."""
    work()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
