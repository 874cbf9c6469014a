"""CPU attention as tasks of C++: the bits of the backend, and never a wait for the GIL."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from host_tasks import run
from torch import Tensor

from nanovllm.comm import _sgdma
from nanovllm.device import PitchedCopy
from nanovllm.device.cuda import POLLED_CALLS, CudaDevice, CudaStream
from nanovllm.errors import EngineError
from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_attention import HostAttention, NativeAttention, empty_task

LAYERS = 3
BLOCKS = 6
HEADS = 4
KV_HEADS = 2
BLOCK = 16
HEAD_DIM = 32
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


def prepare(pool: Tensor, q: Tensor, state: AttentionState, window: int | None = None) -> HostAttention:
    of_layer = pool[:, 0]
    return HostAttention(q, of_layer, TABLES, state, SCALE, window, num_threads=2)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_layer_gives_the_bits_of_the_backend(dtype: torch.dtype, window: int | None) -> None:
    pool = host_pool(dtype)
    q = torch.randn(3, HEADS, HEAD_DIM).to(dtype)
    state = some_state(3)
    attention = prepare(pool, q, state, window)
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


def test_a_task_ends_while_this_thread_has_the_gil() -> None:
    """As on a GPU a thread of CUDA's runs it, while this one is in a call of the driver and keeps the GIL.

    PyDLL keeps the GIL in its calls, so that nothing of Python can run between the start of the thread and its end.
    """
    pool = host_pool(torch.float32)
    q = torch.randn(3, HEADS, HEAD_DIM)
    state = some_state(3)
    task = prepare(pool, q, state).task(pool[0, 0].nbytes)
    assert end_with_gil_held(*task.take()) == 0, "it waits for the GIL"
    assert task.failure() is None
    expected = AttentionState.empty(q)
    for table in TABLES:
        NativeAttention(1).attend(q, pool[:, 1], table, expected, SCALE, None)
    assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


def end_with_gil_held(function: int, data: int, patience: float = PATIENCE) -> int:
    """Run function(data) on another thread and wait for its end without letting go of the GIL. 0, or an errno."""

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    libc = ctypes.PyDLL(None)
    thread = ctypes.c_ulong()
    end = time.time() + patience
    until = Timespec(int(end), int(end % 1 * 1e9))
    nothing = ctypes.c_void_p()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # or another thread could ask for the GIL between the calls
    try:
        libc.pthread_create(ctypes.byref(thread), nothing, ctypes.c_void_p(function), ctypes.c_void_p(data))
        return int(libc.pthread_timedjoin_np(thread, nothing, ctypes.byref(until)))
    finally:
        sys.setswitchinterval(interval)


def test_arguments_live_as_long_as_a_task_may_run() -> None:
    """Python may let go of everything but the memory that is attended."""
    pool = host_pool(torch.float32)
    q = torch.randn(3, HEADS, HEAD_DIM)
    state = some_state(3)
    attention = prepare(pool, q, state)
    taken = attention.task(0).take()
    gone = weakref.ref(attention)
    del attention
    gc.collect()
    assert gone() is None
    state.out.fill_(7.0)
    assert end_with_gil_held(*taken) == 0
    assert not (state.out == 7.0).any()


def test_tables_that_do_not_fit_are_refused_before_anything_runs() -> None:
    pool = host_pool(torch.float32)
    q = torch.randn(1, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="must lie within the 1 rows of q"):
        prepare(pool, q, some_state(1))
    with pytest.raises(ValueError, match="head_dim a multiple of 16"):
        prepare(pool[..., :24], torch.randn(3, HEADS, 24), some_state(3))


# ---- on a GPU


@pytest.fixture(params=[pytest.param(False, id="driver"), pytest.param(True, id="polled")])
def cuda_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    """A device whose host tasks run on a thread of the driver, or on one that polls."""
    monkeypatch.setenv(POLLED_CALLS, "1" if request.param else "0")
    device = CudaDevice()
    yield device
    device.close()


@pytest.mark.cuda
def test_another_thread_runs_tasks_while_this_one_calls_the_driver(cuda_device: CudaDevice) -> None:
    size = 1 << 20
    pool = host_pool(torch.float32)
    q = torch.randn(3, HEADS, HEAD_DIM)
    state = some_state(3)
    attention = prepare(pool, q, state)
    stream = cuda_device.new_call_stream("calls")
    copies = cuda_device.new_stream("c")
    host = cuda_device.empty_host("host", (size,), torch.uint8)
    on_device = cuda_device.empty("device", (size,), torch.uint8)
    for _ in range(200):
        stream.launch(attention.task(0))
        cuda_device.copy_2d(PitchedCopy(on_device, host, size, size, size, 1, "h2d"), copies)
        torch.ones(1000).pin_memory()  # freed at once, by a call of the driver with the GIL held
    stream.synchronize()
    expected = AttentionState.empty(q)
    for table in TABLES:
        NativeAttention(1).attend(q, pool[:, 0], table, expected, SCALE, None)
    assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


@pytest.mark.cuda
def test_kernels_and_tasks_use_the_same_host_memory_in_order(cuda_device: CudaDevice) -> None:
    """Queries are written by a kernel, attended, and the state is read by a kernel: again and again, in one buffer."""
    pool = host_pool(torch.float32)
    queries = cuda_device.empty_host("queries", (3, HEADS, HEAD_DIM), torch.float32)
    state = AttentionState(
        cuda_device.empty_host("out", (3, HEADS, HEAD_DIM), torch.float32),
        cuda_device.empty_host("lse", (HEADS, 3), torch.float32),
    )
    attention = prepare(pool, queries, state)
    calls = cuda_device.new_call_stream("calls")
    mapped = cuda_device.mapped(queries)
    out = cuda_device.mapped(state.out)
    assert mapped is not None and out is not None and mapped.is_cuda
    assert (mapped.shape, mapped.dtype) == (queries.shape, queries.dtype)
    given = [torch.randn(3, HEADS, HEAD_DIM) for _ in range(50)]
    written = cuda_device.new_event()
    attended = cuda_device.new_event()
    found = []
    with cuda_device.compute():
        on_device = [each.to(cuda_device.torch_device) for each in given]
        for each in on_device:
            torch.mul(each, 1, out=mapped)
            cuda_device.compute_stream.record(written)
            calls.wait(written)
            calls.launch(attention.task(0))
            calls.record(attended)
            cuda_device.compute_stream.wait(attended)
            found.append(out + 0)
        calls.synchronize()
        results = [each.cpu() for each in found]
    for q, result in zip(given, results, strict=True):
        expected = AttentionState.empty(q)
        for table in TABLES:
            NativeAttention(1).attend(q, pool[:, 0], table, expected, SCALE, None)
        assert torch.equal(result, expected.out)


@pytest.mark.cuda
def test_a_failure_is_raised_once_when_the_stream_is_synchronized(cuda_device: CudaDevice) -> None:
    class Failing:
        def __init__(self) -> None:
            self._inner = empty_task()

        def take(self) -> tuple[int, int]:
            return self._inner.take()

        def drop(self, data: int) -> None:
            self._inner.drop(data)

        def failure(self) -> str | None:
            return "no memory"

    stream = cuda_device.new_call_stream("calls")
    stream.launch(Failing())
    with pytest.raises(EngineError, match="work on stream calls failed: no memory"):
        stream.synchronize()
    stream.synchronize()


@pytest.mark.cuda
def test_a_polling_thread_that_is_ended_releases_its_stream() -> None:
    """As when a device is closed whose work has failed: what it never asked for is not run, and nothing waits."""
    device = CudaDevice()
    stream = device.new_stream("calls")
    other = device.new_call_stream("other")
    assert isinstance(stream, CudaStream)
    words = device.empty_host("words", (128,), torch.uint8)
    polled = _sgdma.PolledCalls(words.data_ptr(), _sgdma.device_address(words.data_ptr()))
    with torch.cuda.stream(stream.inner):
        torch.cuda._sleep(200_000_000)  # cycles: the stream comes to the tasks later
    for _ in range(3):
        polled.launch(*empty_task().take(), stream.inner.cuda_stream)
    polled.close()
    polled.close()
    stream.synchronize()
    task = empty_task()
    function, data = task.take()
    with pytest.raises(RuntimeError, match="The thread that runs the tasks has ended"):
        polled.launch(function, data, stream.inner.cuda_stream)
    task.drop(data)
    other.launch(empty_task())
    other.synchronize()
    device.close()
