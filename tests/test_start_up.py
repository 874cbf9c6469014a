"""Start-up: what is imported before an answer, and that the shortcuts agree with the libraries that they replace."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
import torch
from checkpoints import FAMILIES, edit_config, make_checkpoint
from cli_helpers import GREEDY, SMALL_CACHE, make_model
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st
from text_cases import QUICK, TEXTS
from tokenizer_files import END, write_by_class, write_byte_fallback, write_byte_level
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.auto import tokenization_auto

from nanovllm import EngineArgs
from nanovllm.apps.recall import write_word_tokenizer
from nanovllm.errors import ModelError
from nanovllm.formats import tokenizer_classes
from nanovllm.formats.gguf.tokenizer import merges_by_score
from nanovllm.memory import profiling
from nanovllm.models import families
from nanovllm.models.decoder import Decoder
from nanovllm.models.family import Family, complete_config
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.text.chat_template import NOT_VARIABLES
from nanovllm.text.tokenizer import HuggingFaceTokenizer

SLOW = ("transformers", "torch._dynamo", "sympy", "torch.distributed.tensor")
GENERATE = f"""
import sys
from nanovllm.apps.cli.main import main
assert main(sys.argv[1:]) == 0
found = [name for name in {SLOW} if name in sys.modules]
assert not found, found
"""
OFFLOADED = ("--enable-cpu-offload", "--num-cpu-blocks", "64", "--max-num-batched-tokens", "64")


@pytest.mark.parametrize("kind, options", [("directory", OFFLOADED), pytest.param("gguf", (), marks=pytest.mark.slow)])
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
@settings(QUICK, max_examples=15)
def test_configs_are_completed_as_by_transformers(family: Family, data: st.DataObject) -> None:
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
        "full_attention_interval": st.integers(1, 4),
        "num_experts": st.integers(1, 4),
        "num_local_experts": st.integers(1, 4),
        "mlp_only_layers": st.none() | st.just([1]),
        "eos_token_id": st.sampled_from([None, 3, [3, 4]]),
    }
    known = {name: value for name, value in values.items() if family.reads(name)}
    heads = {"num_attention_heads": known.pop("num_attention_heads")}  # hidden_size is a multiple of them
    fields = data.draw(st.fixed_dictionaries(heads, optional=known))
    if "num_experts" in fields:  # the engine refuses a config with two counts
        fields.pop("num_local_experts", None)
    config_class = CONFIG_MAPPING[family.model_type]
    types = get_type_hints(config_class, localns={"torch": torch})
    # Where Transformers wants a number, the engine takes null for a missing one.
    may_be_none = {name for name in fields if NoneType in get_args(types.get(name, int | None))}
    fields = {name: value for name, value in fields.items() if value is not None or name in may_be_none}
    try:
        theirs = config_class(**fields)
    except Exception:  # its validators raise many types
        with pytest.raises(ModelError):
            complete_config(family, fields)
        return
    own = complete_config(family, fields)
    theirs.allow_global_per_layer_attribute_access = True  # of a Gemma 4, whose head sizes test_gemma4.py compares
    theirs.head_dim = getattr(theirs, "head_dim", None) or own.head_dim
    left_out = {"sliding_window_pattern", "full_attention_interval"}
    left_out |= {"layer_types"} if getattr(theirs, "layer_types", 0) is None else set()
    left_out |= {"intermediate_size"} if not own.intermediate_size else set()  # all layers have experts
    of_layers = {"global_head_dim", "num_global_key_value_heads", "per_layer_config", "full_head_dim", "full_kv_heads"}
    names = vars(own).keys() - left_out - of_layers
    assert {name: getattr(own, name) for name in names} == {name: getattr(theirs, name) for name in names}
    thetas = theirs.default_theta
    both = thetas if isinstance(thetas, dict) else dict.fromkeys(("global", "local"), thetas)
    assert both == {"global": family.theta, "local": family.local_theta or family.theta}


def test_every_family_has_its_defaults() -> None:
    """A field that a family reads and Transformers has is in the table, so that no attribute is missing later."""
    for family in families.FAMILIES.values():
        theirs = CONFIG_MAPPING[family.model_type]()
        own = complete_config(family, {"head_dim": 128})
        others = {"architectures", "model_type", "rope_parameters", "dtype", "num_local_experts"}
        fields = {name for name in theirs.to_dict() if family.reads(name)} - others
        assert fields <= vars(own).keys(), family.model_type


# ---- tokenizers

KINDS: dict[str, Any] = {
    "byte level": write_byte_level,
    "byte fallback": write_byte_fallback,
    "words": lambda path: write_word_tokenizer(path, 200),
}


def _as_published(path: Path, name: str) -> None:
    """As checkpoints on the hub have them: what else their files hold has no effect, or repeats tokenizer.json."""
    own = {"boi_token": END, "extra_special_tokens": {"image_token": END}} if name == "GemmaTokenizer" else {}
    write_by_class(path, name)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    parts = (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", [tokenizer["pre_tokenizer"]])
    for part in (*parts, tokenizer["decoder"]):
        if part["type"] == "ByteLevel":
            part["trim_offsets"] = False
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit_config(
        path,
        "tokenizer_config.json",
        **{"added_tokens_decoder": {str(token.pop("id")): token for token in tokenizer["added_tokens"]}},
        **{"add_bos_token": True, "legacy": False, "processor_class": "Processor", "sp_model_kwargs": None},
        **({} if own else {"additional_special_tokens": [END]}),
        **own,
    )


def _legacy(path: Path) -> None:
    write_by_class(path, "LlamaTokenizer", legacy=True)
    edit_config(path, "tokenizer_config.json", legacy=True)


CLASSES = ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer")
KINDS |= {name: partial(write_by_class, name=name) for name in CLASSES}
KINDS |= {f"{name}Fast as published": partial(_as_published, name=name) for name in CLASSES}
KINDS |= {
    "LlamaTokenizer without a prefix": partial(write_by_class, name="LlamaTokenizer", add_prefix_space=False),
    "LlamaTokenizer as it was": _legacy,
}
PAIRS = [(kind, None) for kind in KINDS] + [(name, "llama") for name in ("byte level", "byte fallback", *CLASSES)]
PAIRS += [("Qwen2Tokenizer", name) for name in ("qwen2", "qwen3", "qwen3_moe", "qwen3_next")]
PAIRS += [("Qwen3_5Tokenizer", name) for name in ("qwen3_5_text", "qwen3_5_moe_text")]
PAIRS += [("GemmaTokenizer", "gemma3_text"), ("LlamaTokenizer", "mistral"), ("LlamaTokenizer", "phi3")]


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceTokenizer, Any]:
    """A tokenizer that is read without Transformers, and Transformers' own."""
    kind, model_type = request.param
    path = tmp_path_factory.mktemp("tokenizer")
    KINDS[kind](path)
    own = HuggingFaceTokenizer(path, model_type)
    assert own._fast is not None
    config = {} if model_type is None else {"config": CONFIG_MAPPING[model_type]()}
    return own, AutoTokenizer.from_pretrained(path, **config)


@given(text=TEXTS, bos=st.booleans(), skip=st.booleans())
@QUICK
def test_tokenizers_are_those_of_transformers(
    pair: tuple[HuggingFaceTokenizer, Any], text: str, bos: bool, skip: bool
) -> None:
    own, theirs = pair
    for each in (text, f"in {text}{END} a . b n't  the</s> <tool> in<s>\r\n <|endoftext|><unk>"):
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
    own = HuggingFaceTokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert own._fast is None
    text = f"in <more> <image>  {END} a"
    assert own.encode(text) == theirs.encode(text)


def _edit_tokenizer(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    change(tokenizer)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def _swap_last(file: dict[str, Any]) -> None:
    first = len(file["model"]["vocab"])
    last = file["added_tokens"][-1]
    file["added_tokens"].append({**last, "content": "<new>", "id": first})
    last["id"] = first + 1


DIGITS = {"type": "Digits", "individual_digits": True}
BUILT_OTHERWISE: dict[str, Callable[[dict[str, Any]], object]] = {
    "normalizer": lambda file: file.update(normalizer={"type": "Lowercase"}),
    "pre-tokenizer": lambda file: file.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS, file["pre_tokenizer"]]}
    ),
    "decoder": lambda file: file.update(decoder={"type": "Fuse"}),
    "merges are ignored": lambda file: file["model"].update(ignore_merges=True),
    "unknown token": lambda file: file["model"].update(unk_token="in"),
    "a named token is no special one": lambda file: file["added_tokens"][0].update(special=False),
    "added tokens in another order": _swap_last,
}


@pytest.mark.parametrize("name", fast_only(["Qwen2Tokenizer", "LlamaTokenizer"], CLASSES))
@pytest.mark.parametrize("change", BUILT_OTHERWISE)
def test_a_file_that_its_class_would_change_is_read_by_transformers(name: str, change: str, tmp_path: Path) -> None:
    write_by_class(tmp_path, name)
    assert HuggingFaceTokenizer(tmp_path)._fast is not None
    _edit_tokenizer(tmp_path, BUILT_OTHERWISE[change])
    own = HuggingFaceTokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert own._fast is None
    text = "A the 12 <tool> <new><s>~<|endoftext|> in"
    assert own.encode(text) == theirs.encode(text)


def test_classes_of_models_are_those_of_transformers() -> None:
    for family in families.FAMILIES.values():
        theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(family.model_type)
        own = tokenizer_classes.CLASSES.get(family.model_type)
        assert own == (tokenizer_classes.GENERIC if theirs == "MistralCommonBackend" else theirs), family.model_type
        overridden = family.model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert tokenizer_classes.class_name({"tokenizer_class": "X"}, family.model_type, "") == (
            own if overridden or own == tokenizer_classes.GENERIC else "X"
        )


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
@pytest.mark.parametrize("dtype", fast_only([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
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
