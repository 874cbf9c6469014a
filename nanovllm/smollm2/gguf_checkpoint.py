"""A GGUF file of the Llama family as a directory in Hugging Face format, with tokenizer and chat template.

Transformers reads the file; the weights become float32. A 4-bit weight stands for scale * q + minimum, which float32
holds as exactly as the file's reader computes it; bfloat16 would round it once more. `LLM(..., dtype="bfloat16")` can
still round them at load.
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

from nanovllm.errors import ModelError
from nanovllm.smollm2 import UnavailableError

READERS = ("gguf", "accelerate")  # what Transformers asks for before it reads GGUF
ARCHITECTURE = "llama"
PRE_TOKENIZER = "smollm"


def convert_gguf(gguf_file: str | Path, directory: str | Path) -> None:
    """Write config, float32 weights, tokenizer and chat template of `gguf_file` into `directory`, made where missing.

    Raises UnavailableError where a package is missing that reads GGUF, and ModelError on a file that cannot be read and
    on a network other than Llama's or a tokenizer other than SmolLM's, which would be converted unchecked.
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
    except Exception as error:  # whatever the library raises on damaged files
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
    # What the file's weights were; with it, the directory would not pass for the plain checkpoint that it is.
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
    # SmolLM cuts every digit off before anything else. Transformers leaves that out when it reads GGUF, and then two
    # spaces before a number, for instance, are other tokens than those the model was trained on.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(target)
