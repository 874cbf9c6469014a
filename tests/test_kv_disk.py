"""KV blocks on disk: what a later engine finds has the same bits, and whatever happens to the files is a miss."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ordering_check
import pytest
import torch
from checkpoints import make_checkpoint
from engines import offloaded, random_prompt, watch_layerwise
from fast import fast_only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_helpers import make_adapter
from ordering_check import OrderingError
from test_ordering import order_calls, without_call

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli.main import main
from nanovllm.config import EngineConfig
from nanovllm.engine import state_manager
from nanovllm.errors import EngineError
from nanovllm.features.kv_disk import engine, kept_in, loading, part, store, under_way, verify
from nanovllm.features.kv_disk import segments as segments_module
from nanovllm.features.kv_disk import writing as writing_module
from nanovllm.features.kv_disk.engine import library_versions
from nanovllm.features.kv_disk.identity import FileDigests, code_files
from nanovllm.features.kv_disk.inspect import ABOUT, DIGESTS
from nanovllm.features.kv_disk.policy import TRY_AGAIN, ReadOrCompute
from nanovllm.features.kv_disk.segments import SegmentReader, SegmentWriter
from nanovllm.features.kv_disk.store import DiskStore
from nanovllm.features.kv_disk.writing import WriterThread
from nanovllm.features.lora.request import LoRARequest
from nanovllm.kvcache import pools
from nanovllm.outputs import RequestOutput

VOCAB = 199
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)
PROMPT = random_prompt(850, VOCAB, 1)
RESIDENT = {"kvcache_block_size": 128, "num_gpu_blocks": 30}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv-disk") / "model"
    make_checkpoint(path, seed=3, max_positions=2048)
    return path


def run(model: Path, directory: Path | None, prompt: Any = None, **arguments: Any) -> RequestOutput:
    """The answer of an engine of its own."""
    llm = LLM(model, **{"dtype": "float32", "device": "cpu", **RESIDENT, **arguments}, kv_cache_dir=directory)
    try:
        given = {"prompt_token_ids": PROMPT} if prompt is None else prompt
        return llm.generate([given], PARAMS, use_tqdm=False)[0]
    finally:
        llm.close()


def numbers(output: RequestOutput) -> Any:
    found = output.outputs[0]
    return found.token_ids, [{token: each.logprob for token, each in row.items()} for row in found.logprobs or ()]


WAYS: list[dict[str, Any]] = [
    RESIDENT,
    {"kvcache_block_size": 384, "num_gpu_blocks": 12, "max_num_batched_tokens": 100},
    {"num_gpu_blocks": 8},
    offloaded(128, 4, 20, max_num_batched_tokens=200),
    offloaded(512, 3, 6),
]


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))


def test_a_later_engine_finds_the_prompt_whatever_its_blocks_and_budget(model: Path, tmp_path: Path) -> None:
    """Block sizes that are multiples of attention's tile: the order of sums is the same."""
    expected = numbers(run(model, None))
    for index, writing in enumerate(WAYS):
        directory = tmp_path / str(index)
        assert numbers(run(model, directory, **writing)) == expected
        for reading in WAYS:
            found = run(model, directory, **reading)
            assert found.metrics.cached_tokens == found.metrics.cached_tokens_disk == 768
            assert numbers(found) == expected
    assert {path.stat().st_mode & 0o777 for path in segments(tmp_path / "0")} == {0o600}


@pytest.mark.parametrize("others", [{"kv_cache_dtype": "int8"}, {"kvcache_block_size": 16, "num_gpu_blocks": 100}])
def test_what_decides_bits_is_in_the_key(model: Path, tmp_path: Path, others: dict[str, Any]) -> None:
    run(model, tmp_path)
    expected = numbers(run(model, None, **others))
    for stored in (0, 768):
        found = run(model, tmp_path, **others)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


def test_the_engines_code_is_in_the_key(tmp_path: Path) -> None:
    """All of it: what reads the weights decides their bits as what multiplies them does. Tables of kernels too."""
    package = Path(nanovllm.__file__).parent
    rooms = {path.relative_to(package).parts[0] for path in code_files()}
    assert rooms >= {"formats", "models", "layers", "ops", "engine", "memory", "data", "build.py"}
    assert "apps" not in rooms
    names = ["apps/cards.json", "apps/run.py", "ops/kernels.so", "ops/tuned/some-gpu.json", "ops/rows.py", "py.typed"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in code_files(tmp_path)]
    assert found == ["ops/kernels.so", "ops/rows.py", "ops/tuned/some-gpu.json"]


def test_libraries_of_a_gpu_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles the engine's kernels: another version may order their sums otherwise. A module's package may
    have another name.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert library_versions() == []
    for package, module, number in (("triton", "triton", "3.6"), ("flash-attn-3", "flash_attn_interface", "3.0")):
        info = tmp_path / f"{package.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
        (info / "top_level.txt").write_text(module)
    assert library_versions() == [("flash-attn-3", "3.0"), ("triton", "3.6")]
    described = SimpleNamespace(
        kv_cache=SimpleNamespace(
            pools=SimpleNamespace(layout=MagicMock(groups=[]), resident=SimpleNamespace(dtype=torch.float16))
        ),
        device=SimpleNamespace(torch_device=torch.device("cuda")),
        spec=SimpleNamespace(hardest_head_dim=64),
        dtype=torch.float16,
    )
    monkeypatch.setattr(engine, "select_backend", lambda *_: SimpleNamespace(name="Triton"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    facts = engine._facts(EngineConfig(model=str(tmp_path)), described)  # type: ignore[arg-type]
    assert facts["libraries"] == (torch.version.cuda, library_versions())


def test_another_model_of_the_same_shape_finds_nothing(model: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", seed=4, max_positions=2048)
    run(model, tmp_path / "kv")
    found = run(tmp_path / "other", tmp_path / "kv")
    assert found.metrics.cached_tokens == 0 and numbers(found) == numbers(run(tmp_path / "other", None))


def test_the_salt_is_in_the_key_and_a_shared_start_is_found(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path)
    salted = {"prompt_token_ids": PROMPT, "cache_salt": "mine"}
    longer = {"prompt_token_ids": PROMPT[:600] + random_prompt(300, VOCAB, 2)}
    for prompt, stored in ((salted, 0), (salted, 768), (longer, 512), (longer, 768)):
        found = run(model, tmp_path, prompt)
        assert found.metrics.cached_tokens_disk == stored
        assert numbers(found) == numbers(run(model, None, prompt))


def test_an_adapter_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    built = make_checkpoint(tmp_path / "model", seed=3, max_positions=2048)
    for index in (1, 2):
        make_adapter(tmp_path / f"a{index}", built, seed=index)
    adapters = [LoRARequest("mine", 1, f"~/a{index}") for index in (1, 2)]

    def ask(directory: Path | None, adapter: LoRARequest) -> RequestOutput:
        llm = LLM(
            tmp_path / "model", dtype="float32", device="cpu", enable_lora=True, kv_cache_dir=directory, **RESIDENT
        )
        try:
            return llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, lora_request=adapter, use_tqdm=False)[0]
        finally:
            llm.close()

    for adapter in adapters:  # both have the number 1 in their engine
        for stored in (0, 768):
            found = ask(tmp_path / "kv", adapter)
            assert found.metrics.cached_tokens_disk == stored
            assert numbers(found) == numbers(ask(None, adapter))


@pytest.mark.parametrize("ways", [(0, 0), (0, 3), (3, 1)])
def test_windows(tmp_path: Path, ways: tuple[int, int]) -> None:
    make_checkpoint(tmp_path / "model", "gemma3", layers=4, max_positions=2048, sliding_window=150)
    expected = numbers(run(tmp_path / "model", None))
    for way, stored in zip(ways, (0, 768), strict=True):
        arguments = {**WAYS[way], "num_gpu_blocks": 3 * int(WAYS[way]["num_gpu_blocks"])}
        found = run(tmp_path / "model", tmp_path / "kv", **arguments)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


@pytest.mark.parametrize("ways", [(0, 0), (0, 3), (3, 1)])
def test_recurrent_states(tmp_path: Path, ways: tuple[int, int]) -> None:
    make_checkpoint(tmp_path / "model", "qwen3_5", layers=4, max_positions=2048)
    expected = numbers(run(tmp_path / "model", None))
    for way, stored in zip(ways, (0, 768), strict=True):
        found = run(tmp_path / "model", tmp_path / "kv", **WAYS[way])
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


def test_a_state_on_the_way_of_a_long_prompt_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a prompt that leaves it there, also with blocks whose hashes end where units do not."""
    monkeypatch.setattr(state_manager, "LEAST_SNAPSHOT_INTERVAL", 768)
    make_checkpoint(tmp_path / "model", "qwen3_5", layers=4, max_positions=2048)
    first = random_prompt(1700, VOCAB, 1)
    second = {"prompt_token_ids": first[:1000] + random_prompt(100, VOCAB, 2)}
    arguments = {"kvcache_block_size": 96, "num_gpu_blocks": 60, "max_num_batched_tokens": 300}
    run(tmp_path / "model", tmp_path / "kv", {"prompt_token_ids": first}, **arguments)
    found = run(tmp_path / "model", tmp_path / "kv", second, **arguments)
    assert found.metrics.cached_tokens_disk == 768
    assert numbers(found) == numbers(run(tmp_path / "model", None, second, **arguments))


@pytest.mark.parametrize("family", fast_only(["qwen3_5"], ["qwen3", "qwen3_5"]))
@pytest.mark.parametrize("turns", fast_only([4], [4, 10]))
def test_a_conversation_computes_only_what_is_new(tmp_path: Path, family: str, turns: int) -> None:
    """Each turn in an engine of its own: it computes what was said since, and less than a unit more."""
    make_checkpoint(tmp_path / "model", family, layers=4, max_positions=2048)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    prompt = random_prompt(300, VOCAB, 1)
    new = len(prompt)
    for turn in range(turns):
        arguments = {**RESIDENT, "kvcache_block_size": 128, "max_num_batched_tokens": 500}
        with LLM(tmp_path / "model", dtype="float32", kv_cache_dir=tmp_path / "kv", **arguments) as llm:
            found = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        assert found.metrics.prefill_tokens <= new + 256
        assert turn == 0 or found.metrics.cached_tokens_disk > 0
        said = random_prompt(40, VOCAB, turn)
        new, prompt = len(said), [*prompt, *found.outputs[0].token_ids, *said]
    last = prompt[: -90 - len(said)]
    with LLM(tmp_path / "model", dtype="float32", **arguments) as llm:
        alone = llm.generate([{"prompt_token_ids": last}], params, use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == found.outputs[0].token_ids


def test_a_window_that_begins_within_a_record(tmp_path: Path) -> None:
    """What the record has before it goes to no block: not to the last one on the device, which another group has."""
    make_checkpoint(tmp_path / "model", "gemma3", layers=4, max_positions=2048, sliding_window=9)
    expected = numbers(run(tmp_path / "model", None, kvcache_block_size=16, num_gpu_blocks=200))
    for arguments, stored in (({"kvcache_block_size": 16, "num_gpu_blocks": 200}, 0), (offloaded(16, 8, 200), 768)):
        found = run(tmp_path / "model", tmp_path / "kv", **arguments)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


SMALL = {"kvcache_block_size": 16, "num_gpu_blocks": 240}
WRITERS: dict[str, dict[str, Any]] = {
    "in small chunks": {**SMALL, "max_num_batched_tokens": 100},
    "layer by layer": offloaded(16, 8, 240, max_num_batched_tokens=100),
}


@pytest.mark.parametrize(
    "window, writer", fast_only([(9, "in small chunks"), (300, "layer by layer")], product((9, 300), WRITERS))
)
def test_what_a_window_has_released_is_not_needed(tmp_path: Path, window: int, writer: str) -> None:
    """The first blocks of a unit are released before the last ones are computed, of prompts and of outputs."""
    make_checkpoint(tmp_path / "model", "gemma3", layers=4, max_positions=2048, sliding_window=window)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with LLM(tmp_path / "model", dtype="float32", kv_cache_dir=tmp_path / "kv", **WRITERS[writer]) as llm:
        layerwise = watch_layerwise(llm)
        answer = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids
    assert bool(layerwise) == (writer == "layer by layer")
    longer = {"prompt_token_ids": [*PROMPT, *answer, 5, 6]}
    for prompt, stored in ((None, 768), (longer, 1024)):
        expected = numbers(run(tmp_path / "model", None, prompt, **SMALL))
        for reading in (SMALL, offloaded(16, 8, 240)):
            found = run(tmp_path / "model", tmp_path / "kv", prompt, **reading)
            assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


def test_larger_blocks_do_not_read_what_a_window_has_released(tmp_path: Path) -> None:
    """A block of 384 begins earlier than what a window keeps in blocks of 128; they store it again."""
    make_checkpoint(tmp_path / "model", "gemma3", layers=4, max_positions=2048, sliding_window=9)
    reading = {"kvcache_block_size": 384, "num_gpu_blocks": 30}
    expected = numbers(run(tmp_path / "model", None, **reading))
    run(tmp_path / "model", tmp_path / "kv", num_gpu_blocks=60, max_num_batched_tokens=100)
    for stored in (512, 768):
        found = run(tmp_path / "model", tmp_path / "kv", max_num_batched_tokens=100, **reading)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


def test_writing_yields_to_steps(model: Path, tmp_path: Path) -> None:
    """The writer takes the processor's time that steps leave: on a CPU these use all cores."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with LLM(model, dtype="float32", device="cpu", **RESIDENT, kv_cache_dir=tmp_path) as llm:
        llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
        (writer,) = (thread for thread in threading.enumerate() if thread.name == "kv-disk-writer")
        wait_for(lambda: os.getpriority(os.PRIO_PROCESS, writer.native_id or 0) == 19)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_two_engines_share_a_directory(model: Path, tmp_path: Path) -> None:
    """The second finds what the first writes while both run."""
    llms = [LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path, **RESIDENT) for _ in range(2)]
    prompts = [{"prompt_token_ids": random_prompt(600, VOCAB, seed)} for seed in (5, 6)]
    try:
        first = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for llm, prompt in zip(llms, prompts, strict=True)]
        wait_for(lambda: [each.tokens for each in kept_in(tmp_path)] == [2 * 512])
        second = [
            llm.generate([prompt], PARAMS, use_tqdm=False)[0]
            for llm, prompt in zip(llms, reversed(prompts), strict=True)
        ]
    finally:
        for llm in llms:
            llm.close()
    assert [each.metrics.cached_tokens_disk for each in second] == [512, 512]
    assert [numbers(each) for each in reversed(second)] == [numbers(each) for each in first]


@pytest.fixture
def gate(written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets records be read once it is set; they are those of `written`, in tmp_path / "kv"."""
    shutil.copytree(written[0], tmp_path / "kv")
    gate, read = threading.Event(), SegmentReader.read

    def held(self: SegmentReader, *arguments: Any) -> str | None:
        gate.wait()
        return read(self, *arguments)

    monkeypatch.setattr(SegmentReader, "read", held)
    yield gate
    gate.set()


@pytest.mark.parametrize("way", [0, 3])
def test_other_requests_run_while_one_loads(
    model: Path, written: tuple[Path, Any], tmp_path: Path, gate: threading.Event, way: int
) -> None:
    """A second request for the same blocks waits for the first one's."""
    arguments = {**WAYS[way], "num_gpu_blocks": 3 * int(WAYS[way]["num_gpu_blocks"])}
    llm = LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **arguments)
    ended: dict[str, RequestOutput] = {}

    def run_until(name: str) -> None:
        while name not in ended:
            ended.update((output.request_id, output) for output in llm.engine.step() if output.finished)

    try:
        for name, prompt in (("stored", PROMPT), ("same", PROMPT), ("other", random_prompt(300, VOCAB, 9))):
            llm.engine.add_request(name, None, PARAMS, prompt)
        run_until("other")
        metrics = llm.metrics()
        assert (metrics.loading_requests, metrics.waiting_requests, list(ended)) == (1, 1, ["other"])
        assert [view.request_id for view in llm.view().loading] == ["stored"]
        gate.set()
        run_until("same")
    finally:
        gate.set()
        llm.close()
    assert numbers(ended["stored"]) == numbers(ended["same"]) == written[1]
    assert ended["stored"].metrics.cached_tokens_disk == 768
    assert ended["same"].metrics.cached_tokens_disk == 0 < ended["same"].metrics.cached_tokens


def test_running_requests_do_not_wait_for_a_look_at_the_directory(
    model: Path, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new request does, for what others have written meanwhile."""
    monkeypatch.setattr(store, "SCAN_SECONDS", 60.0)
    ended: dict[str, RequestOutput] = {}
    gate, scan = threading.Event(), SegmentReader.scan

    def held(self: SegmentReader, *arguments: Any) -> Any:
        assert gate.wait(60)
        return scan(self, *arguments)

    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path, **RESIDENT) as llm:
        llm.engine.add_request("runs", None, SamplingParams(max_tokens=500, ignore_eos=True), [5, 6, 7])
        llm.engine.step()
        shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
        monkeypatch.setattr(SegmentReader, "scan", held)
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        for _ in range(3):
            assert [output.request_id for output in llm.engine.step()] == ["runs"]
        assert not gate.is_set() and llm.metrics().waiting_requests == 1
        gate.set()
        while "stored" not in ended:
            ended.update((output.request_id, output) for output in llm.engine.step() if output.finished)
    assert (ended["stored"].metrics.cached_tokens_disk, numbers(ended["stored"])) == (768, written[1])


def test_a_look_at_the_directory_does_not_wait_for_records_that_are_read(
    model: Path, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes while another one loads more records than there are threads."""
    monkeypatch.setattr(loading, "THREADS", 2)
    monkeypatch.setattr(store, "SCAN_SECONDS", 60.0)
    monkeypatch.setattr(under_way, "PATIENCE_SECONDS", 60.0)
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **RESIDENT) as llm:
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        llm.engine.step()
        llm.engine.add_request("other", None, PARAMS, random_prompt(300, VOCAB, 9))
        (found,) = (output for _ in range(60) for output in llm.engine.step() if output.finished)
        assert found.request_id == "other" and llm.metrics().loading_requests == 1
        gate.set()


def test_a_loading_request_is_aborted(
    model: Path, written: tuple[Path, Any], tmp_path: Path, gate: threading.Event
) -> None:
    """At once, also if the disk does not answer; its blocks are free, and it can be asked for again."""
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **RESIDENT) as llm:
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        assert llm.engine.step() == [] and llm.metrics().loading_requests == 1
        output = llm.engine.abort_request("stored")
        assert output is not None and output.finished
        metrics = llm.metrics()
        assert (metrics.loading_requests, metrics.used_blocks) == (0, 0)
        gate.set()
        found = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)[0]
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (768, written[1])


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true")


def test_what_is_computed_faster_is_not_read(
    model: Path, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rates that were measured; now and then it is read all the same, and both rates stay known."""
    choice = ReadOrCompute()
    assert choice.reads(1, 10**9), "nothing is known"
    choice.reading.add(100, 1.0)
    choice.prefill.add(50, 1.0)
    assert choice.reads(768, 1536) and not choice.reads(768, 1537)
    assert [choice.reads(768, 1537) for _ in range(TRY_AGAIN)].count(True) == 1
    for _ in range(20):  # faster by now
        choice.reading.add(400, 1.0)
    assert choice.reads(768, 4 * 1536 - 100)

    shutil.copytree(written[0], tmp_path / "kv")
    monkeypatch.setattr(DiskStore, "measured", lambda self, *_: self.choice.prefill.add(1e12, 1.0))
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **RESIDENT) as llm:
        found = []
        for _ in range(2):  # the rate of reading is known then, and that of prefill too
            found += llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
            llm.reset_prefix_cache()
        assert llm.metrics().prefix_cache_hit_tokens_on_disk == 768
    assert [each.metrics.cached_tokens_disk for each in found] == [768, 0]
    assert [numbers(each) for each in found] == [written[1]] * 2


def test_hits_are_counted_by_tier(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": random_prompt(600, VOCAB, 8)}]
    found = []
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **offloaded(128, 4, 20)) as llm:
        for prompt in (prompts[0], prompts[0], prompts[1], prompts[0]):
            found.append(llm.generate([prompt], PARAMS, use_tqdm=False)[0].metrics)
        totals = llm.metrics()
    by_tier = [(each.cached_tokens_device, each.cached_tokens_host, each.cached_tokens_disk) for each in found]
    assert by_tier[0] == (0, 0, 768) and by_tier[2] == (0, 0, 0) and by_tier[3][1] > by_tier[1][1] > 0
    assert all(sum(tiers) == each.cached_tokens for tiers, each in zip(by_tier, found, strict=True))
    counted = (totals.prefix_cache_hit_tokens_on_host, totals.prefix_cache_hit_tokens_on_disk)
    assert counted == (sum(host for _, host, _ in by_tier), 768)


def reading_again(model: Path, directory: Path, way: int) -> RequestOutput:
    """A short prompt is written, forgotten, and read into blocks that others had meanwhile."""
    prompts = [{"prompt_token_ids": random_prompt(300, VOCAB, seed)} for seed in (1, 2, 3)]
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=directory, **{**WAYS[way], "num_gpu_blocks": 5}) as llm:
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
        llm.reset_prefix_cache()
        found = llm.generate(prompts[:1], PARAMS, use_tqdm=False)[0]
    assert numbers(found) == numbers(expected[0])
    return found


@pytest.mark.parametrize("way", [0, 3])
def test_copies_are_ordered_with_the_work_of_steps(model: Path, tmp_path: Path, way: int) -> None:
    assert reading_again(model, tmp_path, way).metrics.cached_tokens_disk == 256


@pytest.mark.parametrize(("line", "column", "source"), order_calls(of_store=True), ids=lambda value: str(value))
def test_each_wait_of_the_copies_taken_out_is_noticed(
    model: Path, tmp_path: Path, line: int, column: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed: list[str] = []

    def notice(what: str) -> OrderingError:
        noticed.append(what)
        return OrderingError(what)

    monkeypatch.setattr(ordering_check, "OrderingError", notice)
    monkeypatch.setattr(pools, "TransferOrder", without_call(line, column).TransferOrder)
    with suppress(EngineError, OrderingError, AssertionError):  # or a reader's thread has noticed, and nothing is read
        reading_again(model, tmp_path, 3)
    assert noticed, source


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_misses(model: Path, written: tuple[Path, Any], data: st.DataObject) -> None:
    """A flipped bit, a cut, longer or deleted file: the same answer, and what is damaged is seen by `verify`."""
    source, expected = written
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "kv"
        shutil.copytree(source, directory)
        (path,) = segments(directory)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(("flip", "cut", "extend", "delete")))
        if change == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content[:at] if change == "cut" else content + content[:at] * (change == "extend"))
        if change == "delete":
            path.unlink()
        assert change != "flip" or any(each.damaged for each in verify(directory))
        for _ in range(2):
            assert numbers(run(model, directory)) == expected
        assert run(model, directory).metrics.cached_tokens_disk == 768


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with the prompt, and its answer."""
    directory = tmp_path_factory.mktemp("written")
    return directory, numbers(run(model, directory))


@pytest.mark.parametrize("call", ["writev", "open", "preadv", "pread"])
def test_failing_files_are_misses(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """A full or read-only disk, and one that cannot be read: said once."""
    source, expected = written
    shutil.copytree(source, tmp_path / "kv")
    if call in ("writev", "open"):
        for path in segments(tmp_path / "kv"):
            path.unlink()
    known = getattr(os, call)

    def fail(*arguments: Any) -> Any:
        if call == "open" and not str(arguments[0]).endswith(".kv"):
            return known(*arguments)
        code = errno.ENOSPC if call == "writev" else errno.EIO
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments_module.os, call, fail)
    found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, expected)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_read_only_file_system_is_read(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also by the first engine that finds the model at another path, and has to compute the digest of its files."""
    shutil.copytree(written[0], tmp_path / "kv")
    shutil.copytree(model, tmp_path / "model")
    opened, unlinked = os.open, Path.unlink

    def refuse(path: Any) -> None:
        if str(path).startswith(str(tmp_path / "kv")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_file(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return opened(path, flags, *arguments, **named)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        refuse(path)  # Linux says so before it looks for the file
        unlinked(path, missing_ok)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "unlink", unlink)
    for prompt, stored in ((None, 768), ({"prompt_token_ids": random_prompt(600, VOCAB, 4)}, 0)):
        found = run(tmp_path / "model", tmp_path / "kv", prompt)
        assert found.metrics.cached_tokens_disk == stored
        assert stored == 0 or numbers(found) == written[1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "nothing more is written" in warnings[0], warnings


def test_a_segment_that_cannot_be_read_hides_no_other(
    model: Path, written: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (segments(tmp_path / "kv")[0].parent / "0.kv").mkdir()
    found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (768, written[1])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "0.kv: Is a directory" in warning


def test_what_cannot_be_read_is_damaged_and_can_be_removed(
    written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (path,) = segments(tmp_path / "kv")
    pread, bad = os.pread, path.stat().st_size // 2  # a sector

    def read(fd: int, length: int, at: int) -> bytes:
        if at <= bad < at + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, at)

    monkeypatch.setattr(os, "pread", read)
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 1 and "damaged" in capsys.readouterr().out
    (kept,) = verify(tmp_path / "kv")
    assert kept.tokens == 256 and kept.damaged is not None and kept.damaged > kept.size // 2
    assert main(["cache", "rm", str(tmp_path / "kv")]) == 0 and not segments(tmp_path / "kv")


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(under_way, "PATIENCE_SECONDS", seconds)
    monkeypatch.setattr(part, "PULSE_SECONDS", seconds / 10)
    monkeypatch.setattr(loading, "CLOSE_SECONDS", seconds)
    monkeypatch.setattr(writing_module, "STALL_SECONDS", seconds)


@pytest.mark.parametrize("call", ["preadv", "open", "utime", "writev"])
def test_a_disk_that_does_not_answer_keeps_nobody_waiting(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """Its tokens are computed, after a while for a read, and the engine is closed while calls still hang."""
    shutil.copytree(written[0], tmp_path / "kv")
    known, answers = getattr(os, call), threading.Event()

    def hang(*arguments: Any, **options: Any) -> Any:
        if call != "open" or str(arguments[0]).endswith(".kv"):
            assert answers.wait(60)
        return known(*arguments, **options)

    found = []
    with LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **RESIDENT) as llm:
        set_patience(monkeypatch, 0.05)
        monkeypatch.setattr(segments_module.os, call, hang)
        for prompt in (PROMPT, random_prompt(600, VOCAB, 7), PROMPT[:300]):
            found += llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    answers.set()
    assert numbers(found[0]) == written[1]
    assert found[0].metrics.cached_tokens_disk == (0 if call in ("preadv", "open") else 768)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("has not answered" in each for each in warnings) == (call in ("preadv", "open"))


def test_work_that_ends_says_nothing_of_what_began_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call hangs in one thread, while others find that the disk answers."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    work = under_way.UnderWay(1)
    for number in range(1, 6):
        work.begin(number)
    now = 0.9 * under_way.PATIENCE_SECONDS
    work.ended(0, 1)  # the next one may have waited for it
    now *= 2
    assert not work.is_stuck
    for number in (3, 4):
        work.ended(0, number)
    now += 0.2 * under_way.PATIENCE_SECONDS
    assert work.is_stuck
    work.ended(0, 2)
    assert not work.is_stuck


@contextmanager
def unanswered(path: Path) -> Iterator[None]:
    """Who opens the file waits until the context ends: it is a pipe meanwhile."""
    aside = path.with_name("aside")
    path.rename(aside)
    os.mkfifo(path)
    try:
        yield
    finally:
        os.close(os.open(path, os.O_RDWR))
        aside.rename(path)


def test_a_disk_that_does_not_answer_at_the_start_is_not_used(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    with monkeypatch.context() as patch, unanswered(segments(tmp_path / "kv")[0]):
        set_patience(patch, 0.5)
        found = run(model, tmp_path / "kv")
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "is not used: the disk has not answered for" in warning
    assert run(model, tmp_path / "kv").metrics.cached_tokens_disk == 768


def test_a_directory_that_cannot_be_made_or_vanishes(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert numbers(run(model, tmp_path / "file" / "kv")) == written[1]
    llm = LLM(model, dtype="float32", device="cpu", kv_cache_dir=tmp_path / "kv", **RESIDENT)
    shutil.rmtree(tmp_path / "kv")
    try:
        found = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)[0]
    finally:
        llm.close()
    assert numbers(found) == written[1]


KILLED = """
import sys
from pathlib import Path
from engines import random_prompt
from nanovllm import LLM, SamplingParams
engine = {"dtype": "float32", "device": "cpu", "kvcache_block_size": 128, "num_gpu_blocks": 30}
llm = LLM(sys.argv[1], kv_cache_dir=sys.argv[2], **engine)
for seed in range(1, 1000):
    llm.generate([{"prompt_token_ids": random_prompt(850, 199, seed)}], SamplingParams(max_tokens=1), use_tqdm=False)
    print(seed, flush=True)
"""


@pytest.mark.parametrize("delay", fast_only([0.013], [0.0, 0.013, 0.11]))
def test_a_killed_process_leaves_what_can_be_used(
    model: Path, written: tuple[Path, Any], tmp_path: Path, delay: float
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        time.sleep(delay)
        process.kill()
    verify(tmp_path)
    for _ in range(2):
        found = run(model, tmp_path)
        assert numbers(found) == written[1]
    assert found.metrics.cached_tokens_disk == 768


@pytest.mark.parametrize("name", [ABOUT, DIGESTS])
def test_a_kill_while_a_small_file_is_written_leaves_no_part_of_it(tmp_path: Path, name: str) -> None:
    """Of a killed process a draft stays, until another one writes the file much later."""

    def write() -> None:
        if name == DIGESTS:
            FileDigests(tmp_path).of([Path(__file__)])
            return
        reader, failed = SegmentReader(tmp_path), list[Exception]()
        writer = WriterThread(
            SegmentWriter(tmp_path, 8000), reader, {"model": "m", "rank": 0, "ranks": 1}, lambda _: None, failed.append
        )
        writer.put((bytes(32), 0), torch.zeros(9, dtype=torch.uint8))
        assert writer.close() == 0 and not failed

    if (child := os.fork()) == 0:
        json.dump = lambda *_: os._exit(7)
        write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    drafts = [path for path in tmp_path.iterdir() if path.name.startswith(name)]
    assert len(drafts) == 1 and not (tmp_path / name).exists()
    os.utime(drafts[0], (0, 0))
    write()
    assert json.loads((tmp_path / name).read_text()) and not drafts[0].exists()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rounds"), [("kills", 10), ("mutations", 25)])
def test_random_trouble(model: Path, tmp_path: Path, what: str, rounds: int) -> None:
    """NANOVLLM_KV_DISK_ROUNDS: more of them. The script says what it does."""
    rounds = int(os.environ.get("NANOVLLM_KV_DISK_ROUNDS", rounds))
    script = Path(__file__).parent / "kv_disk_trouble.py"
    command = [sys.executable, str(script), what, str(model), str(tmp_path / "trouble"), str(rounds), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "all answers right" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_hash_seeds_and_clocks_differ(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    """Of processes, which find each other's records all the same; a clock may be years off."""
    code = KILLED.replace("range(1, 1000)", "(1,)").replace("    print(seed, flush=True)", "") + CLOCK
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    for seed, offset in (("1", "0"), ("2", "-400000000"), ("3", "400000000")):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "OFFSET": offset}
        command = [sys.executable, "-c", CLOCK_BEFORE + code, str(model), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == (0 if seed == "1" else 768)
    assert numbers(run(model, tmp_path)) == written[1]


CLOCK_BEFORE = """
import os, time
known = time.time_ns
time.time_ns = lambda: known() + int(os.environ["OFFSET"]) * 10**9
"""
CLOCK = """
print(llm.metrics().prefix_cache_hit_tokens_on_disk)
llm.close()
"""


def test_space_is_bounded_by_deleting_what_was_used_least_recently(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    writer, reader = SegmentWriter(directory, 8000), SegmentReader(directory)
    for number in range(40):
        assert writer.append((number.to_bytes(32, "little"), 0), bytes([number]) * 900) is not None
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 8000
        for path in segments(tmp_path):  # times of files may be coarse
            os.utime(path, ns=(int(path.name.split("-")[0]),) * 2)
    assert writer.append((bytes(32), 1), bytes(9000)) is None
    writer.close()
    reader.scan()
    kept = [number for number in range(40) if (number.to_bytes(32, "little"), 0) in reader]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) >= 6


def test_the_command_lists_verifies_and_removes(
    written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    (path,) = segments(tmp_path / "kv")
    assert main(["cache", "ls", str(tmp_path / "kv")]) == 0 and "768 tokens" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["cache", "verify", str(tmp_path / "kv")]) == 1 and "damaged" in capsys.readouterr().out
    assert main(["cache", "rm", str(tmp_path / "kv")]) == 0 and not segments(tmp_path / "kv")
    assert main(["cache", "ls", str(tmp_path / "nowhere")]) == 2
