"""The architectures that are computed: the names in config.json, and the classes of the model files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.layers.causal_lm import CausalLM
from nanovllm.models.gemma3 import Gemma3ForCausalLM
from nanovllm.models.gemma4 import Gemma4ForCausalLM
from nanovllm.models.glm4_moe import Glm4MoeForCausalLM
from nanovllm.models.gpt_oss import GptOssForCausalLM
from nanovllm.models.llama import LlamaForCausalLM, Ministral3ForCausalLM, MistralForCausalLM, SeedOssForCausalLM
from nanovllm.models.minimax_m2 import MiniMaxM2ForCausalLM
from nanovllm.models.mixtral import MixtralForCausalLM
from nanovllm.models.olmo3 import Olmo2ForCausalLM, Olmo3ForCausalLM
from nanovllm.models.phi3 import Phi3ForCausalLM
from nanovllm.models.qwen3 import Qwen2ForCausalLM, Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.qwen3_next import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM

_MODELS: tuple[type[CausalLM], ...] = (
    Qwen3ForCausalLM,
    Qwen2ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Ministral3ForCausalLM,
    Phi3ForCausalLM,
    Qwen3MoeForCausalLM,
    MixtralForCausalLM,
    SeedOssForCausalLM,
    GptOssForCausalLM,
    Olmo3ForCausalLM,
    Olmo2ForCausalLM,
    Glm4MoeForCausalLM,
    MiniMaxM2ForCausalLM,
    Qwen3NextForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
)
ARCHITECTURES: Mapping[str, type[CausalLM]] = MappingProxyType({model.__name__: model for model in _MODELS})
