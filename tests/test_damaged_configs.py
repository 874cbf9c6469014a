"""Damaged JSON in a model directory: one sentence that names file, field and value, and never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, edit_config, refusal

from nanovllm import LLM
from nanovllm.data.json_fields import MAX_JSON_BYTES, MAX_NESTING, read_json_object
from nanovllm.formats.config_fields import MAX_LAYERS
from nanovllm.models.rope_config import rope_parameters

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


def test_numbers_are_finite(model: Path) -> None:
    text = (model / "config.json").read_text()
    assert '"rope_theta": 10000.0' in text
    for token in ("NaN", "-Infinity", "1e400", "1" + "0" * 400):
        (model / "config.json").write_text(text.replace('"rope_theta": 10000.0', f'"rope_theta": {token}'))
        message_of(model, str(model / "config.json"), "rope_theta=")


def test_rope_scaling_is_refused_in_one_line(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is logged besides the error."""
    for rope, word in (
        ({"rope_type": "yarn", "factor": "x"}, "factor='x'"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1e-300}, "beta_fast=1e-300"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}, "rope_theta=1.0"),
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"full_attention": {"rope_theta": 1e4}}, "one rope_theta"),
    ):
        refused(model, "config.json", {"rope_parameters": rope}, "rope_parameters", word)
    assert capfd.readouterr().err == ""


def test_rope_outside_of_the_mapping_is_read_as_transformers_reads_it() -> None:
    assert rope_parameters({"rope_theta": 5e5}, 64, 1e4) == {"rope_type": "default", "rope_theta": 5e5}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": None, "rope_theta": None}}
    assert rope_parameters(old, 64, 1e4) == {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "original_max_position_embeddings": 64,
    }


# ---- any JSON file


def test_nesting_has_a_bound_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for depth, is_read in ((MAX_NESTING, True), (MAX_NESTING + 1, False), (10**5, False)):
        path.write_text('{"a":' * (depth - 1) + "{}" + "}" * (depth - 1))
        if is_read:
            assert set(read_json_object(path)) == {"a"}
        else:
            assert "nested too deeply" in refusal(lambda: read_json_object(path))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert str(MAX_JSON_BYTES) in refusal(lambda: read_json_object(path))
    path.unlink()
    path.mkdir()
    assert "not a file" in refusal(lambda: read_json_object(path))


# ---- the tokenizer and recommendations


def test_fields_of_the_tokenizer_are_checked(model: Path) -> None:
    for field, value in (
        ("model_max_length", -1),
        ("chat_template", 5),
        ("add_bos_token", "yes"),
    ):
        refused(model, "tokenizer_config.json", {field: value}, f"{field}={value!r}", "must be")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_huge_tokenizer_files_are_not_read(name: str, model: Path) -> None:
    with (model / name).open("wb") as file:
        file.truncate(1 << 40)
    message_of(model, str(model / name), str(1 << 40))


def test_a_missing_tokenizer_json_is_said_in_one_line(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    message_of(model, str(model), "there is no tokenizer.json")


def test_recommendations_are_checked_when_the_model_is_loaded(model: Path) -> None:
    for field, value in (
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("eos_token_id", "</s>"),
    ):
        refused(model, "generation_config.json", {field: value}, f"{field}={value!r}", "must be")
