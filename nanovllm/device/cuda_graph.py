"""Recording CUDA graphs through torch, one after the other, in one private memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nanovllm.device.base import Graph


def record_graphs(works: Sequence[Callable[[], object]], device_index: int) -> list[Graph]:
    """Record each work on the current stream, after running it there; see `Device.capture`.

    The first run creates what a recording must not create: compiled kernels and workspaces of libraries. The graphs
    share one pool, because no work leaves results in it and the graphs run one at a time.
    """
    for work in works:
        work()
    torch.cuda.current_stream().synchronize()
    pool = torch.cuda.graph_pool_handle()
    with _without_collections():
        return [_record(work, pool, device_index) for work in works]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now and not within the context: CUDA forbids a recording to free or unlock memory."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _record(work: Callable[[], object], pool: Any, device_index: int) -> Graph:
    graph = torch.cuda.CUDAGraph()
    # Record the work of this thread only: other threads may continue to copy.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        with suppress(RuntimeError):
            _end(graph, pool, device_index)
        raise
    _end(graph, pool, device_index)
    return graph


def _end(graph: torch.cuda.CUDAGraph, pool: Any, device_index: int) -> None:
    """End a recording. Raises if it contained forbidden work, after telling torch's allocator that the recording is
    over; otherwise the allocator would never free memory again."""
    try:
        graph.capture_end()
    except BaseException:
        with suppress(Exception):  # fails if torch has already done so
            torch._C._cuda_endAllocateToPool(device_index, pool)
            torch._C._cuda_releasePool(device_index, pool)
        raise
