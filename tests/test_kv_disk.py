"""KV blocks on disk: what a later engine finds has the same bits, and requests that load it keep nobody waiting."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ordering_check
import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import offloaded, random_prompt, watch_layerwise
from fast import fast_only
from kv_disk_helpers import (
    CHECKPOINT,
    PARAMS,
    PROMPT,
    VOCAB,
    WAYS,
    ask,
    engine,
    numbers,
    run,
    step_until_loading,
    stored_files,
    written_fixture,
)
from lora_helpers import make_adapter
from ordering_check import OrderingError
from test_ordering import order_calls, without_call
from waiting import eventually

import nanovllm
from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine import branch_points
from nanovllm.errors import EngineError
from nanovllm.features.kv_disk import files, kept_in
from nanovllm.features.kv_disk.identity import code_files, facts_of, library_versions
from nanovllm.features.kv_disk.part import StorePart
from nanovllm.kvcache import pools
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput

model = checkpoint_fixture(**CHECKPOINT)
written = written_fixture()


def test_a_later_engine_finds_the_prompt_whatever_its_blocks_and_budget(model: Path, tmp_path: Path) -> None:
    """Block sizes that are multiples of attention's tile: the order of sums is the same."""
    expected = numbers(run(model, None))
    for index, writing in enumerate(WAYS):
        directory = tmp_path / str(index)
        assert numbers(run(model, directory, **writing)) == expected
        for reading in (WAYS[(index + 1) % len(WAYS)], WAYS[(index + 3) % len(WAYS)]):
            found = run(model, directory, **reading)
            assert found.metrics.cached_tokens == found.metrics.cached_tokens_disk == 768
            assert numbers(found) == expected
    assert {path.stat().st_mode & 0o777 for path in stored_files(tmp_path / "0")} == {0o600}


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
            pools=SimpleNamespace(layout=MagicMock(groups=[]), resident=SimpleNamespace(dtype=torch.float16)),
            backend=SimpleNamespace(name="cuDNN on segments of 8,192 tokens, else Triton"),
        ),
        device=SimpleNamespace(torch_device=torch.device("cuda")),
        network=SimpleNamespace(),
        dtype=torch.float16,
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    facts = facts_of(EngineConfig(model=str(tmp_path)), described)  # type: ignore[arg-type]
    assert facts["libraries"] == (torch.version.cuda, library_versions())
    assert facts["attention"][0].startswith("cuDNN"), "bits depend on the library"


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

    def run_with(adapter: LoRARequest, directory: Path | None) -> RequestOutput:
        with engine(tmp_path / "model", directory, enable_lora=True) as llm:
            return llm.generate(PROMPT, PARAMS, lora_request=adapter, use_tqdm=False)[0]

    for adapter in adapters:  # both have the number 1 in their engine
        for stored in (0, 768):
            found = run_with(adapter, tmp_path / "kv")
            assert found.metrics.cached_tokens_disk == stored
            assert numbers(found) == numbers(run_with(adapter, None))


MODELS: dict[str, dict[str, Any]] = {
    "windows": {"family": "gemma3", "sliding_window": 150},
    "recurrent states": {"family": "qwen3_5"},
}


@pytest.mark.parametrize("ways", [(0, 0), (0, 3), (3, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_windows_and_recurrent_states(tmp_path: Path, name: str, ways: tuple[int, int]) -> None:
    make_checkpoint(tmp_path / "model", layers=4, max_positions=2048, **MODELS[name])
    expected = numbers(run(tmp_path / "model", None))
    for way, stored in zip(ways, (0, 768), strict=True):
        arguments = {**WAYS[way], "num_gpu_blocks": 3 * int(WAYS[way]["num_gpu_blocks"])}
        found = run(tmp_path / "model", tmp_path / "kv", **arguments)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (stored, expected)


def test_a_state_on_the_way_of_a_long_prompt_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a prompt that leaves it there, also with blocks whose hashes end where units do not."""
    monkeypatch.setattr(branch_points, "LEAST_INTERVAL", 768)
    make_checkpoint(tmp_path / "model", "qwen3_5", layers=4, max_positions=2048)
    first = random_prompt(1700, VOCAB, 1)
    second = {"prompt_token_ids": first[:1000] + random_prompt(100, VOCAB, 2)}
    arguments = {"kvcache_block_size": 96, "num_gpu_blocks": 60, "max_num_batched_tokens": 300}
    run(tmp_path / "model", tmp_path / "kv", first, **arguments)
    found = run(tmp_path / "model", tmp_path / "kv", second, **arguments)
    assert found.metrics.cached_tokens_disk == 768
    assert numbers(found) == numbers(run(tmp_path / "model", None, second, **arguments))


@pytest.mark.parametrize("family", fast_only(["qwen3_5"], ["qwen3", "qwen3_5"]))
@pytest.mark.parametrize("turns", fast_only([3], [3, 10]))
def test_a_conversation_computes_only_what_is_new(tmp_path: Path, family: str, turns: int) -> None:
    """Each turn in an engine of its own: it computes what was said since, and less than a unit more."""
    make_checkpoint(tmp_path / "model", family, layers=4, max_positions=2048)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    prompt = random_prompt(300, VOCAB, 1)
    new = len(prompt)
    for turn in range(turns):
        with engine(tmp_path / "model", tmp_path / "kv", max_num_batched_tokens=500) as llm:
            found = ask(llm, prompt, params)
        assert found.metrics.prefill_tokens <= new + 256
        assert turn == 0 or found.metrics.cached_tokens_disk > 0
        said = random_prompt(40, VOCAB, turn)
        new = len(said)
        prompt = [*prompt, *found.outputs[0].token_ids, *said]
    last = prompt[: -90 - len(said)]
    with engine(tmp_path / "model", None, max_num_batched_tokens=500) as llm:
        alone = ask(llm, last, params)
    assert alone.outputs[0].token_ids == found.outputs[0].token_ids


SMALL = {"kvcache_block_size": 16, "num_gpu_blocks": 240}
WRITERS: dict[str, dict[str, Any]] = {
    "in small chunks": {**SMALL, "max_num_batched_tokens": 100},
    "layer by layer": offloaded(16, 8, 240, max_num_batched_tokens=100),
}


@pytest.mark.parametrize("window, writer", fast_only([(9, "layer by layer")], product((9, 300), WRITERS)))
def test_what_a_window_has_released_is_not_needed(tmp_path: Path, window: int, writer: str) -> None:
    """The first blocks of a unit are released before the last ones are computed, of prompts and of outputs.

    What a record has before a window goes to no block when it is read.
    """
    make_checkpoint(tmp_path / "model", "gemma3", layers=4, max_positions=2048, sliding_window=window)
    prompt = PROMPT[:350]
    params = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    with engine(tmp_path / "model", tmp_path / "kv", **WRITERS[writer]) as llm:
        layerwise = watch_layerwise(llm)
        answer = ask(llm, prompt, params).outputs[0].token_ids
    assert bool(layerwise) == (writer == "layer by layer")
    assert any("-from-" in path.name for path in stored_files(tmp_path / "kv")) == (window == 9)
    for longer, stored in ((prompt, 256), ([*prompt, *answer, 5, 6], 512)):
        expected = numbers(run(tmp_path / "model", None, longer, **SMALL))
        for reading in (SMALL, offloaded(16, 8, 240)):
            found = run(tmp_path / "model", tmp_path / "kv", longer, **reading)
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
    others = threading.enumerate()
    with engine(model, tmp_path) as llm:
        ask(llm)
        new = (thread for thread in threading.enumerate() if thread not in others)
        (writer,) = (thread for thread in new if thread.name == "kv-disk-writer")
        assert eventually(lambda: os.getpriority(os.PRIO_PROCESS, writer.native_id or 0) == 19)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_two_engines_share_a_directory(model: Path, tmp_path: Path) -> None:
    """The second finds what the first writes while both run."""
    prompts = [random_prompt(600, VOCAB, seed) for seed in (5, 6)]
    with engine(model, tmp_path) as one, engine(model, tmp_path) as other:
        first = [ask(one, prompts[0]), ask(other, prompts[1])]
        assert eventually(lambda: [kept.tokens for kept in kept_in(tmp_path)] == [2 * 512])
        second = [ask(other, prompts[0]), ask(one, prompts[1])]
    assert [each.metrics.cached_tokens_disk for each in second] == [512, 512]
    assert [numbers(each) for each in second] == [numbers(each) for each in first]


@pytest.fixture
def gate(written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets files be read once it is set; they are those of `written`, in tmp_path / "kv"."""
    shutil.copytree(written[0], tmp_path / "kv")
    gate = threading.Event()
    read = files.read

    def held(*arguments: Any) -> None:
        gate.wait()
        read(*arguments)

    monkeypatch.setattr(files, "read", held)
    yield gate
    gate.set()


@pytest.mark.parametrize("way", [0, 3])
def test_other_requests_run_while_one_loads(
    model: Path, written: tuple[Path, Any], tmp_path: Path, gate: threading.Event, way: int
) -> None:
    """A second request for the same blocks waits for the first one's."""
    arguments = {**WAYS[way], "num_gpu_blocks": 3 * int(WAYS[way]["num_gpu_blocks"])}
    llm = engine(model, tmp_path / "kv", **arguments)
    ended: dict[str, RequestOutput] = {}

    def run_until(name: str) -> None:
        while name not in ended:
            ended.update((output.request_id, output) for output in llm.engine.step() if output.finished)

    try:
        for name, prompt in (("stored", PROMPT), ("same", PROMPT), ("other", random_prompt(300, VOCAB, 9))):
            llm.engine.add_request(name, None, PARAMS, prompt)
        run_until("other")
        metrics = llm.metrics()
        assert (metrics.requests.loading, metrics.requests.waiting, list(ended)) == (1, 1, ["other"])
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
    """A new request does."""
    ended: dict[str, RequestOutput] = {}
    gate = threading.Event()
    look = StorePart._look

    def held(self: StorePart, *arguments: Any) -> None:
        assert gate.wait(60)
        look(self, *arguments)

    with engine(model, tmp_path) as llm:
        llm.engine.add_request("runs", None, SamplingParams(max_tokens=500, ignore_eos=True), [5, 6, 7])
        while not llm.engine.step():
            pass  # its own look is under way
        shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
        monkeypatch.setattr(StorePart, "_look", held)
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        for _ in range(3):
            assert [output.request_id for output in llm.engine.step()] == ["runs"]
        assert not gate.is_set() and llm.metrics().requests.waiting == 1
        gate.set()
        while "stored" not in ended:
            ended.update((output.request_id, output) for output in llm.engine.step() if output.finished)
    assert (ended["stored"].metrics.cached_tokens_disk, numbers(ended["stored"])) == (768, written[1])


def test_a_loading_request_is_aborted(
    model: Path, written: tuple[Path, Any], tmp_path: Path, gate: threading.Event
) -> None:
    """At once, also if the disk does not answer; its blocks are free, and it can be asked for again."""
    with engine(model, tmp_path / "kv") as llm:
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        step_until_loading(llm)
        output = llm.engine.abort_request("stored")
        assert output is not None and output.finished
        metrics = llm.metrics()
        assert (metrics.requests.loading, metrics.blocks.used) == (0, 0)
        gate.set()
        found = ask(llm)
    assert (found.metrics.cached_tokens_disk, numbers(found)) == (768, written[1])


def test_hits_are_counted_by_tier(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    prompts = [PROMPT, random_prompt(600, VOCAB, 8)]
    found = []
    with engine(model, tmp_path / "kv", **offloaded(128, 4, 20)) as llm:
        for prompt in (prompts[0], prompts[0], prompts[1], prompts[0]):
            found.append(ask(llm, prompt).metrics)
        totals = llm.metrics()
    by_tier = [(each.cached_tokens_device, each.cached_tokens_host, each.cached_tokens_disk) for each in found]
    assert by_tier[0] == (0, 0, 768) and by_tier[2] == (0, 0, 0) and by_tier[3][1] > by_tier[1][1] > 0
    assert all(sum(tiers) == each.cached_tokens for tiers, each in zip(by_tier, found, strict=True))
    counted = (totals.prefix_cache.hit_tokens_on_host, totals.prefix_cache.hit_tokens_on_disk)
    assert counted == (sum(host for _, host, _ in by_tier), 768)


def reading_again(model: Path, directory: Path, way: int) -> RequestOutput:
    """A short prompt is written, forgotten, and read into blocks that others had meanwhile."""
    prompts = [random_prompt(300, VOCAB, seed) for seed in (1, 2, 3)]
    with engine(model, directory, **{**WAYS[way], "num_gpu_blocks": 5}) as llm:
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert eventually(lambda: len(stored_files(directory)) == 3)
        llm.reset_prefix_cache()
        found = ask(llm, prompts[0])
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
