"""`nanovllm batch` and Ray Data on a cluster of this machine, whose workers are killed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import make_model, write_jsonl

from nanovllm.apps.batch.rows import Row, RowResult
from nanovllm.apps.cli.main import main
from nanovllm.errors import ConfigError, EngineError

pytestmark = pytest.mark.slow
ray_data = pytest.importorskip("nanovllm.apps.batch.ray_data", reason="needs Ray: pip install 'nanovllm[ray]'")

OPTIONS = ["--kvcache-block-size", "16", "--num-gpu-blocks", "160", "--max-num-seqs", "8", "--max-tokens", "8"]
CLUSTER = ["--num-replicas", "2", "--ray-address", "local", "--num-cpus", "1"]
EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_data.py"
ROWS = 90
POISON = 77


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture
def workers_find_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(EXAMPLE.parent.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def make_rows(path: Path) -> str:
    """Some are sampled, some are broken, and one is the poison."""
    rows = [{"id": f"q{i}", "prompt": f"{'document ' * 9} {i}", "temperature": i % 2} for i in range(ROWS)]
    rows[13]["prompt"] = 5
    rows[POISON]["prompt"] = "poison"
    return write_jsonl(path, *rows)


def batch(model: str, source: str, output: Path, *options: str) -> int:
    return main(["batch", "--model", model, "--input", source, "--output", str(output), *OPTIONS, *options])


def results(output: Path) -> dict[int, dict[str, Any]]:
    """The rows of all parts, each of which has one result. Cached tokens, which depend on the engine, are left out."""
    rows = [json.loads(line) for part in output.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    by_index = {row["row_index"]: row for row in rows}
    assert len(by_index) == len(rows)
    for row in rows:
        if row["usage"] is not None:
            del row["usage"]["prompt_tokens_details"]
    return by_index


def dying_replica(folder: Path) -> Any:
    """A class whose process is killed once, whose engine fails once, and which the poison kills whenever it comes."""

    class DyingReplica(ray_data.SliceReplica):
        def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
            answers = self._replica.answers

            def dying(rows: Iterator[Row], *others: Any) -> Iterator[list[tuple[Row, RowResult]]]:
                for number, pairs in enumerate(answers(rows, *others)):
                    if number == 3 and not (folder / "killed").exists():
                        (folder / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    if number == 3 and not (folder / "failed").exists():
                        (folder / "failed").touch()
                        raise EngineError("a rank was lost")
                    if any(row.index == POISON for row, _ in pairs):
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield pairs

            self._replica.answers = dying  # type: ignore[method-assign]
            try:
                return super().__call__(batch)
            finally:
                self._replica.answers = answers  # type: ignore[method-assign]

    return DyingReplica


def test_lost_workers_lose_no_row(
    model: str,
    workers_find_this_checkout: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows that ran before, and those that no worker survives, are one each, too; and the bits are one engine's."""
    source = make_rows(tmp_path / "data.jsonl")
    assert batch(model, source, tmp_path / "one") == 1
    expected = results(tmp_path / "one")
    monkeypatch.setattr(ray_data, "SliceReplica", dying_replica(tmp_path))
    output = tmp_path / "cluster"
    assert batch(model, source, output, *CLUSTER) == 1
    assert (tmp_path / "killed").exists() and (tmp_path / "failed").exists()
    answered = results(output)
    assert sorted(answered) == list(range(ROWS)) and (output / "_SUCCESS").exists()
    poisoned = answered.pop(POISON)
    assert poisoned["error"].endswith("every worker that ran this row was lost, also when it ran alone")
    assert answered == {index: row for index, row in expected.items() if index != POISON}
    assert f"2 of {ROWS} rows failed" in capsys.readouterr().err
    for part in list(output.glob("part-*"))[:1]:
        part.unlink()  # as if the driver had been killed before it wrote this part
    monkeypatch.undo()
    assert batch(model, source, output, *CLUSTER, "--resume") == 1
    again = results(output)
    assert sorted(again) == list(range(ROWS))
    assert {i: row for i, row in again.items() if i != POISON} == answered


def test_a_model_that_cannot_be_loaded_ends_the_job(
    model: str,
    workers_find_this_checkout: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(self: object, *_: object) -> None:
        raise ConfigError("no such weights")

    class NoReplica(ray_data.SliceReplica):
        __init__ = fails  # type: ignore[assignment]

    monkeypatch.setattr(ray_data, "SliceReplica", NoReplica)
    assert batch(model, make_rows(tmp_path / "data.jsonl"), tmp_path / "out", *CLUSTER) == 1
    told = capsys.readouterr().err
    assert "no such weights" in told and f"0 of {ROWS} rows are written; --resume" in told, told


def test_resources_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}]
    monkeypatch.setattr(ray_data.ray, "nodes", lambda: nodes)
    assert [ray_data.resources_each(2, None, gpus, 1)["num_gpus"] for gpus in (None, 0.5, 2)] == [1, 0.5, 2]
    with pytest.raises(ConfigError, match="no node of the cluster has"):
        ray_data.resources_each(2, 9, 0, 1)


def test_ray_data(model: str, tmp_path: Path) -> None:
    """read_parquet, map_batches, write_parquet: the example as it is."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": i, "prompt": f"row {i}" if i != 7 else None, "temperature": float(i % 2)} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    command = [
        sys.executable,
        str(EXAMPLE),
        model,
        str(tmp_path / "in.parquet"),
        str(tmp_path / "out"),
        "--replicas",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "out").sort_by("id").to_pylist()
    assert [row["id"] for row in table] == list(range(40))

    from nanovllm.apps.batch import LLMPredictor

    arguments = runpy.run_path(str(EXAMPLE))["ENGINE"] | {"device": "cpu"}
    predictor = LLMPredictor(model, **arguments)
    expected = predictor(pa.Table.from_pylist(rows))
    assert [row["generated_text"] for row in table] == expected["generated_text"].to_pylist()
    assert [row["error"] is None for row in table] == [i != 7 for i in range(40)]
