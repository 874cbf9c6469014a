"""Helpers for tests of CPU attention: a device that is not the host, and forced shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from host_tasks import PythonTask, run
from ordering_check import OrderingCheck

from benchmarks.decode_by_share import ForcedShare
from nanovllm import LLM, build
from nanovllm.device import CallStream, HostTask
from nanovllm.device.cpu import CpuDevice, WorkerStream
from nanovllm.errors import EngineError
from nanovllm.features.cpu_attention.host_blocks import HostBlockAttention
from nanovllm.features.cpu_attention.shares import cpu_attention_query_len
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.ops.cpu_attention import HostAttention

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class DeviceOfItsOwn(CpuDevice):
    """Emulates a device of its own: CPU attention has a thread, buffers and copies, as on a GPU's host."""

    shares_host = False


class SilentStream(WorkerStream):
    """Like a CUDA stream's, its calls fail without a word to those who wait for them; `synchronize` tells."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._silent: EngineError | None = None

    def launch(self, task: HostTask) -> None:
        def carry_out() -> None:
            try:
                run(task)
            except OSError as error:
                self._silent = EngineError(f"work on stream failed: {error}")

        super().launch(PythonTask(carry_out))

    def synchronize(self) -> None:
        super().synchronize()
        silent = self._silent
        self._silent = None
        if silent is not None:
            raise silent


class SilentDevice(DeviceOfItsOwn):
    """A device whose streams do not pass failures of calls on."""

    def new_call_stream(self, name: str) -> CallStream:
        stream = SilentStream(name)
        self._streams.append(stream)
        return stream


def add_cpu_attention_streams(monkeypatch: pytest.MonkeyPatch, device: type[DeviceOfItsOwn] = DeviceOfItsOwn) -> None:
    """Engines created from now on have concurrent CPU attention."""
    monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(device()))


def kv_cache(llm: LLM) -> OffloadedKVCache:
    kv_cache = llm._runner.kv_cache
    assert isinstance(kv_cache, OffloadedKVCache)
    return kv_cache


def cpu_attention(llm: LLM) -> HostBlockAttention:
    attention = kv_cache(llm).cpu_attention
    assert isinstance(attention, HostBlockAttention)
    return attention


def force_share(llm: LLM, share: float) -> None:
    cpu_attention(llm).policy = ForcedShare(share)


def around_tasks(patch: pytest.MonkeyPatch, around: Callable[[Callable[[], None]], None]) -> None:
    """From now on every task of concurrent CPU attention is `around(run)`, on the thread that runs it."""
    task = HostAttention.task

    def wrapped(attention: HostAttention, layer_offset: int) -> PythonTask:
        inner = task(attention, layer_offset)
        return PythonTask(lambda: around(lambda: run(inner)))

    patch.setattr(HostAttention, "task", wrapped)


def most_cpu_attention_tokens(llm: LLM) -> int:
    network = llm._runner.network
    return cpu_attention_query_len(network.num_heads, network.own_kv_heads[0][0])
