"""CPU attention in complete engines: at every share the output is that of an engine without it, and nothing deadlocks.

Where the CPU is the device, its blocks are attended in order, and logits are bit-identical. Concurrently with a device,
here a CPU device with extra threads, the partial state of CPU attention is merged last: fp32
rounding, and what becomes of it. The bounds below are a few times what was seen.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from cpu_attention_helpers import (
    SHARES,
    DeviceOfItsOwn,
    SilentDevice,
    add_cpu_attention_streams,
    around_tasks,
    cpu_attention,
    force_share,
    kv_cache,
)
from engines import greedy, logits_by_request, offloaded, random_prompt, token_ids
from fast import fast_only
from torch import Tensor
from waiting import PATIENCE

from nanovllm import LLM
from nanovllm.apps.recall import expected_answer, make_document, make_prompt, write_recall_checkpoint
from nanovllm.device import PitchedCopy, Stream
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.cpu_attention import host_blocks
from nanovllm.features.cpu_attention.balance import BalancedShare, StepTimes

BLOCK = 16
VOCAB = 97
LENGTHS = (9 * BLOCK + 7, 3 * BLOCK, 5)
MAX_TOKENS = 8

# How much concurrent CPU attention may change any logit, relative to the largest one.
BOUNDS = {"float32": 5e-6, "bfloat16": 0.02}


model_dir = checkpoint_fixture(vocab=VOCAB, layers=3, head_dim=32)


def logits_of_run(path: Path, share: float | None, **arguments: Any) -> tuple[Tensor, list[list[int]], int]:
    """All logits `[sampled rows, vocab]`, the tokens, and how many layers of blocks the CPU attended to."""
    prompts = [random_prompt(length, VOCAB, seed=4) for length in LENGTHS]
    arguments = {**offloaded(BLOCK, 6, 40, max_num_batched_tokens=40), **arguments}
    with LLM(path, cpu_attention=share is not None, **arguments) as llm:
        if share is not None:
            force_share(llm, share)
        found = logits_by_request(llm, prompts, MAX_TOKENS)
        logits = torch.stack([found[key] for key in sorted(found)])
        tokens = logits.argmax(dim=-1).unflatten(0, (len(prompts), MAX_TOKENS)).tolist()
        return logits, tokens, llm.kv_stats().transfers.cpu_attention_blocks


# ---- the same answer at every share


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dtype": "float32", "head_dim": 32, "layers": 3}),
    ("qwen3", {"dtype": "bfloat16", "head_dim": 64}),
    ("qwen2", {"dtype": "float32", "head_dim": 24}),  # torch's operator
    ("mistral", {"dtype": "float32", "head_dim": 16, "sliding_window": 37}),
    ("qwen2", {"dtype": "bfloat16", "head_dim": 16, "sliding_window": 37, "layers": 3}),  # in some layers
]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("family", "options"), fast_only([SHAPES[4]], SHAPES))
def test_every_share_gives_the_same_logits(
    tmp_path: Path, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family, vocab=VOCAB, **options)
    exact, tokens, none = logits_of_run(tmp_path, None)
    assert none == 0
    counts = []
    for share in SHARES:
        logits, same_tokens, blocks = logits_of_run(tmp_path, share)
        assert torch.equal(logits, exact) and same_tokens == tokens, share
        counts.append(blocks)
    assert counts[0] == 0 < counts[-1] and counts == sorted(counts)
    add_cpu_attention_streams(monkeypatch)
    if options["head_dim"] % 16:  # which the C++ kernel does not take
        with LLM(tmp_path, **offloaded(BLOCK, 6, 40)) as llm:
            assert kv_cache(llm).cpu_attention is None
        return
    for share, blocks in zip(SHARES, counts, strict=True):
        logits, same_tokens, blocks_beside = logits_of_run(tmp_path, share)
        error = ((logits - exact).abs().max() / exact.abs().max()).item()
        assert error <= BOUNDS[options["dtype"]] * (share > 0), (share, error)
        assert blocks_beside == blocks
        if options["dtype"] == "float32":
            assert same_tokens == tokens


@pytest.mark.parametrize("num_gpu_blocks", fast_only([9], [4, 5, 9, 13]))
def test_logits_do_not_depend_on_the_device_budget(model_dir: Path, num_gpu_blocks: int) -> None:
    resident, _, none = logits_of_run(model_dir, 1.0, num_gpu_blocks=60)
    assert none == 0
    for share in (0.5, 1.0):
        logits, _, blocks = logits_of_run(model_dir, share, num_gpu_blocks=num_gpu_blocks)
        assert torch.equal(logits, resident) and blocks > 0, share


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("concurrent", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_recall_is_perfect(tmp_path: Path, share: float, concurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong, stale or half-copied row on either way, and an answer is wrong."""
    if concurrent:
        add_cpu_attention_streams(monkeypatch)
    length = 1500
    block = 64
    asked = 3
    write_recall_checkpoint(tmp_path, length + 2, length + 1 + asked, seed=1)
    document = make_document(length + 2, length, seed=2)
    positions = [1, *range(13, length - asked, 41)]
    arguments = offloaded(block, 4, 80, max_num_batched_tokens=500)
    with LLM(tmp_path, max_model_len=length + 1 + asked, **arguments) as llm:
        force_share(llm, share)
        prompts = [make_prompt(document, position) for position in positions]
        answers = [*token_ids(llm, prompts[:1], greedy(asked)), *token_ids(llm, prompts[1:], greedy(asked))]
        assert llm.kv_stats().transfers.cpu_attention_blocks > 0
    assert answers == [expected_answer(document, position, asked) for position in positions]


# ---- many requests


@pytest.mark.parametrize("concurrent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_shared_blocks_preemption_and_aborts(
    model_dir: Path, concurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with a common start, too many for the blocks there are, of which some are aborted."""
    start = random_prompt(4 * BLOCK, VOCAB, seed=1)
    prompts = [[*start, *random_prompt(length, VOCAB, seed=2)] for length in (1, 20, 33, 47, 5, 16, 40)]
    with LLM(model_dir, dtype="float32", kvcache_block_size=BLOCK, num_gpu_blocks=80) as llm:
        expected = token_ids(llm, prompts, greedy(25))
    if concurrent:
        add_cpu_attention_streams(monkeypatch)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 5, 18, max_num_batched_tokens=64)) as llm:
        for victim, share in enumerate((0.4, 1.0)):
            force_share(llm, share)
            finished: dict[str, list[int]] = {}
            for index, prompt in enumerate(prompts):
                llm.engine.add_request(str(index), None, greedy(25), prompt)
            for step in count():
                if step == 7 + 5 * victim:
                    llm.engine.abort_request(str(victim))
                if not llm.engine.has_unfinished_requests():
                    break
                outputs = [output for output in llm.engine.step() if output.finished]
                finished |= {output.request_id: output.outputs[0].token_ids for output in outputs}
            assert finished == {str(i): tokens for i, tokens in enumerate(expected) if i != victim}
        assert llm.engine.scheduler.preemption.stats.total > 0
        assert llm.kv_stats().transfers.cpu_attention_blocks > 0
        assert llm.engine.scheduler.block_manager.pool.num_used == 0


def test_long_chunks_stream_and_decodes_in_the_same_step_use_cpu_attention(model_dir: Path) -> None:
    """A decode and a prefill in one batch: the CPU attends for the decode and leaves the chunk to the ring."""
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 60, max_num_batched_tokens=64)) as llm:
        force_share(llm, 1.0)
        llm.engine.add_request("decode", None, greedy(30), random_prompt(7 * BLOCK, VOCAB, 1))
        llm.engine.step()
        llm.engine.step()
        before = llm.kv_stats().transfers
        assert before.cpu_attention_blocks == 0, "chunks stream"
        llm.engine.add_request("prefill", None, greedy(1), random_prompt(9 * BLOCK, VOCAB, 2))
        llm.engine.step()
        moved = llm.kv_stats().transfers - before
        assert moved.cpu_attention_blocks > 0 and moved.d2h_bytes > 0


# ---- on threads of its own


def test_cpu_attention_runs_beside_the_launching_thread(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of CPU attention ends only after the device's next one has begun: they run at the same time."""
    add_cpu_attention_streams(monkeypatch)
    prompt = random_prompt(9 * BLOCK, VOCAB, 3)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 5, 40)) as llm:
        expected = token_ids(llm, prompt, greedy(4))
        device_call = threading.Event()
        threads: list[str] = []
        device_attend = kv_cache(llm)._backend.attend

        def on_host(attend: Callable[[], None]) -> None:
            threads.append(threading.current_thread().name)
            assert device_call.wait(PATIENCE), "the launching thread waits for CPU attention"
            attend()

        def on_device(*arguments: Any) -> None:
            device_call.set()
            device_attend(*arguments)

        around_tasks(monkeypatch, on_host)
        replace_attend(monkeypatch, kv_cache(llm), on_device)
        force_share(llm, 1.0)
        device_call.clear()
        assert token_ids(llm, prompt, greedy(4)) == expected
    assert set(threads) == {"kv-cpu-attention"}


def test_queries_and_partial_states_are_not_copied(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write and read them in host memory: a copy of them would wait behind the loads of the ring."""
    add_cpu_attention_streams(monkeypatch)
    copies: list[PitchedCopy] = []
    copy_2d = DeviceOfItsOwn.copy_2d

    def counting(self: DeviceOfItsOwn, copy: PitchedCopy, stream: Stream) -> int:
        copies.append(copy)
        return copy_2d(self, copy, stream)

    monkeypatch.setattr(DeviceOfItsOwn, "copy_2d", counting)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 5, 40)) as llm:
        force_share(llm, 1.0)
        prompts = [random_prompt(6 * BLOCK, VOCAB, seed) for seed in range(2)]
        token_ids(llm, prompts, greedy(1))
        copies.clear()
        before = llm.kv_stats().transfers
        llm.generate([[*prompt, 1] for prompt in prompts], greedy(1), use_tqdm=False)
        moved = llm.kv_stats().transfers - before
    assert moved.cpu_attention_blocks > 0
    assert Counter(copy.kind for copy in copies) == Counter(h2d=moved.h2d_copies, d2h=moved.d2h_copies)


def test_an_engine_has_few_streams(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those of computation, of the clock and of KV on disk, fewer than a GPU has hardware queues by default."""
    names: list[str] = []
    make = DeviceOfItsOwn.new_call_stream
    monkeypatch.setattr(
        DeviceOfItsOwn, "new_call_stream", lambda device, name: (names.append(name), make(device, name))[1]
    )
    add_cpu_attention_streams(monkeypatch)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 5, 40)) as llm:
        force_share(llm, 0.5)
        token_ids(llm, random_prompt(9 * BLOCK, VOCAB, 3), greedy(4))
    assert names == ["kv-loads", "kv-stores", "kv-moves", "kv-cpu-attention"]


def test_a_device_whose_kernels_cannot_reach_host_memory_has_no_cpu_attention(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Apart(DeviceOfItsOwn):
        def mapped(self, host: Tensor) -> None:  # type: ignore[override]
            return None

    add_cpu_attention_streams(monkeypatch, Apart)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 5, 40)) as llm:
        assert kv_cache(llm).cpu_attention is None


@pytest.mark.parametrize("device", [None, DeviceOfItsOwn, SilentDevice])
def test_failing_cpu_attention_ends_the_running_requests_and_not_the_engine(
    model_dir: Path, device: type[DeviceOfItsOwn] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device is not None:
        add_cpu_attention_streams(monkeypatch, device)
    prompt = random_prompt(100, VOCAB, 8)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 30, max_num_batched_tokens=40)) as llm:
        force_share(llm, 1.0)
        expected = token_ids(llm, prompt, greedy(5))
        attend = cpu_attention(llm)._backend.attend
        calls = []

        def broken(work: Callable[[], None]) -> None:
            calls.append(1)
            if len(calls) > 4:  # in the second decode step
                raise OSError("a memory bank is gone")
            work()

        with monkeypatch.context() as patch:
            if device is None:
                replace_attend(patch, cpu_attention(llm), lambda *arguments: broken(lambda: attend(*arguments)))
            else:
                around_tasks(patch, broken)
            llm.engine.scheduler.block_manager.reset_prefix_cache()
            with pytest.raises(EngineError, match="a memory bank is gone") as failed:
                llm.generate(prompt, greedy(5), use_tqdm=False)
        (ended,) = failed.value.outputs
        assert ended.outputs[0].finish_reason == "error"  # type: ignore[attr-defined]
        assert 0 < len(ended.outputs[0].token_ids) < 5  # type: ignore[attr-defined]
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.pool.num_used == 0
        assert token_ids(llm, prompt, greedy(5)) == expected


# ---- the share that rates make best


@pytest.mark.parametrize("concurrent", [False, True])
def test_without_a_forced_share_rates_decide(
    model_dir: Path, concurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one processor the CPU reads all host blocks; next to a device, two thirds at twice the link's rate."""
    if concurrent:
        add_cpu_attention_streams(monkeypatch)
    prompt = random_prompt(14 * BLOCK, VOCAB, 1)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 40)) as llm:
        policy = cpu_attention(llm).policy
        assert isinstance(policy, BalancedShare)
        policy._weight_bytes = 0  # of a layer of this tiny model they weigh as much as its KV
        llm.generate(prompt, greedy(2), use_tqdm=False)
        counted = llm.kv_stats().transfers
        layers = llm._runner.network.num_layers
        resident = llm.kv_stats().resident_blocks
    on_host = 14 - resident
    assert counted.cpu_attention_blocks == layers * (round(on_host * 2 / 3) if concurrent else on_host)


def test_the_policy_sees_every_decode_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes that the step had on the host, and those that the CPU read in one layer of it."""
    add_cpu_attention_streams(monkeypatch)
    seen: list[StepTimes] = []
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 40, max_num_batched_tokens=40)) as llm:
        force_share(llm, 0.5)
        monkeypatch.setattr(cpu_attention(llm).policy, "observe", seen.append)
        llm.generate(random_prompt(9 * BLOCK, VOCAB, 1), greedy(4), use_tqdm=False)
        assert len(seen) == 2, "of three; the last is seen in the next step, and no chunk is"
        moved = llm.kv_stats().transfers
        llm.engine.add_request("last", None, greedy(1), [1])
        llm.engine.step()
        layers = llm._runner.network.num_layers
        token_bytes = kv_cache(llm).layout.token_layer_bytes
        resident = llm.kv_stats().resident_blocks
    assert [step.host_bytes for step in seen] == [
        layers * token_bytes * (9 * BLOCK + step - resident * BLOCK) for step in range(3)
    ]
    assert sum(layers * step.cpu_bytes for step in seen) == moved.cpu_attention_bytes
    assert all(step.seconds > 0 and step.late != 0 for step in seen)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_policy_sees_steps_with_and_without_cpu_attention(
    model_dir: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_cpu_attention_streams(monkeypatch)
    seen: list[StepTimes] = []
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 40)) as llm:
        force_share(llm, share)
        monkeypatch.setattr(cpu_attention(llm).policy, "observe", seen.append)
        llm.generate(random_prompt(9 * BLOCK, VOCAB, 1), greedy(5), use_tqdm=False)
    assert len(seen) == 3 and all((step.cpu_bytes > 0) == (share > 0) for step in seen)


@pytest.mark.parametrize(
    ("given", "threads"), [(None, 6), ("3", 3), ("1", 1), ("0", None), ("-1", None), ("many", None), ("", None)]
)
def test_threads_leave_cores_to_the_process(given: str | None, threads: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(host_blocks.os, "sched_getaffinity", lambda _: set(range(8)))
    if given is not None:
        monkeypatch.setenv("NANOVLLM_CPU_ATTENTION_THREADS", given)
    if threads is None:
        with pytest.raises(ConfigError, match=r"NANOVLLM_CPU_ATTENTION_THREADS=.*must be a positive number of threads"):
            host_blocks.cpu_attention_threads()
    else:
        assert host_blocks.cpu_attention_threads() == threads


def test_one_thread_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert host_blocks.cpu_attention_threads() == 1


def replace_attend(patch: pytest.MonkeyPatch, owner: Any, attend: Callable[..., None]) -> None:
    """Replace the `attend` of the backend of chunked attention or of CPU attention."""

    class Replaced:
        name = "replaced"

    Replaced.attend = staticmethod(attend)  # type: ignore[attr-defined]
    patch.setattr(owner, "_backend", Replaced())
