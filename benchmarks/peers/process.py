"""Runs one engine with one prompt in a new process, so that its peak memory is that of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.env import ROOT, EngineFailure, last_line
from benchmarks.peers.runner import Job

RUN_SECONDS = 3600
# The source tree is last on the path, so that nanovllm is imported from its environment. Runners are named modules,
# since some engines start processes that import them again.
LAUNCH = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def command(python: Path, module: str, *arguments: str) -> list[str]:
    """Runs `module` of the source tree with an environment's Python, that environment's packages coming first."""
    return [str(python), "-I", "-c", LAUNCH, str(ROOT), module, *arguments]


def run_job(engine: str, python: Path, module: str, job: Job, work_dir: Path) -> dict[str, Any]:
    """The result of the runner `module` for `job`. Raises EngineFailure."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=work_dir) as file:
        json.dump(dataclasses.asdict(job), file)
        file.flush()
        return json_of(engine, command(python, module, file.name), work_dir, job.threads)


@contextmanager
def asking(engine: str, arguments: Sequence[str]) -> Iterator[Callable[[object], Any]]:
    """Runs a command that answers each line of JSON with one, and gives what asks it.

    That raises EngineFailure if the process has ended.
    """
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        questions = process.stdin
        answers = process.stdout

        def ask(question: object) -> Any:
            print(json.dumps(question), file=questions, flush=True)
            line = answers.readline()
            if not line:
                raise EngineFailure(f"{engine}'s process has ended, see its message above")
            return json.loads(line)

        yield ask
        questions.close()


def json_of(engine: str, arguments: list[str], work_dir: Path, threads: int) -> dict[str, Any]:
    """The JSON object on the last line of a command's stdout. Raises EngineFailure with the last line of its stderr."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work_dir,
        env=variables(Path(arguments[0]), work_dir, threads),
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EngineFailure(f"{engine} took longer than {RUN_SECONDS} s") from error
    finally:
        _end_all(process)
    (work_dir / f"{engine}.stderr").write_text(stderr)
    if process.returncode != 0:
        how = f"exit status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise EngineFailure(f"{engine} failed with {how}: {last_line(stderr)}")
    return parse(engine, stdout)


def parse(engine: str, stdout: str) -> dict[str, Any]:
    """The result in the output. Raises EngineFailure if there is none."""
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise EngineFailure(f"{engine} ended without a result: {last_line(stdout)}")
    return result


def variables(python: Path, work_dir: Path, threads: int) -> dict[str, str]:
    """Environment variables: the same threads for all, no downloads or telemetry, caches in the work directory."""
    return os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(work_dir / "cache-vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(work_dir / "cache-inductor"),
    }


def _end_all(process: subprocess.Popen[str]) -> None:
    """End the runner and its children, so that the next engine runs alone."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
