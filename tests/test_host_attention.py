"""CPU attention as tasks of C++: the bits of the backend, and never a wait for the GIL."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref

import pytest
import torch
from host_tasks import run
from torch import Tensor

from nanovllm.errors import EngineError
from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_attention import HostAttention, Meter, NativeAttention, empty_task

LAYERS, BLOCKS, HEADS, KV_HEADS, BLOCK, HEAD_DIM = 3, 6, 4, 2, 16, 32
SCALE = HEAD_DIM**-0.5
PATIENCE = 60  # seconds after which a task is taken to wait for ever

# Two calls: the second goes on with the first's last row. Row 2 belongs to no sequence.
TABLES = [
    AttentionMetadata(
        [SequenceMetadata(0, 1, 35, 0, 2 * BLOCK, (4, 1)), SequenceMetadata(1, 1, 33, BLOCK, 2 * BLOCK, (3,))]
    ),
    AttentionMetadata([SequenceMetadata(1, 1, 33, 2 * BLOCK, 34, (0,))]),
]


def host_pool(dtype: torch.dtype) -> Tensor:
    """[blocks, layers, 2, kv_heads, block_size, head_dim], as the engine's."""
    return torch.randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM).to(dtype)


def some_state(rows: int) -> AttentionState:
    """Not empty: a task must begin with an empty one by itself."""
    return AttentionState(torch.randn(rows, HEADS, HEAD_DIM), torch.randn(HEADS, rows))


def prepare(pool: Tensor, q: Tensor, state: AttentionState, meter: Meter, window: int | None = None) -> HostAttention:
    of_layer = pool[:, 0]
    return HostAttention(q, of_layer, TABLES, state, SCALE, window, num_threads=2, read_bytes=1000, meter=meter)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_layer_gives_the_bits_of_the_backend(dtype: torch.dtype, window: int | None) -> None:
    pool, q, state, meter = host_pool(dtype), torch.randn(3, HEADS, HEAD_DIM).to(dtype), some_state(3), Meter()
    attention = prepare(pool, q, state, meter, window)
    layer_bytes = pool[0, 0].nbytes
    for layer in range(LAYERS):
        run(attention.task(layer * layer_bytes))
        expected = AttentionState.empty(q)
        for table in TABLES:
            NativeAttention(1).attend(q, pool[:, layer], table, expected, SCALE, window)
        assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)
        assert torch.isneginf(state.lse[:, 2]).all() and not state.out[2].any(), (
            "a row without a sequence has seen no key"
        )
        assert torch.isfinite(state.lse[:, :2]).all()
    num_bytes, seconds = meter.read()
    assert num_bytes == LAYERS * 1000 and seconds > 0


def test_a_task_ends_while_this_thread_has_the_gil() -> None:
    """As on a GPU a thread of CUDA's runs it, while this one is in a call of the driver and keeps the GIL.

    PyDLL keeps the GIL in its calls, so that nothing of Python can run between the start of the thread and its end.
    """
    pool, q, state, meter = host_pool(torch.float32), torch.randn(3, HEADS, HEAD_DIM), some_state(3), Meter()
    task = prepare(pool, q, state, meter).task(pool[0, 0].nbytes)
    assert end_with_gil_held(*task.take()) == 0, "it waits for the GIL"
    assert task.failure() is None and meter.read()[0] == 1000
    expected = AttentionState.empty(q)
    for table in TABLES:
        NativeAttention(1).attend(q, pool[:, 1], table, expected, SCALE, None)
    assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


def end_with_gil_held(function: int, data: int, patience: float = PATIENCE) -> int:
    """Run function(data) on another thread and wait for its end without letting go of the GIL. 0, or an errno."""

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    libc, thread = ctypes.PyDLL(None), ctypes.c_ulong()
    end = time.time() + patience
    until = Timespec(int(end), int(end % 1 * 1e9))
    nothing, interval = ctypes.c_void_p(), sys.getswitchinterval()
    sys.setswitchinterval(1000)  # or another thread could ask for the GIL between the calls
    try:
        libc.pthread_create(ctypes.byref(thread), nothing, ctypes.c_void_p(function), ctypes.c_void_p(data))
        return int(libc.pthread_timedjoin_np(thread, nothing, ctypes.byref(until)))
    finally:
        sys.setswitchinterval(interval)


def test_arguments_live_as_long_as_a_task_may_run() -> None:
    """Python may let go of everything but the memory that is attended."""
    pool, q, state = host_pool(torch.float32), torch.randn(3, HEADS, HEAD_DIM), some_state(3)
    attention = prepare(pool, q, state, Meter())
    taken = attention.task(0).take()
    gone = weakref.ref(attention)
    del attention
    gc.collect()
    assert gone() is None
    state.out.fill_(7.0)
    assert end_with_gil_held(*taken) == 0
    assert not (state.out == 7.0).any()


def test_tables_that_do_not_fit_are_refused_before_anything_runs() -> None:
    pool, q = host_pool(torch.float32), torch.randn(1, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="must lie within the 1 rows of q"):
        prepare(pool, q, some_state(1), Meter())
    with pytest.raises(ValueError, match="head_dim a multiple of 16"):
        prepare(pool[..., :24], torch.randn(3, HEADS, 24), some_state(3), Meter())


# ---- on a GPU


@pytest.mark.cuda
def test_a_thread_of_cuda_runs_tasks_while_this_one_calls_the_driver() -> None:
    from nanovllm.device import PitchedCopy
    from nanovllm.device.cuda import CudaDevice

    device, size = CudaDevice(), 1 << 20
    pool, q, state, meter = host_pool(torch.float32), torch.randn(3, HEADS, HEAD_DIM), some_state(3), Meter()
    attention, stream, copies = prepare(pool, q, state, meter), device.new_call_stream("calls"), device.new_stream("c")
    host, on_device = device.empty_host("host", (size,), torch.uint8), device.empty("device", (size,), torch.uint8)
    for _ in range(200):
        stream.launch(attention.task(0))
        device.copy_2d(PitchedCopy(on_device, host, size, size, size, 1, "h2d"), copies)
        torch.ones(1000).pin_memory()  # freed at once, by a call of the driver with the GIL held
    stream.synchronize()
    device.close()
    assert meter.read()[0] == 200 * 1000


@pytest.mark.cuda
def test_a_failure_is_raised_once_when_the_stream_is_synchronized() -> None:
    from nanovllm.device.cuda import CudaDevice

    class Failing:
        def __init__(self) -> None:
            self._inner = empty_task()

        def take(self) -> tuple[int, int]:
            return self._inner.take()

        def drop(self, data: int) -> None:
            self._inner.drop(data)

        def failure(self) -> str | None:
            return "no memory"

    device = CudaDevice()
    stream = device.new_call_stream("calls")
    stream.launch(Failing())
    with pytest.raises(EngineError, match="work on stream calls failed: no memory"):
        stream.synchronize()
    stream.synchronize()
    device.close()
