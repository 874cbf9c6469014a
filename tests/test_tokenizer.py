"""Text in and out: whole characters only, the same text in the end, and a sentence for files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_files import END, write_byte_level

from nanovllm.errors import ModelError
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    loaded = load_tokenizer(model_dir)
    assert loaded is not None
    return loaded


def test_special_tokens_are_read_and_not_printed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"in{END}a")
    assert len(ids) == 3, "a merged token, the end token, a byte"
    assert tokenizer.decode(ids) == "ina" and tokenizer.decode(ids, skip_special_tokens=False) == f"in{END}a"
    assert all(type(token) is int for token in ids)


# ---- files


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").mkdir()  # not a file
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("lonely", ["tokenizer_config.json", "vocab.json"])
def test_files_that_make_no_tokenizer_are_refused(lonely: str, model_dir: Path, tmp_path: Path) -> None:
    content = (model_dir / lonely).read_text() if lonely == "tokenizer_config.json" else '{"a": 0}'
    (tmp_path / lonely).write_text(content)
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        HuggingFaceTokenizer(tmp_path / "absent")
