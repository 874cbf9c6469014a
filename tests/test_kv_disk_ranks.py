"""KV blocks on disk of several ranks: each has its part, a hit is what all have, and trouble in one is a miss."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import random_prompt
from fast import fast_only
from lora_helpers import make_adapter
from rank_processes import kept_rank_processes
from test_kv_disk import PARAMS, PROMPT, RESIDENT, VOCAB, WAYS, numbers, unanswered
from waiting import eventually

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli.main import main
from nanovllm.data.kv_groups import KVGroup, KVGroups
from nanovllm.errors import EngineError
from nanovllm.features.kv_disk import kept_in, under_way, verify
from nanovllm.features.kv_disk.messages import OPENING, Begin, CancelAll, Described, Ended, Found, Report
from nanovllm.features.kv_disk.store import DiskStore
from nanovllm.features.kv_disk.under_way import UnderWay
from nanovllm.outputs import RequestOutput


@pytest.fixture(scope="module", autouse=True)
def rank_processes() -> Iterator[None]:
    with kept_rank_processes():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv-disk-ranks") / "model"
    make_checkpoint(path, seed=3, kv_heads=2, heads=4, max_positions=2048)
    return path


def engine(model: Path, directory: Path | None, ranks: int = 2, **arguments: Any) -> LLM:
    given = {"dtype": "float32", "device": "cpu", **RESIDENT, **arguments}
    return LLM(model, tensor_parallel_size=ranks, kv_cache_dir=directory, **given)


def ask(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> RequestOutput:
    return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def run(model: Path, directory: Path | None, ranks: int = 2, **arguments: Any) -> tuple[int, Any]:
    """Tokens read from disk, and the answer, of an engine of its own."""
    with engine(model, directory, ranks, **arguments) as llm:
        found = ask(llm)
    return found.metrics.cached_tokens_disk, numbers(found)


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with the prompt of two ranks, and its answer without a directory."""
    directory = tmp_path_factory.mktemp("written")
    expected = run(model, None)[1]
    assert run(model, directory) == (0, expected)
    return directory, expected


def of_rank(directory: Path, rank: int, ranks: int = 2) -> Path:
    """The only segment of a rank."""
    (path,) = (each.path for each in kept_in(directory) if (each.rank, each.ranks) == (rank, ranks))
    (segment,) = path.glob("*.kv")
    return segment


# ---- what is found


def test_each_rank_reads_its_part_and_other_numbers_of_ranks_have_their_own(
    model: Path, written: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    assert run(model, tmp_path / "kv", **WAYS[1]) == (768, written[1])
    alone = run(model, None, 1)[1]
    for stored in (0, 768):
        assert run(model, tmp_path / "kv", 1) == (stored, alone)
    assert run(model, tmp_path / "kv") == (768, written[1])
    kept = verify(tmp_path / "kv")
    assert sorted((each.rank, each.ranks, each.tokens, each.damaged) for each in kept) == [
        (0, 1, 768, 0),
        (0, 2, 768, 0),
        (1, 2, 768, 0),
    ]
    assert main(["cache", "ls", str(tmp_path / "kv")]) == 0
    assert capsys.readouterr().out.count(", rank 1 of 2: 768 tokens") == 1


MODELS: dict[str, dict[str, Any]] = {
    "unequal ranks": {"family": "llama", "kv_heads": 3, "heads": 6, "hidden": 96},
    "one KV head on both ranks": {"family": "qwen3", "kv_heads": 1},
    "windows": {"family": "gemma3", "layers": 4, "sliding_window": 150, "kv_heads": 1},
    "recurrent layers": {"family": "qwen3_5", "layers": 4, "kv_heads": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ways", [(0, 0), (0, 3), (3, 1)])
def test_models_resident_and_offloaded(tmp_path: Path, name: str, ways: tuple[int, int]) -> None:
    make_checkpoint(tmp_path / "model", max_positions=2048, **MODELS[name])
    expected = run(tmp_path / "model", None)[1]
    for way, stored in zip(ways, (0, 768), strict=True):
        arguments = {**WAYS[way], "num_gpu_blocks": 3 * int(WAYS[way]["num_gpu_blocks"])}
        assert run(tmp_path / "model", tmp_path / "kv", **arguments) == (stored, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_8_bit_kv_and_adapters(tmp_path: Path, ranks: int) -> None:
    built = make_checkpoint(
        tmp_path / "model", "llama", hidden=192, heads=6, head_dim=16, kv_heads=3, max_positions=2048
    )
    adapter = make_adapter(tmp_path / "adapter", built, 1)
    arguments = {"enable_lora": True, "kv_cache_dtype": "int8"}
    answers = []
    for directory in (None, tmp_path / "kv", tmp_path / "kv"):
        with engine(tmp_path / "model", directory, ranks, **arguments) as llm:
            given = [{"prompt_token_ids": PROMPT}] * 2
            found = llm.generate(given, PARAMS, lora_request=[adapter, None], use_tqdm=False)
        answers.append([numbers(each) for each in found])
    assert answers[0] == answers[1] == answers[2] and answers[0][0] != answers[0][1]
    assert [each.metrics.cached_tokens_disk for each in found] == [768, 768]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_conversation_computes_only_what_is_new(tmp_path: Path, family: str) -> None:
    """With recurrent layers it goes on at the last state of the output, which each rank has held until the end."""
    make_checkpoint(tmp_path / "model", family, layers=4, kv_heads=1, max_positions=2048)
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=3)
    prompt = random_prompt(300, VOCAB, 1)
    new = len(prompt)
    for turn in range(4):
        with engine(tmp_path / "model", tmp_path / "kv", max_num_batched_tokens=500) as llm:
            found = ask(llm, prompt, params)
        assert found.metrics.prefill_tokens <= new + 256
        assert turn == 0 or found.metrics.cached_tokens_disk > 0
        last, said = prompt, random_prompt(40, VOCAB, turn)
        new, prompt = len(said), [*prompt, *found.outputs[0].token_ids, *said]
    with engine(tmp_path / "model", None, max_num_batched_tokens=500) as llm:
        assert numbers(ask(llm, last, params)) == numbers(found)


# ---- what goes wrong in one rank


@pytest.mark.parametrize("change", fast_only(["flip"], ["flip", "cut", "delete", "other"]))
def test_a_damaged_part_is_a_miss_for_all_ranks(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    """A record of a rank, all from one on, all of them, or another rank's, which has the same tokens, in its place."""
    shutil.copytree(written[0], tmp_path / "kv")
    segment = of_rank(tmp_path / "kv", 1)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    if change == "flip":
        segment.write_bytes(content)
    elif change == "cut":
        segment.write_bytes(content[: len(content) // 2])
    elif change == "delete":
        segment.unlink()
    else:
        shutil.copy(of_rank(tmp_path / "kv", 0), segment)
    stored = {"flip": 256, "cut": 256, "delete": 0, "other": 0}[change]
    assert run(model, tmp_path / "kv") == (stored, written[1])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (1 if change == "flip" else 0)
    assert run(model, tmp_path / "kv") == (768, written[1])


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_disk_that_does_not_answer_one_rank(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_aborted: bool,
) -> None:
    """A request that waits for it is aborted at once, and others run in its blocks. Later ones are computed."""
    shutil.copytree(written[0], tmp_path / "kv")
    with engine(model, tmp_path / "kv", num_gpu_blocks=8) as llm, unanswered(of_rank(tmp_path / "kv", 1)):
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        assert llm.engine.step() == [] and llm.metrics().loading_requests == 1
        monkeypatch.setattr(under_way, "PATIENCE_SECONDS", 0.05)
        if is_aborted:
            output = llm.engine.abort_request("stored")
            assert output is not None and output.finished
            assert (llm.metrics().loading_requests, llm.metrics().used_blocks) == (0, 0)
            other = ask(llm, random_prompt(600, VOCAB, 5))
            llm.reset_prefix_cache()
            assert numbers(ask(llm, random_prompt(600, VOCAB, 5))) == numbers(other)
        else:
            (found,) = (output for _ in range(1000) for output in llm.engine.step() if output.finished)
            assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
            llm.reset_prefix_cache()
        found = ask(llm)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if is_aborted else 1), warnings
    monkeypatch.undo()
    assert run(model, tmp_path / "kv") == (768, written[1])


@pytest.mark.slow
def test_a_disk_that_does_not_answer_at_the_start_is_not_used(
    model: Path, written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    shutil.copytree(written[0], tmp_path / "kv")
    monkeypatch.setattr(under_way, "PATIENCE_SECONDS", 2.0)
    with unanswered(of_rank(tmp_path / "kv", 1)):
        assert run(model, tmp_path / "kv") == (0, written[1])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "is not used: the disk has not answered for" in warning


@pytest.mark.slow
def test_a_directory_that_vanishes(
    model: Path, written: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, tmp_path / "kv") as llm:
        shutil.rmtree(tmp_path / "kv")
        assert numbers(ask(llm)) == written[1]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_an_interrupted_step_leaves_the_store_usable(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    """What parts are told meanwhile reaches them after it: the first rank waits for what a logits processor says."""
    shutil.copytree(written[0], tmp_path / "kv")
    params = replace(PARAMS, logits_processors=[lambda output_ids, logits: logits])

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with engine(model, tmp_path / "kv") as llm:
        llm.watch_steps(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, random_prompt(600, VOCAB, 5), params)
        llm.watch_steps(None)
        found = ask(llm)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (768, written[1])


@pytest.mark.slow
@pytest.mark.parametrize("is_loading", [False, True])
def test_a_rank_that_dies_ends_the_engine(
    model: Path, written: tuple[Path, Any], tmp_path: Path, is_loading: bool
) -> None:
    """Also while only the store waits for it. The directory stays usable. The ranks' processes end with it."""
    shutil.copytree(written[0], tmp_path / "kv")
    llm = engine(model, tmp_path / "kv")
    ranks = llm.engine.executor._ranks  # type: ignore[attr-defined]
    with unanswered(of_rank(tmp_path / "kv", 1)):
        if is_loading:
            llm.engine.add_request("stored", None, PARAMS, PROMPT)
            assert llm.engine.step() == [] and llm.metrics().loading_requests == 1
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            while True:
                ask(llm) if not is_loading else llm.engine.step()
    assert eventually(lambda: not any(Path(f"/proc/{rank.process.pid}").exists() for rank in ranks))
    llm.close()
    assert run(model, tmp_path / "kv") == (768, written[1])


# ---- the engine's half alone


class ToldParts:
    """Implements `store.Parts`: keeps the commands, and reports what it is given."""

    num_parts = 2

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.coming: list[tuple[int, Report]] = []

    def tell(self, command: Any) -> None:
        self.told.append(command)
        if isinstance(command, Begin):
            self.coming += [(part, Ended(command.work)) for part in (0, 1)]

    def reports(self, seconds: float) -> Iterator[tuple[int, Report]]:
        while self.coming:
            yield self.coming.pop(0)


def test_the_oldest_work_of_a_part_must_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(under_way.time, "monotonic", lambda: now)
    work = UnderWay(2)
    for number in (1, 2):
        work.begin(number)
    now = 9.0
    work.progressed(0, 1)
    assert not work.is_stuck
    now = 11.0
    assert work.is_stuck  # part 1
    work.ended(1, 1)
    assert not work.is_stuck and 1 in work  # its second work could not begin before
    now = 20.0
    assert work.is_stuck  # part 0
    for part in (0, 1):
        for number in (1, 2):
            work.ended(part, number)
    work.progressed(1, 2)  # said by another thread, too late
    now = 99.0
    assert not work.is_stuck and 2 not in work


def test_every_part_must_have_a_record() -> None:
    parts = ToldParts()
    store = DiskStore(parts, KVGroups((KVGroup(None, 128, (0,)),), planes=1))
    for part in (0, 1):
        parts.coming += [(part, Described(bytes([part]), None, [10], 0)), (part, Ended(OPENING))]
    assert store.open() is None
    names = [(bytes([number]), 0) for number in range(3)]
    parts.coming = [(0, Found(names)), (1, Found(names[:2]))]
    store.hear()
    assert [store._is_everywhere(name) for name in names] == [True, True, False]
    parts.coming = [(0, Found(gone=names[:1])), (1, Found(gone=names[2:])), (1, Found(names[1:]))]
    store.hear()
    assert [store._is_everywhere(name) for name in names] == [False, True, True]
    work = store._new_work()
    assert store.is_under_way(work)
    store.cancel_all()  # after an interrupt, which may have come before every part was told its work
    assert not store.is_under_way(work) and isinstance(parts.told[-1], CancelAll)
