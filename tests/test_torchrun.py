"""Ranks that torchrun starts, on one machine and as two: the tokens of one rank, and an end with no process left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import greedy, random_prompt, token_ids
from rank_processes import child_pids, is_running
from waiting import eventually

from nanovllm import LLM
from nanovllm.features.kv_disk import kept_in

pytestmark = pytest.mark.slow

SECONDS = 200
ENGINE = {"kvcache_block_size": 16, "num_gpu_blocks": 300}
PROMPT = random_prompt(280, 199, 0)
SCRIPT = f"""
import json, os, sys, time
from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner

if os.environ["RANK"] == "1":  # which may take longer to end than the first one
    close = ModelRunner.close
    ModelRunner.close = lambda self: (time.sleep(3), close(self))
if __name__ == "__main__":
    ranks = {{"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher", "device": "cpu"}}
    with LLM(sys.argv[1], kv_cache_dir=f"{{sys.argv[1]}}-kv-{{sys.argv[2]}}", **ranks, **{ENGINE}) as llm:
        print("loaded", flush=True)
        params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
        outputs = llm.generate([{PROMPT}], params, use_tqdm=False)
    print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, max_positions=4096)
    (path / "script.py").write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    with LLM(model_dir, device="cpu", **ENGINE) as llm:
        return token_ids(llm, PROMPT, greedy(8))


@contextmanager
def torchrun(model: Path, max_tokens: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """torchrun with the script above. Its output is a pipe."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(model / "script.py"), str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, str(max_tokens)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    children = child_pids(pid)
    return [*children, *(descendant for child in children for descendant in descendants(child))]


def answers(output: str) -> list[str]:
    """The lines that only the first rank's script prints."""
    return [line for line in output.splitlines() if line.startswith("[[")]


def check_stored(model: Path) -> None:
    """Each rank has stored its part of the prompt, and ranks of one machine and of two find the same."""
    (kept,) = kept_in(f"{model}-kv-8")
    assert kept.tokens == 256 and sorted(path.name[-5:] for path in kept.path.glob("*.kv")) == ["-0.kv", "-1.kv"]


def test_ranks_of_one_machine(model_dir: Path, expected: list[list[int]]) -> None:
    with torchrun(model_dir, 8, "--standalone", "--nproc-per-node", "2") as process:
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert [json.loads(line) for line in answers(output)] == [expected]
    check_stored(model_dir)


def test_ranks_of_two_machines(model_dir: Path, expected: list[list[int]]) -> None:
    """Two agents of torchrun, each with one rank, which meet at an address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    options += ["--rdzv-endpoint", endpoint]
    with torchrun(model_dir, 8, *options) as one, torchrun(model_dir, 8, *options) as other:
        ended = [process.communicate(timeout=SECONDS) for process in (one, other)]
    assert [process.returncode for process in (one, other)] == [0, 0], ended
    assert [json.loads(line) for output, _ in ended for line in answers(output)] == [expected]
    check_stored(model_dir)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_killed_rank_ends_all_processes(local_rank: int, model_dir: Path) -> None:
    with torchrun(model_dir, 3500, "--standalone", "--nproc-per-node", "2") as process:
        assert process.stdout is not None and process.stdout.readline() == "loaded\n"
        workers = child_pids(process.pid)
        processes = descendants(process.pid)
        os.kill(workers[local_rank], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode != 0 and "Signal 9 (SIGKILL)" in errors
        assert eventually(lambda: not any(map(is_running, processes)))
