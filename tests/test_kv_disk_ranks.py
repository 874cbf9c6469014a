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
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import random_prompt
from fast import fast_only
from kv_disk_helpers import (
    CHECKPOINT,
    PARAMS,
    PROMPT,
    VOCAB,
    WAYS,
    ask,
    finished_next,
    numbers,
    step_until_loading,
    stored_files,
    unanswered,
)
from kv_disk_helpers import engine as one_engine
from lora_helpers import make_adapter
from rank_processes import kept_rank_processes
from waiting import eventually

from nanovllm import LLM
from nanovllm.apps.cli.main import main
from nanovllm.errors import EngineError
from nanovllm.features.kv_disk import kept_in
from nanovllm.features.kv_disk import store as store_module


@pytest.fixture(scope="module", autouse=True)
def rank_processes() -> Iterator[None]:
    with kept_rank_processes():
        yield


model = checkpoint_fixture(**CHECKPOINT, kv_heads=2, heads=4)


def engine(model: Path, directory: Path | None, ranks: int = 2, **arguments: Any) -> LLM:
    return one_engine(model, directory, tensor_parallel_size=ranks, **arguments)


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


def of_rank(directory: Path, rank: int) -> list[Path]:
    """The files of a rank."""
    return [path for path in stored_files(directory) if path.stem.endswith(f"-{rank}")]


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
    kept = kept_in(tmp_path / "kv", verify=True)
    assert [(model.tokens, model.damaged) for model in kept] == [(768, 0)] * 2
    assert main(["cache", "ls", str(tmp_path / "kv")]) == 0
    assert capsys.readouterr().out.count(": 768 tokens") == 2


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


# ---- what goes wrong in one rank


@pytest.mark.parametrize("change", fast_only(["flip"], ["flip", "delete", "other"]))
def test_a_damaged_part_is_a_miss_for_all_ranks(
    model: Path,
    written: tuple[Path, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    """A file of a rank, or another rank's, which has the same tokens, in its place."""
    shutil.copytree(written[0], tmp_path / "kv")
    path = of_rank(tmp_path / "kv", 1)[0]
    content = bytearray(path.read_bytes())
    if change == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif change == "delete":
        path.unlink()
    else:
        shutil.copy(path.with_name(path.name.replace("-1.kv", "-0.kv")), path)
    stored, answer = run(model, tmp_path / "kv")
    assert stored in (0, 256, 512) and answer == written[1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if change == "delete" else 1)
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
    with (
        monkeypatch.context() as patience,
        engine(model, tmp_path / "kv", num_gpu_blocks=8) as llm,
        unanswered(of_rank(tmp_path / "kv", 1)[0]),
    ):
        llm.engine.add_request("stored", None, PARAMS, PROMPT)
        step_until_loading(llm)
        patience.setattr(store_module, "LATE_SECONDS", 0.05)
        if is_aborted:
            output = llm.engine.abort_request("stored")
            assert output is not None and output.finished
            assert (llm.metrics().requests.loading, llm.metrics().blocks.used) == (0, 0)
            other = ask(llm, random_prompt(600, VOCAB, 5))
            llm.reset_prefix_cache()
            assert numbers(ask(llm, random_prompt(600, VOCAB, 5))) == numbers(other)
        else:
            found = finished_next(llm)
            assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
            llm.reset_prefix_cache()
        found = ask(llm)
        assert (found.metrics.cached_tokens_disk, numbers(found)) == (0, written[1])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if is_aborted else 1), warnings
    assert run(model, tmp_path / "kv") == (768, written[1])


def test_an_interrupted_step_leaves_the_store_usable(model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    """What the parts are told comes after the step, in which the first rank waits for a logits processor."""
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
    with unanswered(of_rank(tmp_path / "kv", 1)[0]):
        if is_loading:
            llm.engine.add_request("stored", None, PARAMS, PROMPT)
            step_until_loading(llm)
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            while True:
                ask(llm) if not is_loading else llm.engine.step()
    assert eventually(lambda: not any(Path(f"/proc/{rank.process.pid}").exists() for rank in ranks))
    llm.close()
    assert run(model, tmp_path / "kv") == (768, written[1])
