"""Whether a model can be drafted for, by its own head or by another model."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, quoted
from nanovllm.formats.hub import is_gguf
from nanovllm.models.loader import holds_mtp_head
from nanovllm.models.registry import ARCHITECTURES
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

OTHERS = "use method='ngram' or 'draft_model'"


def check_mtp_head(config: EngineConfig, architecture: str) -> None:
    """Raise ConfigError unless models of this kind have a head for multi-token prediction that is read."""
    if not ARCHITECTURES[architecture].has_mtp_head or is_gguf(config.model):
        what = "GGUF file" if is_gguf(config.model) else architecture
        raise ConfigError(
            f"speculative_config: method='mtp': of a {what} no head for multi-token prediction is read: {OTHERS}"
        )


def check_mtp_weights(config: EngineConfig) -> None:
    """Raise ConfigError unless the checkpoint has the weights of the head."""
    if config.load_format != "dummy" and not holds_mtp_head(config.model):
        raise ConfigError(
            f"speculative_config: method='mtp': {config.model} has no weights of a head for multi-token prediction "
            f"(mtp.*): {OTHERS}, or get a checkpoint that has them"
        )


def check_vocabulary(name: str, large: tuple[Tokenizer | None, int], draft: tuple[Tokenizer | None, int]) -> None:
    """Raise ConfigError unless both models mean the same by a token: without tokenizers their sizes tell.

    large, draft: the tokenizer and the number of tokens of the model that is drafted for, and of the draft model.
    """
    (tokenizer, size) = large
    (draft_tokenizer, own_size) = draft
    known = _vocabulary(tokenizer)
    drafted = _vocabulary(draft_tokenizer)
    if known is None or drafted is None:
        is_same = own_size == size
        differs = f"has {own_size:,} tokens, and the model {size:,}"
    else:
        is_same = known == drafted
        differs = "has another tokenizer than the model"
    if not is_same:
        raise ConfigError(
            f"speculative_config: model={quoted(name)} {differs}: take a draft model with the same vocabulary, such as "
            "a smaller one of the same family"
        )


def _vocabulary(tokenizer: Tokenizer | None) -> dict[str, int] | None:
    backend = tokenizer.backend if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return None if backend is None else backend.get_vocab(with_added_tokens=True)
