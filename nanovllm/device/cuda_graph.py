"""Recording CUDA graphs through torch, one after the other, in one private memory pool."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nanovllm.device.base import Graph, RecordedWork


def record_graphs(works: Sequence[RecordedWork], device_index: int) -> list[list[Graph]]:
    """Record each work on the current stream, after running it there; see `Device.capture`.

    The first run creates what a recording must not create: compiled kernels and workspaces of libraries. The graphs
    share one pool: what a work still refers to is not given to others, and all else it may have left is overwritten.
    """
    for work in works:
        work(lambda: None)
    torch.cuda.current_stream().synchronize()
    pool = torch.cuda.graph_pool_handle()
    with _without_collections():
        return [_Recording(pool, device_index).graphs_of(work) for work in works]


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


class _Recording:
    """The graphs of one work, of which the last is being recorded."""

    def __init__(self, pool: Any, device_index: int) -> None:
        self._pool = pool
        self._device_index = device_index
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def graphs_of(self, work: RecordedWork) -> list[Graph]:
        self._begin()
        try:
            work(self._cut)
        except BaseException:
            with suppress(RuntimeError):
                self._end()
            raise
        self._end()
        return list(self._graphs)

    def _cut(self) -> None:
        self._end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Record the work of this thread only: other threads may continue to copy.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def _end(self) -> None:
        """End a recording. Raises if it contained forbidden work, after telling torch's allocator that the recording is
        over; otherwise the allocator would never free memory again."""
        try:
            self._graphs[-1].capture_end()
        except BaseException:
            with suppress(Exception):  # fails if torch has already done so
                torch._C._cuda_endAllocateToPool(self._device_index, self._pool)
                torch._C._cuda_releasePool(self._device_index, self._pool)
            raise
