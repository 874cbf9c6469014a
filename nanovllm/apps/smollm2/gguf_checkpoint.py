"""Converts a GGUF file of the Llama family to a directory in Hugging Face format, with tokenizer and chat template.

Transformers reads the file, and the weights become float32. A 4-bit weight means scale * q + minimum, which the reader
computes in float32. Writing bfloat16 would round it once more; `LLM(..., dtype="bfloat16")` can do so at load.
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

from nanovllm.apps.smollm2 import UnavailableError
from nanovllm.errors import ModelError

READERS = ("gguf", "accelerate")  # packages that Transformers needs to read GGUF
ARCHITECTURE = "llama"
PRE_TOKENIZER = "smollm"


def convert_gguf(gguf_file: str | Path, directory: str | Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of `gguf_file` into `directory`, made where missing.

    Raises UnavailableError if a package that reads GGUF is missing. Raises ModelError for a file that cannot be read,
    and for networks other than Llama's and tokenizers other than SmolLM's, whose conversion is not tested.
    """
    source, target = Path(gguf_file), Path(directory)
    missing = [name for name in READERS if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"Reading GGUF takes {' and '.join(missing)}: pip install 'nanovllm[gguf]'.")
    _check_kind(source)
    target.mkdir(parents=True, exist_ok=True)
    _write_network(source, target)
    _write_tokenizer(source, target)


def _check_kind(source: Path) -> None:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(source).fields
        keys = ("general.architecture", "tokenizer.ggml.pre")
        architecture, pre = (fields[key].contents() if key in fields else None for key in keys)
    except Exception as error:  # the library raises many types on damaged files
        raise ModelError(f"{source} cannot be read as GGUF: {error}.") from error
    if (architecture, pre) != (ARCHITECTURE, PRE_TOKENIZER):
        raise ModelError(
            f"{source} holds architecture {architecture!r} with pre-tokenizer {pre!r}; only {ARCHITECTURE!r} with "
            f"{PRE_TOKENIZER!r} is converted. Use a checkpoint in Hugging Face format."
        )


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
