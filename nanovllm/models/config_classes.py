"""Transformers' config classes, which supply the families' defaults."""

# No annotations from __future__: `strict` reads types, not their names.
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class LlamaConfig(PreTrainedConfig):
    """`transformers.LlamaConfig` with its defaults and its check, as far as a decoder depends on them.

    Importing the original takes two seconds: of all families it alone imports the activations, and with them torch's
    compiler.
    """

    model_type = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention heads "
                f"({self.num_attention_heads})."
            )


def config_class(model_type: str) -> Any:
    """The class of a model type of Transformers."""
    if model_type == LlamaConfig.model_type:
        return LlamaConfig
    from transformers import CONFIG_MAPPING  # takes half a second

    return CONFIG_MAPPING[model_type]
