"""`nanovllm batch` and Ray Data on a cluster of two nodes on this machine, which lose a worker, a node, the driver."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from cli_helpers import make_model, write_jsonl
from rank_processes import is_running

if TYPE_CHECKING:
    from ray_cluster import Cluster

pytestmark = pytest.mark.slow

ENGINE = ["--kvcache-block-size", "16", "--num-gpu-blocks", "160", "--max-num-seqs", "8"]
SAMPLING = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
# The command with small parts, so that a test sees how far it is; slower with each part as long as a file exists, so
# that what the test does comes before the end.
PROGRAM = """
import os, sys, time
from nanovllm.apps.batch.results import ResultDirectory
from nanovllm.apps.cli.main import main

def flush(self, flush=ResultDirectory.flush):
    flush(self)
    if os.path.exists(os.environ.get("TEST_SLOW", "")):
        time.sleep(0.05 * self._next_part)

ResultDirectory.flush = flush
ResultDirectory.__init__.__kwdefaults__["part_rows"] = 25
sys.exit(main(sys.argv[1:]))
"""
COMMAND = [sys.executable, "-c", PROGRAM]
EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_data.py"
SECONDS = 500
MANY = 1200
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head with room for two replicas, and a node with room for one."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'nanovllm[ray]'")
    pytest.importorskip("psutil")
    from ray_cluster import Cluster

    with Cluster(num_cpus=2) as made:
        made.add_node(num_cpus=1)
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("cluster") / "tiny")


def make_rows(path: Path, count: int) -> str:
    """Questions about 20 documents, some of them sampled, some broken."""
    random = Random(count)
    documents = ["".join(random.choices("abcdefgh ", k=300)) for _ in range(20)]
    rows: list[Any] = []
    for index in range(count):
        row: dict[str, Any] = {"id": f"q{index}", "prompt": f"{random.choice(documents)} question {index}"}
        if index % 5 == 1:
            row["temperature"] = 1.0
        rows.append(row if index % 97 else {**row, "prompt": None})
    return write_jsonl(path, *rows)


def batch_command(model: str, source: str, output: Path) -> list[str]:
    return [*COMMAND, "batch", "--model", model, "--input", source, "--output", str(output), *ENGINE, *SAMPLING]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """As long as this file exists, commands that `start` starts take 2 s for 200 rows, 7 s for 400, 59 s for MANY."""
    file = tmp_path / "slow"
    file.touch()
    return file


@pytest.fixture
def start(cluster: Cluster, model: str, tmp_path: Path) -> Iterator[Start]:
    """Starts the command with the rows of a file, a directory for the results and options. It ends with the test."""
    environment = {**cluster.environment, "TEST_SLOW": str(tmp_path / "slow")}
    with ExitStack() as ended_with_the_test:

        def start(source: str, output: Path, *options: str) -> subprocess.Popen[str]:
            command = [*batch_command(model, source, output), *options]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
            ended_with_the_test.enter_context(process)
            ended_with_the_test.callback(process.kill)
            return process

        yield start


def on_cluster(cluster: Cluster) -> list[str]:
    return ["--num-replicas", "2", "--ray-address", cluster.address, "--num-cpus", "1"]


def results(output: Path) -> dict[int, dict[str, Any]]:
    """The rows of all parts, each of which has one result. Cached tokens, which depend on the replica, are left out."""
    found: dict[int, dict[str, Any]] = {}
    for part in output.glob("part-*.jsonl"):
        for line in part.read_text().splitlines():
            row = json.loads(line)
            assert row["row_index"] not in found
            if row["usage"] is not None:
                del row["usage"]["prompt_tokens_details"]
            found[row["row_index"]] = row
    return found


def ended(process: subprocess.Popen[str]) -> str:
    """What the command said, once it has ended with some rows that failed."""
    _, message = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, message
    return message


def wait_for(condition: Callable[[], T], process: subprocess.Popen[str]) -> T:
    """What the condition returns as soon as it holds, which has to be before the command ends."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"waited in vain; the command said: {process.communicate()[1]}")
        time.sleep(0.05)
    return found


Rows = tuple[str, dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def many_rows(model: str, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A file of MANY rows, which keep a cluster busy while something fails, and the results of one process."""
    folder = tmp_path_factory.mktemp("rows")
    source = make_rows(folder / "data.jsonl", MANY)
    ended(subprocess.Popen(batch_command(model, source, folder / "one"), stderr=subprocess.PIPE, text=True))
    return source, results(folder / "one")


def test_the_job_goes_on_after_kill_9_of_the_driver(
    start: Start, slow: Path, cluster: Cluster, many_rows: Rows, tmp_path: Path
) -> None:
    (source, expected) = many_rows
    output = tmp_path / "out"
    process = start(source, output, *on_cluster(cluster))
    wait_for(lambda: len(results(output)) >= 150, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    slow.unlink()
    first = results(output)
    assert 150 <= len(first) < MANY
    message = ended(start(source, output, *on_cluster(cluster), "--resume"))
    assert f"{len(first):,} of {MANY:,} rows are done" in message
    assert results(output) == expected and len(expected) == MANY


def test_rows_of_a_document_meet_on_a_replica(start: Start, cluster: Cluster, tmp_path: Path) -> None:
    """Each replica's cache holds some of the documents: which rows it gets decides how much it finds."""
    source = make_rows(tmp_path / "data.jsonl", 400)
    cached = {}
    total = 0
    for routing in ("--prefix-routing", "--no-prefix-routing"):
        output = tmp_path / routing
        ended(start(source, output, *on_cluster(cluster), routing))
        lines = [json.loads(line) for part in output.glob("part-*") for line in part.read_text().splitlines()]
        usages = [line["usage"] for line in lines if line["usage"] is not None]
        cached[routing] = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        total = sum(usage["prompt_tokens"] for usage in usages)
    print(f"\n{cached} of {total} prompt tokens were cached")
    assert cached["--prefix-routing"] > 1.5 * cached["--no-prefix-routing"]
    assert cached["--prefix-routing"] > 0.7 * total


def test_rows_of_a_worker_that_hangs_run_elsewhere(
    start: Start, slow: Path, cluster: Cluster, many_rows: Rows, tmp_path: Path
) -> None:
    (source, expected) = many_rows
    output = tmp_path / "out"
    process = start(source, output, *on_cluster(cluster), "--worker-timeout", "8")
    wait_for(lambda: len(results(output)) >= 100, process)
    hanging = wait_for(cluster.busy_workers, process)[0]
    hanging.suspend()
    slow.unlink()
    message = ended(process)
    assert "was lost with" in message and "it has not answered for 8 s" in message
    assert results(output) == expected
    psutil = pytest.importorskip("psutil")
    with suppress(psutil.NoSuchProcess):  # where Ray has killed it already
        hanging.resume()  # Ray has asked it to end; a suspended process cannot
        hanging.wait(60)


def test_a_replica_of_two_ranks(start: Start, slow: Path, cluster: Cluster, tmp_path: Path) -> None:
    """A rank that is killed ends the replica's engine, whose rows run again in another one."""
    source = make_rows(tmp_path / "data.jsonl", 300)
    output = tmp_path / "out"
    ranks = ("--tensor-parallel-size", "2")
    slow.unlink()
    ended(start(source, tmp_path / "one", *ranks))
    slow.touch()
    one_replica = ["--num-replicas", "1", "--ray-address", cluster.address, "--num-cpus", "2"]
    process = start(source, output, *one_replica, *ranks)
    wait_for(lambda: len(results(output)) >= 75 and len(cluster.workers()) == 1, process)
    (worker,) = cluster.workers()
    killed, other = (child for child in worker.children() if "spawn_main" in " ".join(child.cmdline()))
    killed.send_signal(signal.SIGKILL)
    slow.unlink()
    message = ended(process)
    assert "was killed by signal 9; the engine has ended" in message
    assert results(output) == results(tmp_path / "one") and len(results(output)) == 300
    assert not is_running(other.pid)


def test_ray_data(cluster: Cluster, model: str, tmp_path: Path) -> None:
    """read_parquet, map_batches with two actors, write_parquet: the example as it is."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": i, "prompt": f"row {i}" if i != 7 else None, "temperature": float(i % 2)} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    command = [sys.executable, str(EXAMPLE), model, str(tmp_path / "in.parquet"), str(tmp_path / "out")]
    environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = pq.read_table(tmp_path / "out").sort_by("id").to_pylist()
    assert [row["id"] for row in found] == list(range(40))

    from nanovllm.apps.batch import LLMPredictor

    arguments = runpy.run_path(str(EXAMPLE))["ENGINE"] | {"device": "cpu"}
    predictor = LLMPredictor(model, **arguments)
    expected = predictor(pa.Table.from_pylist(rows))
    assert [row["generated_text"] for row in found] == expected["generated_text"].to_pylist()
    assert [row["error"] is None for row in found] == [i != 7 for i in range(40)]


def test_a_lost_worker_and_a_lost_node_lose_no_row(
    start: Start, slow: Path, cluster: Cluster, many_rows: Rows, tmp_path: Path
) -> None:
    """The last test, since the node does not come back."""
    (source, expected) = many_rows
    output = tmp_path / "out"
    process = start(source, output, *on_cluster(cluster))
    wait_for(lambda: len(results(output)) >= 200 and len(cluster.workers()) == 2, process)
    cluster.workers()[0].send_signal(signal.SIGKILL)
    wait_for(lambda: len(results(output)) >= 400 and len(cluster.workers()) == 2, process)
    cluster.kill_node(1)
    slow.unlink()
    message = ended(process)
    assert message.count("a worker of replica") >= 2, message
    found = results(output)
    assert found == expected and len(found) == MANY
    assert not [row for row in found.values() if row["error"] and "it needs exactly one" not in row["error"]]


def test_one_machine_needs_no_cluster(model: str, tmp_path: Path) -> None:
    """A cluster is started for the job, and ends with it."""
    pytest.importorskip("ray")
    source = make_rows(tmp_path / "data.jsonl", 60)
    output = tmp_path / "out"
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    options = ["--num-replicas", "2", "--ray-address", "local", "--num-cpus", "1"]
    command = [*batch_command(model, source, output), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1 and len(results(output)) == 60, done.stderr
