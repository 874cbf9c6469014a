"""Transformers' tokenizer classes that take only the vocabulary of tokenizer.json and build the rest themselves.

They give the tokenizer of the file if the file's other parts are theirs, as in checkpoints that they wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from nanovllm.formats.gguf.pre_tokenizers import ONE_DIGIT, QWEN_3_5

GENERIC = "TokenizersBackend"  # loads tokenizer.json as it is
_GENERIC_NAMES = ("PreTrainedTokenizerFast", GENERIC)
# The class of each model type that has one in Transformers. It counts for more than the checkpoint's own where it is
# the generic one, and for the models of _OVERRIDDEN.
CLASSES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("mistral", "ministral3", "mixtral", "phi3", "olmo3", "glm4_moe", "minimax_m2"), GENERIC),
        **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
        **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
        "gemma3_text": "GemmaTokenizer",
    }
)
_OVERRIDDEN = ("qwen2", "qwen3_5_moe_text")
_SPACE = "▁"  # SentencePiece's mark
_END = "<|endoftext|>"
_MODEL_OPTIONS = (
    *("byte_fallback", "fuse_unk", "ignore_merges", "dropout", "unk_token"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """What a class builds around a vocabulary and its merges.

    special: its named tokens, where a checkpoint names no other. model: options of the model, where they are not off.
    """

    special: Mapping[str, str]
    decoder: Any
    pre_tokenizer: Any
    normalizer: Any = None
    model: Mapping[str, Any] = field(default_factory=dict)

    def builds(self, backend: Tokenizer) -> bool:
        """Whether the class would build this tokenizer, apart from added tokens."""
        model = backend.model
        if not isinstance(model, BPE):
            return False
        same = all((getattr(model, name) or None) == self.model.get(name) for name in _MODEL_OPTIONS)
        parts = ((part, getattr(backend, part)) for part in ("normalizer", "pre_tokenizer", "decoder"))
        return same and all(_effect(found) == _effect(getattr(self, part)) for part, found in parts)


def class_name(config: Mapping[str, Any], model_type: str | None, file: str) -> str | None:
    """The class that Transformers takes for tokenizer_config.json's fields; None if that is not known here.

    file: the text of tokenizer.json.
    """
    if config.get("auto_map"):
        return None
    own = config.get("tokenizer_class")
    registered = CLASSES.get(model_type or "")
    if own is None:
        return registered or GENERIC
    name = GENERIC if own in _GENERIC_NAMES else str(own).removesuffix("Fast")
    if registered == GENERIC or model_type in _OVERRIDDEN:
        return registered
    return GENERIC if name == "LlamaTokenizer" and '"ByteLevel"' in file else name


def built_by(name: str, config: Mapping[str, Any]) -> BuiltTokenizer | None:
    """What a class builds for tokenizer_config.json's fields; None if the class is not known here."""
    make = _MAKERS.get(name)
    return None if make is None else make(config)


def _qwen(config: Mapping[str, Any], pattern: str) -> BuiltTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    return BuiltTokenizer(
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
        decoders.ByteLevel(),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]),
        normalizers.NFC(),
    )


def _gpt2(config: Mapping[str, Any]) -> BuiltTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    return BuiltTokenizer(
        dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END), decoders.ByteLevel(), byte_level
    )


def _llama(config: Mapping[str, Any]) -> BuiltTokenizer:
    given = config.get("add_prefix_space")
    prefix = True if given is None else bool(given)
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    return BuiltTokenizer(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]),
        pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False),
        model={"fuse_unk": True, "byte_fallback": True},
    )


def _gemma(config: Mapping[str, Any]) -> BuiltTokenizer:
    names = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
    return BuiltTokenizer(
        names,
        decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        normalizers.Replace(" ", _SPACE),
        {"fuse_unk": True, "byte_fallback": True, "unk_token": config.get("unk_token", names["unk_token"])},
    )


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], BuiltTokenizer]] = MappingProxyType(
    {
        "Qwen2Tokenizer": partial(_qwen, pattern=ONE_DIGIT),
        "Qwen3_5Tokenizer": partial(_qwen, pattern=QWEN_3_5),
        "GPT2Tokenizer": _gpt2,
        "LlamaTokenizer": _llama,
        "GemmaTokenizer": _gemma,
    }
)


def _effect(part: Any) -> Any:
    """A part of a tokenizer as data, without what changes neither ids nor texts."""
    if part is None:
        return None
    if isinstance(part, decoders.ByteLevel):
        return "ByteLevel"
    return _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_offsets(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_offsets(each) for name, each in value.items() if name != "trim_offsets"}
    return value
