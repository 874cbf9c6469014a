"""The loop of a batch job with replicas that are lost at any time: every row has one result, whatever happens."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.apps.batch.results import ResultDirectory
from nanovllm.apps.batch.rows import Row, RowFormat, RowRequest, RowResult, failed_result
from nanovllm.apps.batch.run import MOST_EMPTY_LIVES, MOST_LOSSES, Job, Lost, Results
from nanovllm.data.progress import Progress
from nanovllm.errors import EngineError


class FakeReplicas:
    """Answers rows in any order, and loses workers: at random, and with every row of `poison`."""

    def __init__(self, num_replicas: int, seed: int, loss_rate: float = 0.0, poison: Collection[int] = ()) -> None:
        self.random = Random(seed)
        self.loss_rate = loss_rate
        self.poison = poison
        self.rows: dict[int, list[RowRequest]] = {number: [] for number in range(num_replicas)}
        self.submitted: list[int] = []
        self.num_losses = 0

    def progress(self, step_share: float) -> Progress:
        return Progress()

    def ready(self) -> Collection[int]:
        return [number for number in self.rows if self.random.random() < 0.8]  # the others load

    def submit(self, replica: int, requests: list[RowRequest]) -> None:
        self.submitted += [request.index for request in requests]
        self.rows[replica] += requests

    def wait(self) -> list[Results | Lost]:
        if not self.rows:
            raise EngineError("no replica is left")
        return [event for number in self.rows if (event := self._event(number)) is not None]

    def retire(self, replica: int) -> None:
        del self.rows[replica]

    def _event(self, number: int) -> Results | Lost | None:
        rows = self.rows[number]
        if rows and (self.random.random() < self.loss_rate or any(row.index in self.poison for row in rows)):
            self.rows[number] = []
            self.num_losses += 1
            return Lost(number, "the node died")
        ended = self.random.sample(rows, self.random.randint(0, len(rows)))
        self.rows[number] = [row for row in rows if row not in ended]
        return Results(number, [answer(row) for row in ended]) if ended else None


def answer(request: RowRequest) -> RowResult:
    columns = failed_result(request.index, "").columns | {"generated_text": request.prompt, "error": None}
    return RowResult(request.index, columns)


def rows(count: int) -> list[Row]:
    """Every seventh row is broken; all others have a prompt that some share the beginning of."""
    made = []
    for index in range(count):
        text = f"{'document ' * 40 if index % 3 else ''}{index}"
        columns = {"prompt": text} if index % 7 != 6 else {"prompt": 5}
        made.append(Row(index, f"line {index + 1}", columns, {"id": index}))
    return made


def run_job(
    path: Path, count: int, replicas: FakeReplicas, max_num_seqs: int = 4, messages: list[str] | None = None
) -> dict[int, dict[str, object]]:
    """Run a job or go on with it; returns all results by row."""
    output = ResultDirectory(str(path), "jsonl", None, part_rows=5)
    output.open({}, resume=True)
    with output:
        Job(
            rows=iter([row for row in rows(count) if row.index not in output.done]),
            row_format=RowFormat(),
            output=output,
            replicas=replicas,
            max_num_seqs=max_num_seqs,
            on_loss=(messages if messages is not None else []).append,
        ).run()
    found: dict[int, dict[str, object]] = {}
    for part in sorted(path.glob("part-*")):
        for line in part.read_text().splitlines():
            value = json.loads(line)
            assert value["row_index"] not in found
            found[value["row_index"]] = value
    return found


def check_results(found: dict[int, dict[str, object]], count: int, failed: Collection[int] = ()) -> None:
    assert sorted(found) == list(range(count))
    for row in rows(count):
        value = found[row.index]
        assert value["id"] == row.index
        if row.index % 7 == 6:
            assert value["error"] == f"line {row.index + 1}: prompt must be text, got 5"
        elif row.index in failed:
            assert "workers were lost while they ran this row: the node died" in str(value["error"])
        else:
            assert (value["error"], value["generated_text"]) == (None, row.columns["prompt"])


@settings(max_examples=40)
@given(
    count=st.integers(0, 60),
    num_replicas=st.integers(1, 4),
    max_num_seqs=st.integers(1, 9),
    loss_rate=st.sampled_from([0.0, 0.03, 0.1]),
    seed=st.integers(0, 1000),
)
def test_every_row_has_one_result(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    num_replicas: int,
    max_num_seqs: int,
    loss_rate: float,
    seed: int,
) -> None:
    """Unless every replica is lost again and again: then a run that goes on has the rest."""
    path = tmp_path_factory.mktemp("job")
    found = {}
    for attempt in range(50):
        try:
            found = run_job(path, count, FakeReplicas(num_replicas, seed + attempt, loss_rate), max_num_seqs)
            break
        except EngineError as error:
            assert loss_rate and "no replica is left" in str(error)
    unlucky = [index for index, value in found.items() if "workers were lost" in str(value["error"])]
    assert not unlucky or loss_rate
    check_results(found, count, unlucky)


@settings(max_examples=20)
@given(num_replicas=st.integers(1, 3), poison=st.sets(st.sampled_from([0, 3, 9, 10, 25, 39]), min_size=1))
@example(num_replicas=1, poison={0, 1, 2, 3, 4})
@example(num_replicas=1, poison={10, 11, 12, 14, 15, 16, 17})
def test_a_row_that_kills_its_worker_fails_alone(
    tmp_path_factory: pytest.TempPathFactory, num_replicas: int, poison: set[int]
) -> None:
    replicas = FakeReplicas(num_replicas, 1, poison=poison)
    found = run_job(tmp_path_factory.mktemp("job"), 40, replicas)
    check_results(found, 40, failed=poison)
    assert replicas.num_losses <= (MOST_LOSSES + 1) * len(poison)


def test_replicas_that_only_die_end_the_job(tmp_path: Path) -> None:
    messages: list[str] = []
    replicas = FakeReplicas(2, 1, loss_rate=1.0)
    replicas.ready = lambda: list(replicas.rows)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no replica is left"):
        run_job(tmp_path, 400, replicas, max_num_seqs=50, messages=messages)
    assert sum("is given up" in message for message in messages) == 2
    assert replicas.num_losses >= 2 * MOST_EMPTY_LIVES
    check_results(run_job(tmp_path, 400, FakeReplicas(2, 2), max_num_seqs=50), 400)
