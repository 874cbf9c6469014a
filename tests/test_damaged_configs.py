"""Damaged JSON in a model directory: one sentence that names file, field and value, and never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, edit_config, refusal

from nanovllm import LLM
from nanovllm.data.json_fields import MAX_JSON_BYTES, read_json_object
from nanovllm.formats.config_fields import MAX_LAYERS

SIZES = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim")


original = checkpoint_fixture(vocab=300, tokenizer={})


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def message_of(model: Path, *words: str) -> str:
    """The one sentence with which the directory is refused, holding these words."""
    message = refusal(lambda: LLM(model, kvcache_block_size=16, num_gpu_blocks=80))
    assert "\n" not in message and len(message) < 600
    assert [word for word in words if word not in message] == []
    return message


# ---- config.json


def refused(model: Path, file: str, changes: dict[str, Any], *words: str) -> None:
    """The file with these changes is refused with its name and these words. Then it is as it was."""
    kept = (model / file).read_bytes()
    edit_config(model, file, **changes)
    message_of(model, str(model / file), *words)
    (model / file).write_bytes(kept)


def test_a_size_is_a_whole_number_in_a_range(model: Path) -> None:
    values = [(name, value) for name in SIZES for value in (10**30, 0)]
    for name, value in [*values, *(("hidden_size", other) for other in (-1, 1.5, "x", [1], {}, True))]:
        refused(model, "config.json", {name: value}, f"{name}={value!r}", "whole number from 1 to")


def test_other_fields_name_file_field_and_value(model: Path) -> None:
    for field, value in (
        ("architectures", [["Qwen3ForCausalLM"]]),
        ("rms_norm_eps", "x"),
        ("tie_word_embeddings", "no"),
        ("sliding_window", 10**30),
        ("layer_types", [["full_attention"]]),
        ("eos_token_id", 10**30),
        ("rope_parameters", "x"),
        ("num_hidden_layers", MAX_LAYERS + 1),
    ):
        refused(model, "config.json", {field: value}, f"{field}={value!r}", "must be")


# ---- any JSON file


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert str(MAX_JSON_BYTES) in refusal(lambda: read_json_object(path))
    path.unlink()
    path.mkdir()
    assert "not a file" in refusal(lambda: read_json_object(path))


# ---- the tokenizer and recommendations


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_huge_tokenizer_files_are_not_read(name: str, model: Path) -> None:
    with (model / name).open("wb") as file:
        file.truncate(1 << 40)
    message_of(model, str(model / name), str(1 << 40))
