"""`nanovllm batch` in one process: rows of files in, part files out, resumed where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, SMALL_CACHE, json_lines, make_model, write_jsonl

from nanovllm import LLM, SamplingParams
from nanovllm.apps.batch.replica import Replica
from nanovllm.apps.cli.main import main
from nanovllm.data.batch import Batch, StepResult
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import EngineError
from nanovllm.sampling_params import derived_seed

DOCUMENT = "The key is under the third stone, and the gate is green. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("batch") / "tiny")


def batch(model: str, source: str, output: Path, *options: str) -> int:
    command = ["batch", "--model", model, "--input", source, "--output", str(output), *SMALL_CACHE]
    return main([*command, *GREEDY, *options])


def results(output: Path) -> dict[int, dict[str, Any]]:
    """The rows of all parts, each of which has one result."""
    lines = [line for part in sorted(output.glob("part-*.jsonl")) for line in json_lines(part.read_text())]
    found = {line["row_index"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_rows_have_the_answers_of_generate(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = [{"role": "user", "content": "Where is the key?"}]
    rows: list[Any] = [
        {"id": "a", "prompt": f"{DOCUMENT} one", "note": {"kept": [1]}},
        {"id": "b", "prompt_token_ids": [5, 6, 7], "temperature": 1.0},
        {"id": "c", "messages": conversation, "n": 2, "temperature": 0.9, "logprobs": 1},
        b"{not JSON",
        {"id": "d", "prompt": "x" * 2000},
        {"custom_id": "e", "body": {"model": "tiny", "messages": conversation, "max_tokens": 4, "seed": 3}},
        {"id": "f", "prompt": f"{DOCUMENT} two", "temperature": 1.0, "error": "of an earlier run"},
        b"null",
    ]
    assert batch(model, write_jsonl(tmp_path / "data.jsonl", *rows), tmp_path / "out") == 1
    found = results(tmp_path / "out")
    assert sorted(found) == list(range(8)) and (tmp_path / "out" / "_SUCCESS").exists()

    with LLM(model, device="cpu", kvcache_block_size=16, num_gpu_blocks=80) as llm:
        common: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
        a, b, f = llm.generate(
            [f"{DOCUMENT} one", [5, 6, 7], f"{DOCUMENT} two"],
            [
                SamplingParams(temperature=t, seed=seed, **common)
                for t, seed in ((0, 0), (1, derived_seed(0, "prompt", 1)), (1, derived_seed(0, "prompt", 6)))
            ],
            use_tqdm=False,
        )
        c = llm.chat(
            conversation,
            SamplingParams(n=2, temperature=0.9, logprobs=1, seed=derived_seed(0, "prompt", 2), **common),
            False,
        )[0]
        e = llm.chat(conversation, SamplingParams(temperature=0, **(common | {"max_tokens": 4})), False)[0]
    for index, output in ((0, a), (1, b), (2, c), (5, e), (6, f)):
        assert found[index]["error"] is None and found[index]["generated_text"] == output.outputs[0].text
        assert [one["token_ids"] for one in found[index]["outputs"]] == [one.token_ids for one in output.outputs]
        assert found[index]["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert found[2]["outputs"][1]["logprobs"][0][0].keys() == {"token_id", "logprob", "rank", "decoded_token"}
    assert (
        found[0]["note"] == {"kept": [1]}
        and found[5]["custom_id"] == "e"
        and found[6]["input.error"] == "of an earlier run"
    )
    assert found[3]["line"] == "{not JSON" and found[3]["error"].startswith("data.jsonl line 4: it is not JSON")
    assert found[7]["error"] == "data.jsonl line 8: it must be a JSON object, got null"
    assert found[4]["id"] == "d" and "line 5: the prompt has 2000 tokens" in found[4]["error"]
    assert "3 of 8 rows failed; the first: data.jsonl line" in capsys.readouterr().err


def test_parquet_keeps_columns_and_types(model: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    import datetime

    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "question": pa.array(["one", "two", None, "four"]),
        "sampling_params": pa.array(
            [None, {"logprobs": 1}, None, {"logprobs": None}], pa.struct([("logprobs", pa.int8())])
        ),
        "logit_bias": pa.array([[], [(5, 1.0)], None, []], pa.map_(pa.int32(), pa.float32())),
        "when": pa.array([now, None, now, now], pa.timestamp("ns")),
        "blob": pa.array([b"\xff", b"", None, b"x"], pa.binary()),
        "kind": pa.array(["a", "b", "a", None]).dictionary_encode(),
        "error": pa.array([1, 2, 3, 4], pa.int8()),
    }
    (tmp_path / "in").mkdir()
    table = pa.table(columns)
    pq.write_table(table.slice(0, 3), tmp_path / "in" / "1.parquet")
    pq.write_table(table.slice(3), tmp_path / "in" / "2.parquet")
    assert batch(model, str(tmp_path / "in"), tmp_path / "out", "--prompt-column", "question") == 1
    assert batch(model, str(tmp_path / "in"), tmp_path / "out", "--prompt-column", "question", "--resume") == 1
    found = pq.read_table(sorted(tmp_path.glob("out/part-*.parquet"))).sort_by("row_index")
    kept = [name if name != "error" else "input.error" for name in columns]
    assert found.select(kept).rename_columns(list(columns)).cast(table.schema).equals(table)
    errors = found["error"].to_pylist()
    assert errors[0] is None and errors[1] is None and errors[3] is None
    assert errors[2].startswith("1.parquet row 3: it needs exactly one of question,")
    assert len(found["outputs"][1].as_py()[0]["logprobs"]) == 6 and found["usage"][0].as_py()["prompt_tokens"] == 3


def test_a_job_goes_on_after_an_interrupt(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", *({"prompt": f"{i} {DOCUMENT}"} for i in range(12)))
    assert batch(model, source, tmp_path / "whole") == 0
    step = Replica._step
    steps = iter(range(1000))

    def interrupted(replica: Replica) -> Any:
        if next(steps) == 30:
            raise KeyboardInterrupt
        return step(replica)

    monkeypatch.setattr(Replica, "_step", interrupted)
    assert batch(model, source, tmp_path / "out", "--max-num-seqs", "2") == 130
    first = results(tmp_path / "out")
    assert 0 < len(first) < 12
    assert f"interrupted: {len(first)} of 12 rows are written; --resume" in capsys.readouterr().err
    assert batch(model, source, tmp_path / "out") == 2
    assert "has results of an earlier run: --resume" in capsys.readouterr().err
    assert batch(model, source, tmp_path / "out", "--resume", "--max-num-seqs", "3") == 0
    assert f"{len(first)} of 12 rows are done" in capsys.readouterr().err
    assert batch(model, source, tmp_path / "out", "--resume") == 0  # there is nothing left
    found = results(tmp_path / "out")
    whole = results(tmp_path / "whole")
    assert [found[i]["outputs"] for i in range(12)] == [whole[i]["outputs"] for i in range(12)]
    assert batch(model, source, tmp_path / "out", "--resume", "--max-tokens", "9") == 2
    assert "was begun with other values of sampling parameters" in capsys.readouterr().err


def test_rows_of_an_engine_that_has_ended_wait_for_resume(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a tensor-parallel rank has died: the rows are not failed ones."""
    source = write_jsonl(tmp_path / "data.jsonl", *({"prompt": f"row {i}"} for i in range(4)))
    execute = ModelRunner.execute
    steps = iter(range(1000))

    def end(runner: ModelRunner, step: Batch) -> StepResult:
        if next(steps) == 8:
            runner.close()
            raise EngineError("rank 1 was killed")
        return execute(runner, step)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", end)
        assert batch(model, source, tmp_path / "out", "--max-num-seqs", "1") == 1
    said = capsys.readouterr().err
    assert "the job has ended early: 1 of 4 rows are written; --resume computes the others" in said
    assert "error: the engine is closed" in said and sorted(results(tmp_path / "out")) == [0]
    assert batch(model, source, tmp_path / "out", "--resume") == 0
    assert sorted(results(tmp_path / "out")) == [0, 1, 2, 3]


def test_a_job_is_the_same_under_other_names(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row is left, so no model is loaded. vLLM's names mean the same, and so do paths from another directory."""
    source = write_jsonl(tmp_path / "data.jsonl")
    command = ["batch", "--model", model, "--input", source, "--output", str(tmp_path / "out"), "--speculative-config"]
    drafts = '{{"method": "draft_model", "num_speculative_tokens": 2, "model": "{}"}}'
    monkeypatch.chdir(model)
    assert main([*command, drafts.format("."), "--kvcache-block-size", "16"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main([*command, drafts.format(model), "--resume", "--block-size", "32"]) == 0, capsys.readouterr().err


REFUSED = {
    "no file": (["--input", "missing.jsonl"], "--input 'missing.jsonl' is neither a file"),
    "two formats": (["--input", "a.jsonl", "b.parquet"], "run one job for each format"),
    "an empty directory": (["--input", "empty"], "nor a directory of such files"),
    "resources": (["--input", "a.jsonl", "--num-cpus", "9"], "are for replicas on a cluster: add --ray-address"),
    "adapters": (["--input", "a.jsonl", "--enable-lora"], "rows of a batch cannot name adapters yet"),
    "torchrun": (
        ["--input", "a.jsonl", "--tensor-parallel-size", "2", "--distributed-executor-backend", "external_launcher"],
        "a replica starts its ranks; leave it out",
    ),
    "temperature": (["--input", "a.jsonl", "--temperature", "-1"], "temperature=-1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(
    case: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.parquet"):
        Path(name).write_text("{}\n")
    Path("empty").mkdir()
    options, sentence = REFUSED[case]
    command = ["batch", "--model", model, "--output", "out", *options]
    try:
        status = main(command)
    except SystemExit as error:  # from argparse
        status = int(error.code or 0)
    message = capsys.readouterr().err
    assert status == 2 and sentence in message and message.count("\n") == 1
    assert not Path("out").exists()


# ---- LLMPredictor, without Ray


def test_predictor(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import numpy

    from nanovllm.apps.batch import LLMPredictor

    arguments: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 80}
    predictor = LLMPredictor(model, sampling_params={"max_tokens": 5, "ignore_eos": True}, **arguments)
    rows = pa.table(
        {
            "prompt": ["one", "two", "x" * 2000, "one", "one", None],
            "id": pa.array([0, 0, 0, 0, 1, 2], pa.uint8()),
            "temperature": [0.0, 1.0, None, 1.0, 1.0, 1.0],
            "error": ["old"] * 6,
        }
    )
    whole = predictor(rows)
    assert whole.select(["prompt", "id", "temperature", "input.error"]).rename_columns(rows.column_names).equals(rows)
    errors = whole["error"].to_pylist()
    texts = whole["generated_text"].to_pylist()
    assert "the prompt has 2000 tokens" in errors[2] and "it needs exactly one of" in errors[5]
    assert [error is None for error in errors] == [True, True, False, True, True, False]
    assert whole["usage"][0].as_py()["completion_tokens"] == 5
    assert texts[3] != texts[4]  # another id, another seed
    for cut in range(1, 6):  # however Ray Data makes batches of the rows
        parts = [predictor(rows.slice(0, cut)), predictor(rows.slice(cut))]
        assert pa.concat_tables(parts)["generated_text"].to_pylist() == texts  # which needs the same types
    columns = {
        name: numpy.array(column.to_pylist(), dtype=object)
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    assert predictor(columns)["generated_text"].to_pylist() == texts
    step = Replica._step
    steps = iter(range(1000))

    def interrupted(replica: Replica) -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step(replica)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Replica, "_step", interrupted)
        predictor(rows.slice(1))
    assert predictor(rows.slice(0, 2))["generated_text"].to_pylist() == texts[:2]  # not those of the call that failed
