"""CUDA graphs: what is asked of torch to record them, and on a GPU their logits, tokens, waits and memory."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from engines import greedy, random_prompt, recorded_logits, token_ids
from graph_devices import BLOCK, MODES, PROMPTS, VOCAB, arguments, measured_memory
from torch import Tensor

from nanovllm import LLM
from nanovllm.device import RecordedWork
from nanovllm.device.cuda import CudaDevice
from nanovllm.device.cuda_graph import record_graphs
from nanovllm.features.cuda_graphs import decode_graphs
from nanovllm.memory import profiling

# ---- anywhere


class FakeCuda:
    """What recording asks of torch, written down; the end of a recording fails once something in it was refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.refused = False
        fake = self
        note = self.calls.append

        class Inner:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                note(f"begin {pool} {capture_error_mode}")

            def capture_end(self) -> None:
                note("end")
                if fake.refused:
                    raise RuntimeError("capture failed")

        class Stream:
            def synchronize(self) -> None:
                note("wait")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Inner)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        for name in ("endAllocateToPool", "releasePool"):
            call = partial(lambda name, device, pool: note(f"{name} {device} {pool}"), name)
            monkeypatch.setattr(torch._C, f"_cuda_{name}", call, raising=False)

    def work(
        self, name: str, error: Exception | None = None, refused: bool = False, cuts: bool = False
    ) -> RecordedWork:
        def work(cut: Callable[[], None]) -> None:
            self.calls.append(name)
            if cuts:
                cut()
                self.calls.append(f"more of {name}")
            if any(call.startswith("begin") for call in self.calls):
                self.refused |= refused
                if error is not None:
                    raise error

        return work


def test_what_is_asked_of_torch_to_record_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    begin = "begin pool thread_local"
    graphs = record_graphs([cuda.work("a"), cuda.work("b", cuts=True)], 3)
    run = ["a", "b", "more of b", "wait"]
    recorded = [begin, "a", "end", begin, "b", "end", begin, "more of b", "end"]
    assert cuda.calls == run + recorded and [len(of_work) for of_work in graphs] == [1, 2]
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(ValueError, match="of the work"):
        record_graphs([cuda.work("a", ValueError("of the work"))], 3)
    assert cuda.calls[-2:] == ["a", "end"], "nothing was refused: the recording ends as any other"
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="capture failed"):
        record_graphs([cuda.work("a", refused=True)], 3)
    assert cuda.calls[-3:] == ["end", "endAllocateToPool 3 pool", "releasePool 3 pool"]
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(ValueError, match="of the work"):
        record_graphs([cuda.work("a", ValueError("of the work"), refused=True)], 3)
    assert cuda.calls[-1] == "releasePool 3 pool"


def test_no_garbage_is_collected_during_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that frees memory or unlocks its pages would spoil the recording."""
    cuda = FakeCuda(monkeypatch)

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            cuda.calls.append("collected")

    def work(cut: Callable[[], None] = lambda: None) -> list[list[int]]:
        Garbage()
        return [[] for _ in range(10 * gc.get_threshold()[0])]  # enough new objects for a collection

    assert gc.isenabled()
    record_graphs([work, work], 3)
    begin = cuda.calls.index("begin pool thread_local")
    end = len(cuda.calls) - cuda.calls[::-1].index("end")
    assert "collected" in cuda.calls[:begin] and "collected" not in cuda.calls[begin:end]
    work()
    assert cuda.calls[-1] == "collected", "garbage is collected again"
    with pytest.raises(ValueError, match="of the work"):
        record_graphs([cuda.work("a", ValueError("of the work"))], 3)
    assert gc.isenabled()


# ---- on a GPU


gpu_model_dir = checkpoint_fixture(vocab=VOCAB, hidden=128, intermediate=256, head_dim=64, layers=3)


def on_gpu(mode: str, **others: Any) -> dict[str, Any]:
    return arguments(mode, **{"device": "cuda", **others})


def logits_of_batches(path: Path, sizes: Sequence[int], **engine: Any) -> list[list[Tensor]]:
    """The logits of each step, for batches of these sizes one after the other."""
    found = []
    with LLM(path, **engine) as llm:
        assert (llm._runner.passes[0].decode_runner is None) == engine["enforce_eager"], "recording failed: see the log"
        for rows in sizes:
            with recorded_logits(llm) as recorded:
                token_ids(llm, [random_prompt(20 + 9 * index, VOCAB, rows) for index in range(rows)], greedy(12))
            found.append([logits.cpu() for logits in recorded])
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_real_graphs_give_the_logits_of_eager_steps(
    mode: str, dtype: str, gpu_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where a bucket is full; libraries may compute a padded batch in another order."""
    if mode == "pieces, resident":
        monkeypatch.setattr(decode_graphs, "row_attention", lambda backend: None)
    sizes = (1, 2, 3, 5, 8, 9)
    limits = {"dtype": dtype, "max_num_batched_tokens": 800, "enable_prefix_caching": False}
    replayed, eager = (
        logits_of_batches(gpu_model_dir, sizes, **on_gpu(mode, **limits, enforce_eager=flag)) for flag in (False, True)
    )
    bound = {"float32": 1e-3, "bfloat16": 0.25}[dtype]
    for rows, ours_of_rows, theirs_of_rows in zip(sizes, replayed, eager, strict=True):
        for ours, theirs in zip(ours_of_rows, theirs_of_rows, strict=True):
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= bound
            if rows in (1, 2, 8, 9) and mode != "pieces, offloaded":  # the CPU's share is not the same in both runs
                assert torch.equal(ours, theirs)
            if not torch.equal(ours.argmax(-1), theirs.argmax(-1)):
                assert dtype == "bfloat16"
                break  # from here on the sequences differ


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["full steps", "pieces, offloaded"])
def test_real_graphs_give_the_tokens_of_the_cpu(mode: str, gpu_model_dir: Path) -> None:
    """Requests that end and join, with preemption."""
    params = [greedy(4 + 3 * index) for index in range(len(PROMPTS))]
    with LLM(gpu_model_dir, **arguments("eager", device="cpu")) as llm:
        expected = token_ids(llm, PROMPTS, params)
    small = {"num_gpu_blocks": 24} if mode == "full steps" else {"num_gpu_blocks": 8, "num_cpu_blocks": 20}
    with LLM(gpu_model_dir, **on_gpu(mode, **small)) as llm:
        assert llm._runner.passes[0].decode_runner is not None
        assert token_ids(llm, PROMPTS, params) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["full steps", "pieces, no CPU attention"])
def test_a_replayed_step_makes_the_host_wait_for_its_tokens_alone(mode: str, gpu_model_dir: Path) -> None:
    """By an event behind their copy. torch warns of every other call that makes the host wait for the device."""
    with LLM(gpu_model_dir, **on_gpu(mode)) as llm:
        token_ids(llm, [random_prompt(50, VOCAB, 9)] * 3, greedy(4))
        for index in range(3):
            llm.engine.add_request(str(index), None, greedy(12), random_prompt(10, VOCAB, index))
        for _ in range(3):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    assert not [str(w.message) for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.cuda
@pytest.mark.parametrize("offload", [False, True])
def test_what_real_graphs_take_is_what_was_kept_for_them(
    offload: bool, gpu_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prints both. The estimate may not be below what is taken by more than one step of the driver's."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("it measures the device's memory, of which other test processes take some: run it without -n")
    caplog.set_level(logging.INFO, "nanovllm.features.cuda_graphs.decode_graphs")
    found = measured_memory(monkeypatch)
    engine = {"dtype": "bfloat16", "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.3, "device": "cuda"}
    if offload:
        engine |= {"enable_cpu_offload": True, "num_cpu_blocks": 20, "kvcache_block_size": BLOCK}
    with LLM(gpu_model_dir, **engine, max_num_seqs=64) as llm:
        eager = profiling._peak(llm._runner.device, llm._runner.model, llm._runner.kv_cache._backend, llm.config)  # type: ignore[attr-defined]
    (line,) = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    kept = (found[0].activation_peak - eager) / 2**20
    taken = float(line.split()[-2])
    print(f"kept {kept:.0f} MiB, {line}")
    assert taken <= kept + 32


@pytest.mark.cuda
def test_a_recording_that_cuda_refuses_leaves_the_device_as_it_was() -> None:
    """A wait of the host is not allowed while recording; afterwards memory can be had, freed and recorded over."""
    device = CudaDevice()
    total = torch.zeros(1, device="cuda")

    def allowed(cut: Callable[[], None]) -> None:
        total.add_(torch.ones(1 << 20, device="cuda").sum())

    def refused(cut: Callable[[], None]) -> None:
        allowed(cut)
        total.item()

    for _ in range(2):
        with pytest.raises(RuntimeError):
            device.capture([allowed, refused])
        assert device.free_memory() > 0
        ((graph,),) = device.capture([allowed])
        with device.compute():
            total.zero_()
            graph.replay()
            graph.replay()
        device.compute_stream.synchronize()
        assert int(total) == 2 << 20
    device.close()
