"""Recording CUDA graphs through torch, one after the other, in one memory pool of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from nanovllm.device.base import Graph


class CudaGraph(Graph):
    def __init__(self, inner: torch.cuda.CUDAGraph) -> None:
        self._inner = inner

    def replay(self) -> None:
        self._inner.replay()


def record_graphs(works: Sequence[Callable[[], object]], device_index: int) -> list[Graph]:
    """Record each work on the current stream, after running it there; see `Device.capture`.

    The run before makes what must not be made while recording: compiled kernels, the workspaces of libraries. The
    graphs may share one pool, since no work leaves anything in it, and they run one at a time.
    """
    for work in works:
        work()
    torch.cuda.current_stream().synchronize()
    gc.collect()  # what is let go of while recording would be freed then, which CUDA does not allow
    pool = torch.cuda.graph_pool_handle()
    return [_record(work, pool, device_index) for work in works]


def _record(work: Callable[[], object], pool: Any, device_index: int) -> Graph:
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on with copies: only what this one does belongs to the recording.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        with suppress(RuntimeError):
            _end(graph, pool, device_index)
        raise
    _end(graph, pool, device_index)
    return CudaGraph(graph)


def _end(graph: torch.cuda.CUDAGraph, pool: Any, device_index: int) -> None:
    """End a recording. Raises if something in it was not allowed. torch's allocator, which would take it for under way
    for ever and refuse to give memory back, is then told that it is over."""
    try:
        graph.capture_end()
    except BaseException:
        with suppress(Exception):  # the first fails where torch has done so by itself
            torch._C._cuda_endAllocateToPool(device_index, pool)
            torch._C._cuda_releasePool(device_index, pool)
        raise
