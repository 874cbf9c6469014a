"""Text in and out: whole characters only, the same text in the end, and a sentence for files that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoints import edit_config
from tokenizer_files import CHAT_TEMPLATE, END, write_by_class, write_byte_fallback, write_byte_level
from transformers import CONFIG_MAPPING, AutoTokenizer

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


def test_what_a_caller_adds_to_the_tokenizer_counts(model_dir: Path) -> None:
    own = HuggingFaceTokenizer(model_dir)
    before = own.encode("a new word")
    own.tokenizer.add_tokens(["new"])
    assert len(own.encode("a new word")) == len(before) - 2


# ---- as Transformers

KINDS: dict[str, Callable[[Path], None]] = {
    "byte level": write_byte_level,
    "byte fallback": write_byte_fallback,
    "LlamaTokenizer without a prefix": partial(write_by_class, name="LlamaTokenizer", add_prefix_space=False),
    **{
        name: partial(write_by_class, name=name)
        for name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer")
    },
}
MODEL_TYPES = {
    "byte level": "llama",
    "Qwen2Tokenizer": "qwen3",
    "Qwen3_5Tokenizer": "qwen3_5_text",
    "GemmaTokenizer": "gemma3_text",
    "LlamaTokenizer": "mistral",
}
TEXT = f"in Hé日 👍🏽{END} a . b n't  the</s> <tool> in<s>\r\n <|endoftext|><unk>"


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """A token of the configuration is added, and special tokens stay whole or are split as it says."""
    KINDS[kind](tmp_path)
    for split in (False, True):
        edit_config(tmp_path, "tokenizer_config.json", extra_special_tokens=["<tool> in"], split_special_tokens=split)
        for model_type in {None, MODEL_TYPES.get(kind)}:
            own = HuggingFaceTokenizer(tmp_path, model_type)
            config = {} if model_type is None else {"config": CONFIG_MAPPING[model_type]()}
            theirs = AutoTokenizer.from_pretrained(tmp_path, **config)
            for flag in (False, True):
                ids = theirs.encode(TEXT, add_special_tokens=flag)
                assert own.encode(TEXT, add_special_tokens=flag) == ids
                assert own.decode(ids, skip_special_tokens=flag) == theirs.decode(ids, skip_special_tokens=flag)
            assert all(own.token_text(token) == theirs.decode([token]) for token in ids)
            assert own.chat_template == theirs.chat_template == (CHAT_TEMPLATE if "Tokenizer" in kind else None)
            added = theirs.backend_tokenizer.get_added_tokens_decoder()
            assert own.silent_ids == {token_id for token_id, token in added.items() if token.special}


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
