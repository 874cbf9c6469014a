"""Attention over an offloaded context by itself: how often it copies, attends and merges, and where the time goes.

Eight layers take a prompt in 16 chunks of one block each, on the CPU device. As a benchmark, with 16,384 tokens:

    python tests/test_attention_offload.py
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ordering_check import OrderingCheck
from torch import Tensor

from nanovllm.device import cpu
from nanovllm.device.cpu import CpuDevice
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.memory.budget import split_device
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import torch_attention
from nanovllm.ops.attention import AttentionBackend, SequenceMetadata
from nanovllm.ops.cpu_attention import NativeAttention
from nanovllm.ops.reference_attention import reference_attention
from nanovllm.ops.torch_attention import TorchAttention

LAYERS = 8
CHUNKS = 16
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
FULL_CHUNK = 1024
DEVICE_BLOCKS = 3  # one of them is the ring
SCALE = HEAD_DIM**-0.5


class Watch:
    """Counts the calls and seconds of the functions that it wraps. Copies run concurrently, on other threads."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            with self._lock:
                self.calls[name] += 1
                self.seconds[name] += time.perf_counter() - start
            return result

        return timed


@contextmanager
def offloaded_cache(backend: AttentionBackend, block_size: int) -> Iterator[OffloadedKVCache]:
    layout = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, block_size, torch.float32.itemsize)
    device = OrderingCheck(CpuDevice()) if block_size < FULL_CHUNK else CpuDevice()  # the check would weigh on times
    split = split_device(DEVICE_BLOCKS, LAYERS)
    engine = OffloadEngine(device, layout, torch.float32, split, CHUNKS - split.resident_blocks)
    geometry = AttentionGeometry(SCALE, HEADS, torch.float32)
    try:
        yield OffloadedKVCache(engine, geometry, backend, DEVICE_BLOCKS)
    finally:
        device.close()


def prefill(kv_cache: OffloadedKVCache, watch: Watch, chunk: int) -> tuple[Tensor, Tensor]:
    """Every layer attends to each chunk in turn. Returns layer 0's output for the last chunk and fp64's."""
    generator = torch.Generator().manual_seed(0)
    tokens = CHUNKS * chunk
    q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator)
    attend = watch.around("layer", kv_cache.attend)
    for start in range(0, tokens, chunk):
        rows = slice(start, start + chunk)
        sequence = SequenceMetadata.full(0, chunk, start, tuple(range(start // chunk + 1)))
        positions = torch.arange(start, start + chunk)
        ctx = ForwardContext(positions, (sequence,), kv_cache)
        kv_cache.begin_step(ctx.sequences, [])
        outputs = [attend(layer, q[rows], k[rows], v[rows], ctx) for layer in range(LAYERS)]
    return outputs[0], reference_attention(q[rows], k, v, SCALE, start)[0]


@pytest.mark.parametrize("backend", [NativeAttention(), TorchAttention()], ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("chunk", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_copies_calls_and_merges_follow_the_formula(
    backend: AttentionBackend, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.transfers import predict_request  # not found where this file runs by hand

    watch = Watch()
    monkeypatch.setattr(cpu, "copy_pitched", watch.around("copy", cpu.copy_pitched))
    monkeypatch.setattr(
        torch_attention, "merge_attention_outputs", watch.around("merge", torch_attention.merge_attention_outputs)
    )
    monkeypatch.setattr(backend, "attend", watch.around("attend", backend.attend))
    with offloaded_cache(backend, chunk) as kv_cache:
        out, expected = prefill(kv_cache, watch, chunk)
        kv_cache.engine.synchronize()
        stats = kv_cache.stats()
        layout = kv_cache.layout
        group_slots = kv_cache.engine.group_slots
    assert (out - expected).abs().max() < 1e-5

    resident = stats.resident_blocks
    predicted = predict_request(layout, resident, CHUNKS * chunk, 1, chunk)
    assert stats.transfers == predicted
    # One attention call for the resident blocks, and one for each group of host blocks. Blocks of a group are adjacent
    # on the host, so each group with stored tokens is loaded in one copy; each chunk's block is stored in another.
    groups = [-(-max(0, index + 1 - resident) // group_slots) for index in range(CHUNKS)]
    loads = [-(-max(0, index - resident) // group_slots) for index in range(CHUNKS)]
    assert sum(loads) < predicted.h2d_copies // LAYERS
    assert watch.calls["copy"] == LAYERS * sum(loads) + predicted.d2h_copies
    assert watch.calls["attend"] == LAYERS * sum(1 + count for count in groups)
    # The native kernel carries its state on. torch's operator leaves a result to be merged for each block.
    merges = LAYERS * (CHUNKS * (CHUNKS + 1) // 2)
    assert watch.calls["merge"] == (0 if isinstance(backend, NativeAttention) else merges)

    print(
        f"\n{backend.name}: {CHUNKS * chunk} tokens, {LAYERS} layers, {CHUNKS} chunks, {watch.seconds['layer']:.3f} s"
    )
    moved = (predicted.h2d_bytes + predicted.d2h_bytes) / 1e9
    print(f"  attention {watch.seconds['attend']:.3f} s, of which merges {watch.seconds['merge']:.3f} s")
    print(f"  writes and waits {watch.seconds['layer'] - watch.seconds['attend']:.3f} s")
    print(f"  copies, alongside, {watch.seconds['copy']:.3f} s for {moved:.3f} GB in {watch.calls['copy']}")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-s", *(sys.argv[1:] or ["-m", "slow"])]))
