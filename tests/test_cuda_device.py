"""The CUDA device: what refuses it, its clock, and on a GPU its streams, memory, and engines held against the CPU's."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import greedy, logits_of_greedy_rows, offloaded, random_prompt, recorded_logits, token_ids
from ordering_check import OrderingCheck
from waiting import PATIENCE

from nanovllm import LLM
from nanovllm.comm import CopyError, _sgdma, memcpy_2d_async
from nanovllm.device import PitchedCopy, create_device, cuda
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.cuda import CONNECTIONS, CudaClock, CudaDevice, CudaStream, check_cuda, use_all_connections
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.kv_disk import files
from nanovllm.features.kv_disk.units import UnitCopier

BLOCK = 16
VOCAB = 97
SIZE = 1 << 20


# ---- anywhere


class FakeEvent:
    """Recorded when it is made, `milliseconds` on; times between events are rounded to fp32, as CUDA's are."""

    now = 5.0

    def __init__(self, has_happened: bool = True) -> None:
        self.milliseconds = FakeEvent.now
        self.has_happened = has_happened

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        assert self.has_happened

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(torch.tensor(end.milliseconds - self.milliseconds, dtype=torch.float32))


def test_times_stay_exact_over_hours_and_a_mark_has_none_before_it_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.now = 5.0
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cuda, "own_stream", lambda device: None)
    monkeypatch.setattr(cuda, "timed_event", lambda stream: FakeEvent(stream is None))
    monkeypatch.setattr(cuda.time, "monotonic", lambda: FakeEvent.now / 1e3)
    clock = CudaClock(device)
    stream = torch.cuda.Stream
    for index in range(1, 3000):
        FakeEvent.now = 5.0 + 4001.0 * index
        mark: Any = clock.mark(stream)  # type: ignore[arg-type]
    FakeEvent.now += 1.5
    last: Any = clock.mark(stream)  # type: ignore[arg-type]
    assert mark.seconds() is None and last.seconds() is None
    mark._event.has_happened = last._event.has_happened = True
    assert mark.seconds() == pytest.approx(4.001 * 2999, abs=1e-6)
    assert last.seconds() == pytest.approx(4.001 * 2999 + 0.0015, abs=1e-6)


@pytest.mark.parametrize(("given", "number"), [(None, "32"), ("8", "8"), ("1", "1")])
def test_all_hardware_queues_are_used_unless_the_environment_says_otherwise(
    given: str | None, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONNECTIONS, given or "")
    if given is None:
        monkeypatch.delenv(CONNECTIONS)
    use_all_connections()
    assert os.environ[CONNECTIONS] == number


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_is_refused_and_the_cpu_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda': torch sees no CUDA device; use device='cpu'"):
        create_device("cuda")
    device = create_device(None)
    assert isinstance(device, CpuDevice)
    device.close()


def test_an_extension_without_cuda_is_refused_by_name_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda._sgdma, "cuda_version", lambda: 0)
    with pytest.raises(ConfigError, match=r"the extension was built without CUDA; .*NANOVLLM_CUDA=1 python setup\.py"):
        check_cuda()
    with caplog.at_level(logging.WARNING):
        device = create_device(None)
    assert isinstance(device, CpuDevice) and "running on the CPU" in caplog.text
    device.close()


def test_both_ends_of_host_memory_must_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is locked in part is refused as pageable memory is; what CUDA says counts, not torch."""
    host = torch.zeros(64)
    end = 63
    monkeypatch.setattr(
        _sgdma, "memory_of", lambda address: ("pageable", -1) if address > host.data_ptr() else ("pinned", 0)
    )
    with pytest.raises(CopyError, match="dst in pinned host memory, but its memory is pageable"):
        memcpy_2d_async(host[end:], host, 4, 4, 4, 1, "d2h")


# ---- on a GPU


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


def pinned(device: CudaDevice, value: int) -> torch.Tensor:
    return device.empty_host("host", (SIZE,), torch.uint8).fill_(value)


def put(device: CudaDevice, dst: torch.Tensor, src: torch.Tensor, kind: Any, stream: Any) -> None:
    device.copy_2d(PitchedCopy(dst, src, SIZE, SIZE, SIZE, 1, kind), stream)


def busy(device: CudaDevice) -> None:
    """Keeps the compute stream up for tens of milliseconds."""
    with device.compute():
        torch.cuda._sleep(50_000_000)


@pytest.mark.cuda
def test_a_wait_orders_a_copy_after_a_slow_kernel_and_without_it_they_race(device: CudaDevice) -> None:
    source = device.empty("source", (SIZE,), torch.uint8).fill_(1)
    early = pinned(device, 0)
    late = pinned(device, 0)
    event = device.new_event()
    stream = device.new_stream("a")
    other = device.new_stream("b")
    torch.cuda.synchronize()
    busy(device)
    with device.compute():
        source.fill_(2)
    device.compute_stream.record(event)
    stream.wait(event)
    put(device, late, source, "d2h", stream)
    put(device, early, source, "d2h", other)
    stream.synchronize()
    other.synchronize()
    assert int(late[0]) == int(late[-1]) == 2
    assert int(early[0]) == 1, "without the wait the copy ran ahead: the race is real here"


@pytest.mark.cuda
def test_compute_waits_for_a_copy(device: CudaDevice) -> None:
    dst = device.empty("dst", (64, SIZE), torch.uint8).zero_()
    src = device.empty_host("src", (64, SIZE), torch.uint8)
    src.fill_(3)
    torch.cuda.synchronize()
    stream = device.new_stream("loads")
    event = device.new_event()
    for row in range(64):
        put(device, dst[row], src[row], "h2d", stream)
    stream.record(event)
    device.compute_stream.wait(event)
    with device.compute():
        total = dst.sum(dtype=torch.int64)
    device.compute_stream.synchronize()
    assert int(total) == 3 * 64 * SIZE


@pytest.mark.cuda
def test_a_copy_within_host_memory_keeps_the_order_of_its_stream(device: CudaDevice) -> None:
    first = pinned(device, 1)
    second = pinned(device, 0)
    down = pinned(device, 0)
    source = device.empty("block", (SIZE,), torch.uint8)
    stream = device.new_stream("moves")
    event = device.new_event()
    busy(device)
    with device.compute():
        source.fill_(7)
    device.compute_stream.record(event)
    stream.wait(event)
    put(device, first, source, "d2h", stream)
    put(device, second, first, "h2h", stream)
    put(device, source, second, "h2d", stream)
    put(device, down, source, "d2h", stream)
    is_untouched = not second.any()
    assert is_untouched or event.inner.query(), "the host did not wait"  # type: ignore[attr-defined]
    stream.synchronize()
    assert torch.equal(second, torch.full_like(second, 7)) and torch.equal(down, second)


@pytest.mark.cuda
def test_a_wait_takes_the_record_at_the_time_of_the_call(device: CudaDevice) -> None:
    stream = device.new_stream("a")
    event = device.new_event()
    stream.wait(event)  # never recorded: does not block
    stream.record(event)
    device.compute_stream.wait(event)
    busy(device)
    device.compute_stream.record(event)
    stream.synchronize()
    assert event.inner.query() is False, "the later record is still to come, and no stream waited for it"  # type: ignore[attr-defined]


@pytest.mark.cuda
def test_nothing_runs_on_the_default_stream_and_no_two_streams_are_one(device: CudaDevice) -> None:
    streams = [device.compute_stream, *(device.new_stream(str(i)) for i in range(17))]
    handles = [stream.inner.cuda_stream for stream in streams if isinstance(stream, CudaStream)]
    assert len(set(handles)) == 18 and torch.cuda.default_stream().cuda_stream not in handles
    with device.compute():
        assert torch.cuda.current_stream() == device.compute_stream.inner  # type: ignore[attr-defined]


@pytest.mark.cuda
def test_no_engine_has_a_stream_of_another(device: CudaDevice) -> None:
    """Not even the clock's: torch gives the same 32 streams to everybody in turn."""
    devices = [CudaDevice() for _ in range(4)]
    made = [one.new_stream(str(index)) for one in devices for index in range(8)]
    handles = [stream.inner.cuda_stream for stream in made if isinstance(stream, CudaStream)]
    handles += [one._clock._stream.cuda_stream for one in devices]
    pool = {torch.cuda.Stream().cuda_stream for _ in range(32)}
    assert len(set(handles)) == 36 and not pool & set(handles)
    for one in devices:
        one.close()


@pytest.mark.cuda
def test_the_streams_of_a_closed_device_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[int] = []
    destroy = _sgdma.destroy_stream
    monkeypatch.setattr(_sgdma, "destroy_stream", lambda handle: (destroyed.append(handle), destroy(handle)))
    device = CudaDevice()
    stream = device.new_stream("a")
    assert isinstance(stream, CudaStream)
    mark = stream.mark()
    handles = {stream.inner.cuda_stream, device._clock._stream.cuda_stream}
    device.close()
    device.close()
    assert set(destroyed) == handles and len(destroyed) == 2
    stream.synchronize()  # there is nothing to wait for
    assert mark.seconds() is not None
    with pytest.raises(EngineError, match="stream a is closed"):
        stream.record(device.new_event())


@pytest.mark.cuda
def test_memory_of_another_device_is_refused(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = device.empty("dst", (SIZE,), torch.uint8)
    src = pinned(device, 0)
    other = device.torch_device.index + 1
    monkeypatch.setattr(_sgdma, "memory_of", lambda address: ("device", other))
    with pytest.raises(CopyError, match=f"CUDA says that it is device memory of device {other}"):
        put(device, dst, src, "h2d", device.new_stream("a"))


@pytest.mark.cuda
def test_memory_is_counted_and_a_peak_is_measured(device: CudaDevice) -> None:
    free = device.free_memory()
    assert 0 < free <= device.total_memory()
    kept = device.empty("kept", (256 << 20,), torch.uint8)
    assert device.free_memory() <= free - kept.nbytes
    peak = device.peak_memory(lambda: torch.ones(64 << 20, dtype=torch.uint8, device="cuda") + 1)
    assert 128 << 20 <= peak <= 192 << 20
    with pytest.raises(ConfigError, match=r"pool: .* GiB cannot be allocated, .* lower num_gpu_blocks"):
        device.empty("pool", (1 << 50,), torch.uint8)


model_dir = checkpoint_fixture("qwen3", vocab=VOCAB, hidden=128, intermediate=256, head_dim=64)


def arguments(num_gpu_blocks: int, **others: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 200, "max_num_batched_tokens": 45}
    engine = {"dtype": "float32", "device": "cuda", "cpu_attention": False}
    return {**offloaded(BLOCK, num_gpu_blocks, 40), **sizes, **engine, **others}


def resident_arguments() -> dict[str, Any]:
    """Everything on the device: without offload `cpu_attention` and `num_cpu_blocks` mean nothing, and are refused."""
    offload = ("enable_cpu_offload", "num_cpu_blocks", "cpu_attention")
    return {name: value for name, value in arguments(-1).items() if name not in offload}


@pytest.mark.cuda
@pytest.mark.parametrize("cpu_attention", [False, True])
@pytest.mark.parametrize("num_gpu_blocks", [4, 9, 40])
def test_an_offloaded_engine_gives_the_tokens_of_the_cpu(
    model_dir: Path, num_gpu_blocks: int, cpu_attention: bool
) -> None:
    prompts = [random_prompt(length, VOCAB, 5) for length in (100, 33, 64, 1)]
    with LLM(model_dir, **arguments(num_gpu_blocks, device="cpu")) as llm:
        expected = token_ids(llm, prompts, greedy(20))
    with LLM(model_dir, **arguments(num_gpu_blocks, cpu_attention=cpu_attention)) as llm:
        assert llm._runner.device.name == "cuda" and isinstance(llm._runner.device, OrderingCheck)
        assert token_ids(llm, prompts, greedy(20)) == expected
    with LLM(model_dir, **resident_arguments()) as llm:
        assert token_ids(llm, prompts, greedy(20)) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_the_memory_budget(model_dir: Path, dtype: str) -> None:
    """The same block and chunk size, and any number of resident blocks: the same bits."""
    seen = []
    for num_gpu_blocks in (4, 6, 9, 20):
        with LLM(model_dir, **arguments(num_gpu_blocks, dtype=dtype)) as llm, recorded_logits(llm) as logits:
            token_ids(llm, [random_prompt(100, VOCAB, 6)], greedy(12))
        seen.append(torch.cat(logits).cpu())
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.cuda
def test_a_step_makes_the_host_wait_once(model_dir: Path) -> None:
    """For its sampled tokens. torch warns of every call that makes the host wait for the device."""
    with LLM(model_dir, **arguments(6)) as llm, logits_of_greedy_rows():
        llm.engine.add_request("warm", None, greedy(4), random_prompt(60, VOCAB, 7))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        llm.engine.add_request("r", None, greedy(8), random_prompt(100, VOCAB, 8))
        waits = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            while llm.engine.has_unfinished_requests():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    llm.engine.step()
                waits.append([str(w.message) for w in caught if "synchroniz" in str(w.message)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(len(messages) <= 1 for messages in waits), max(waits, key=len)
    assert sum(map(len, waits)) == 8, "one for each step that samples a token"


@pytest.mark.cuda
def test_kv_is_read_from_disk_while_a_graph_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an engine that replays decode graphs; the copies are on a stream of their own, in no graph."""
    make_checkpoint(tmp_path / "model", vocab=VOCAB, hidden=128, intermediate=256, head_dim=64, max_positions=512)
    engine = {**resident_arguments(), "max_model_len": 400, "kv_cache_dir": tmp_path / "kv"}
    prompt = random_prompt(300, VOCAB, 12)
    records = threading.Event()
    copied = threading.Event()
    with LLM(tmp_path / "model", **engine) as llm:
        expected = token_ids(llm, [prompt], greedy(20))
    read = files.read
    copy_in = UnitCopier.copy_in
    monkeypatch.setattr(files, "read", lambda *args: records.wait(PATIENCE) and read(*args))
    monkeypatch.setattr(UnitCopier, "copy_in", lambda *args: (copy_in(*args), copied.set()))
    with LLM(tmp_path / "model", **engine) as llm:
        llm.engine.add_request("stored", None, greedy(20), prompt)
        llm.engine.step()
        device = llm._runner.device
        number = torch.zeros(1, device="cuda")

        def work(cut: Callable[[], None]) -> None:
            number.add_(1)
            if torch.cuda.is_current_stream_capturing():
                records.set()
                assert copied.wait(PATIENCE)

        with device.compute():
            ((graph,),) = device.capture([work])
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += [output for output in llm.engine.step() if output.finished]
        with device.compute():
            graph.replay()
        device.compute_stream.synchronize()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].metrics.cached_tokens_disk == 256 and float(number) == 2
