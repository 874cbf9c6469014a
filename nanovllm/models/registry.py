"""The architectures that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.models.family import Family
from nanovllm.models.llama import LLAMA
from nanovllm.models.mistral import MISTRAL
from nanovllm.models.qwen2 import QWEN2
from nanovllm.models.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = MappingProxyType({f.architecture: f for f in (QWEN3, QWEN2, LLAMA, MISTRAL)})
