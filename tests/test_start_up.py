"""Start-up: what is imported before an answer, and that the shortcuts agree with the libraries that they replace."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, edit_config, make_checkpoint
from cli_helpers import GREEDY, SMALL_CACHE, make_model
from hypothesis import given
from hypothesis import strategies as st
from text_cases import QUICK, TEXTS
from tokenizer_files import END, write_byte_fallback, write_byte_level
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import generate_merges

from nanovllm import EngineArgs
from nanovllm.chat_template.template import NOT_VARIABLES
from nanovllm.engine import profiling
from nanovllm.errors import ModelError
from nanovllm.gguf.tokenizer import merges_by_score
from nanovllm.models import families
from nanovllm.models.decoder import Decoder
from nanovllm.models.family_defaults import complete_config
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.recall import write_word_tokenizer
from nanovllm.tokenizer import HuggingFaceTokenizer

SLOW = ("transformers", "torch._dynamo", "sympy", "torch.distributed.tensor")
GENERATE = f"""
import sys
from nanovllm.cli.main import main
assert main(sys.argv[1:]) == 0
found = [name for name in {SLOW} if name in sys.modules]
assert not found, found
"""
OFFLOADED = ("--enable-cpu-offload", "--num-cpu-blocks", "64", "--max-num-batched-tokens", "64")


@pytest.mark.parametrize("options", [(), OFFLOADED], ids=("resident", "offloaded"))
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_an_answer_needs_no_slow_import(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    if kind == "gguf":
        pytest.importorskip("gguf", reason="the package gguf is not installed")
        from tiny_gguf import write_tiny_gguf

        write_tiny_gguf(tmp_path / "model.gguf")
        model = str(tmp_path / "model.gguf")
    else:
        model = make_model(tmp_path)
    command = [sys.executable, "-c", GENERATE, "generate", "--model", model, *SMALL_CACHE, *options, *GREEDY, "a b"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


# ---- defaults of configs


@pytest.mark.parametrize("family", families.FAMILIES.values(), ids=lambda family: family.model_type)
@given(data=st.data())
@QUICK
def test_configs_are_completed_as_by_transformers(family: families.Family, data: st.DataObject) -> None:
    values: dict[str, st.SearchStrategy[Any]] = {
        "num_hidden_layers": st.integers(1, 9),
        "num_attention_heads": st.sampled_from([1, 4, 8]),
        "num_key_value_heads": st.sampled_from([None, 1, 2]),
        "hidden_size": st.sampled_from([64, 96]),
        "head_dim": st.sampled_from([None, 16]),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.sampled_from([None, 5]),
        "max_window_layers": st.integers(0, 4),
        "layer_types": st.none() | st.lists(st.just("full_attention"), max_size=4),
        "sliding_window_pattern": st.integers(1, 4),
        "num_experts": st.integers(1, 4),
        "num_local_experts": st.integers(1, 4),
        "mlp_only_layers": st.none() | st.just([1]),
        "eos_token_id": st.sampled_from([None, 3, [3, 4]]),
    }
    known = {name: value for name, value in values.items() if family.reads(name)}
    fields = data.draw(st.fixed_dictionaries({}, optional=known))
    if "num_experts" in fields:  # the engine refuses a config with two counts
        fields.pop("num_local_experts", None)
    try:
        theirs = CONFIG_MAPPING[family.model_type](**fields)
    except Exception:  # its validators raise many types
        with pytest.raises(ModelError):
            complete_config(family.model_type, fields)
        return
    own = complete_config(family.model_type, fields)
    own.head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads  # as `decoder_spec`
    theirs.head_dim = getattr(theirs, "head_dim", None) or own.head_dim
    names = [name for name in vars(own) if name != "sliding_window_pattern"]
    assert {name: getattr(own, name) for name in names} == {name: getattr(theirs, name) for name in names}


def test_every_family_has_its_defaults() -> None:
    """A field that a family reads and Transformers has is in the table, so that no attribute is missing later."""
    for family in families.FAMILIES.values():
        theirs, own = CONFIG_MAPPING[family.model_type](), complete_config(family.model_type, {})
        others = {"architectures", "model_type", "rope_parameters", "dtype", "num_local_experts"}
        fields = {name for name in theirs.to_dict() if family.reads(name)} - others
        assert fields <= vars(own).keys(), family.model_type


# ---- tokenizers

KINDS: dict[str, Any] = {
    "byte level": write_byte_level,
    "byte fallback": write_byte_fallback,
    "words": lambda path: write_word_tokenizer(path, 200),
}


PAIRS = [(kind, model_type) for kind in KINDS for model_type in (None, "llama")]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceTokenizer, Any]:
    """A tokenizer that is read without Transformers, and Transformers' own."""
    kind, model_type = request.param
    path = tmp_path_factory.mktemp("tokenizer")
    KINDS[kind](path)
    own = HuggingFaceTokenizer(path, model_type)
    assert own._fast is not None
    return own, AutoTokenizer.from_pretrained(path)


@given(text=TEXTS, bos=st.booleans(), skip=st.booleans())
@QUICK
def test_tokenizers_are_those_of_transformers(
    pair: tuple[HuggingFaceTokenizer, Any], text: str, bos: bool, skip: bool
) -> None:
    own, theirs = pair
    for each in (text, f"in {text}{END} a . b n't  the</s>"):
        ids = theirs.encode(each, add_special_tokens=bos)
        assert own.encode(each, add_special_tokens=bos) == ids
        assert own.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert all(own.token_text(token) == theirs.decode([token]) for token in ids)


def test_what_else_is_asked_of_tokenizers_is_that_of_transformers(pair: tuple[HuggingFaceTokenizer, Any]) -> None:
    own, theirs = pair
    assert own.chat_template == theirs.chat_template
    assert own.special_tokens_map == theirs.special_tokens_map
    added = theirs.backend_tokenizer.get_added_tokens_decoder()
    assert own.silent_ids == {token_id for token_id, token in added.items() if token.special}


# What the configuration changes of tokenizer.json: Transformers has to do it.
CHANGES: dict[str, dict[str, Any]] = {
    "a class that rebuilds it": {"tokenizer_class": "GPT2Tokenizer"},
    "an unknown field": {"image_token": "<image>"},
    "a token that is no special one": {"bos_token": "a"},
    "a further special token": {"additional_special_tokens": ["<more>"]},
    "a token with other properties": {
        "added_tokens_decoder": {"300": {"content": END, "lstrip": True, "special": True, "normalized": False}}
    },
    "special tokens are split": {"split_special_tokens": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_configuration_changes_is_read_by_transformers(change: str, tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    edit_config(tmp_path, "tokenizer_config.json", **CHANGES[change])
    own, theirs = HuggingFaceTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert own._fast is None
    text = f"in <more> <image>  {END} a"
    assert own.encode(text) == theirs.encode(text)


def test_a_generic_class_is_not_what_qwen2_gets(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    assert HuggingFaceTokenizer(tmp_path, "qwen2")._fast is None
    assert HuggingFaceTokenizer(tmp_path, "qwen3")._fast is not None


def test_the_tokenizer_of_transformers_is_used_once_somebody_has_it(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    own = HuggingFaceTokenizer(tmp_path)
    before = own.encode("a new word")
    assert isinstance(own.tokenizer, PreTrainedTokenizerBase)
    assert own.encode("a new word") == before and own.backend is own.tokenizer.backend_tokenizer
    own.tokenizer.add_tokens(["new"])
    assert len(own.encode("a new word")) == len(before) - 2


def test_template_arguments_are_those_of_transformers() -> None:
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(parameters) - {"self", "documents"} <= NOT_VARIABLES


@given(
    scores=st.dictionaries(st.text("ab▁", min_size=1, max_size=5), st.sampled_from([0.0, -1.0, -2.5]), max_size=30),
    special=st.sets(st.text("ab▁", min_size=1, max_size=2), max_size=2),
)
@QUICK
def test_merges_follow_from_scores_as_in_transformers(scores: dict[str, float], special: set[str]) -> None:
    vocab = {text: index for index, text in enumerate(scores)}
    assert merges_by_score(vocab, scores, special) == generate_merges(vocab, scores, special)


# ---- the bytes of a step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_takes_the_bytes_that_torch_counts(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of operators here are those of torch's own functions for meta tensors."""
    make_checkpoint(tmp_path, family, vocab=3000)
    decoder = Decoder(load_decoder_spec(tmp_path), dtype, torch.device("cpu"))
    config = EngineArgs(model=str(tmp_path), max_num_batched_tokens=300).create_engine_config()
    own = profiling.activation_peak(decoder, config)
    monkeypatch.setattr(profiling, "meta_result", lambda func, args, kwargs: None)
    assert own == profiling.activation_peak(decoder, config)
