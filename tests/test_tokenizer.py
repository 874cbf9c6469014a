"""Text in and out: whole characters only, the same text in the end, and a sentence for files that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import edit_config
from tokenizer_files import END, write_byte_level
from tokenizers import Tokenizer as Backend

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


def test_the_text_of_a_token_keeps_its_space_whoever_reads_the_files(model_dir: Path, tmp_path: Path) -> None:
    """Llama 3's config, among others, asks Transformers to clean up spaces before punctuation."""
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, "tokenizer_config.json", clean_up_tokenization_spaces=True)
    saved = Backend.from_file(str(tmp_path / "tokenizer.json"))
    saved.add_tokens([" ."])
    saved.save(str(tmp_path / "tokenizer.json"))
    loaded = HuggingFaceTokenizer(tmp_path)
    token = saved.token_to_id(" .")
    assert loaded.token_text(token) == " ."
    assert loaded.tokenizer.convert_tokens_to_ids(" .") == token  # Transformers' takes the place of the library's
    assert loaded.token_text(token) == " ." and loaded.decode([token]) == " ."


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
