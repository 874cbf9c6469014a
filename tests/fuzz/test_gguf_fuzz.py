"""Damaged GGUF files: whatever the header says, the file is loaded or refused in one sentence, without much memory.

Bytes of the header are overwritten, inserted and dropped, counts and lengths become huge, and the file is cut.
"""

from __future__ import annotations

import tempfile
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bounded import FuzzTarget, loaded_or_refused
from checkpoints import make_checkpoint
from hypothesis import strategies as st

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import VOCAB, write_gguf

from nanovllm.errors import ModelError
from nanovllm.formats.gguf.header import read_header
from nanovllm.models.hf_config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.text.tokenizer import HuggingFaceTokenizer

HEADER_SPARE = 4 << 20  # bytes that reading a header may take besides those of the file: a buffer, and Python's objects
GROWTH = 128 << 10  # KiB that loading may grow the process by
NUMBERS = (0, 1, 2, 8, 9, 12, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DAMAGE = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 2**16 - 1),  # as a share of 2**16 of the header
            "deed": st.sampled_from(["number", "overwrite", "insert", "drop", "cut"]),
            "size": st.sampled_from([1, 4, 8]),  # of a number
            "number": st.sampled_from(NUMBERS),
            "bytes": st.binary(min_size=1, max_size=12),
        }
    ),
    min_size=1,
    max_size=3,
)

# Values that are long in a message or have line breaks there, for any key.
LONG_VALUES: dict[str, Any] = {
    "long text": "x" * 5000,
    "line break": "a\nb",
    "long list": ["y\n" * 50] * 3000,
    "not numbers": [float("nan")] * 3000,
    "numbers": list(range(3000)),  # numpy shows arrays in several lines
    "true": True,
    "infinity": float("inf"),
}


@cache
def original() -> tuple[bytes, int]:
    """A small file, and how long its header is."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-fuzz-") as folder:
        model = make_checkpoint(Path(folder) / "model", "llama", layers=1, hidden=32, intermediate=32, vocab=VOCAB)
        path = write_gguf(Path(folder) / "model.gguf", model, factors=[1.0] * 8)
        first = min(tensor.offset for tensor in read_header(path).tensors.values())
        return path.read_bytes(), first


def damaged(damage: list[dict[str, Any]]) -> bytes:
    content, header = original()
    for part in damage:
        at = part["at"] * header >> 16
        new = part["bytes"]
        if part["deed"] == "number":
            new = (part["number"] % 256 ** part["size"]).to_bytes(part["size"], "little")
        if part["deed"] in ("number", "overwrite"):
            content = content[:at] + new + content[at + len(new) :]
        elif part["deed"] == "insert":
            content = content[:at] + new + content[at:]
        elif part["deed"] == "drop":
            content = content[:at] + content[at + len(new) :]
        else:  # anywhere in the file
            content = content[: part["at"] * len(content) >> 16]
    return content


def check(damage: list[dict[str, Any]]) -> str:
    content = damaged(damage)
    with tempfile.TemporaryDirectory(prefix="nanovllm-fuzz-") as folder:
        path = Path(folder) / "damaged.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            word = loaded_or_refused(lambda: read_header(path), GROWTH, path.name)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < len(content) + HEADER_SPARE, f"reading the header of {len(content)} bytes took {most}"
        return word if word == "refused" else loaded_or_refused(lambda: _load(path), GROWTH, path.name)


def _load(path: Path) -> None:
    """Read everything that an engine reads of a file, and compute with it."""
    config = ModelConfig(path)
    config.eos_token_ids()
    config.sampling_defaults()
    HuggingFaceTokenizer(path).encode("a 42 th")
    decoder = load_model(path, config.network_config, torch.float32, torch.device("cpu"), free_bytes=1 << 30)
    assert decoder.embed(torch.tensor([0])).shape == (1, decoder.network.hidden_size)


TARGET = FuzzTarget("gguf", check, damage=DAMAGE)


def test_damaged_files() -> None:
    TARGET.replay()
    TARGET.run_examples(100)


def test_every_cut_is_named_with_the_tensor_and_its_offset(tmp_path: Path) -> None:
    content, header = original()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    tensors = read_header(path).tensors
    for name, tensor in tensors.items():
        path.write_bytes(content[: tensor.offset + tensor.num_bytes - 1])
        says = f"tensor '{name}' at byte {tensor.offset}: it has {tensor.num_bytes} bytes"
        with pytest.raises(ModelError, match=says):
            read_header(path)
    for end in range(0, header, max(1, header // 60)):
        path.write_bytes(content[:end])
        with pytest.raises(ModelError, match=f"at byte .*file ends at byte {end}|not a GGUF file"):
            read_header(path)


@pytest.mark.parametrize("value", LONG_VALUES)
def test_any_key_may_hold_any_value(tmp_path: Path, value: str) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", layers=1, hidden=32, intermediate=32, vocab=VOCAB)
    keys = [*read_header(write_gguf(tmp_path / "plain.gguf", model)).metadata, "llama." + "k" * 5000, "llama.a\nb"]
    for key in keys:
        path = write_gguf(tmp_path / "damaged.gguf", model, changes={key: LONG_VALUES[value]})
        loaded_or_refused(lambda path=path: _load(path), GROWTH, path.name)
