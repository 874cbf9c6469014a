"""nanovllm: a compact LLM engine that runs prompts whose KV cache is larger than the device's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# torch's threads spin for milliseconds after each of its parallel operators unless told otherwise, on cores that the
# kernels' own threads need. Read when torch is loaded, so without effect where that has happened.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"

if TYPE_CHECKING:
    from nanovllm.apps.batch.predictor import LLMPredictor as LLMPredictor
    from nanovllm.apps.cli.arguments import EngineArgs as EngineArgs
    from nanovllm.apps.server.async_llm import AsyncLLM as AsyncLLM
    from nanovllm.build import build_engine as build_engine
    from nanovllm.client import EngineClient as EngineClient
    from nanovllm.engine.block_pool import KVBlockState as KVBlockState
    from nanovllm.engine.llm_engine import LLMEngine as LLMEngine
    from nanovllm.engine.view import EngineView as EngineView
    from nanovllm.features.vllm_api.beam_search import BeamSearchOutput as BeamSearchOutput
    from nanovllm.features.vllm_api.beam_search import BeamSearchParams as BeamSearchParams
    from nanovllm.features.vllm_api.beam_search import BeamSearchSequence as BeamSearchSequence
    from nanovllm.features.vllm_api.choices import ChoiceScore as ChoiceScore
    from nanovllm.features.vllm_api.metrics_reader import Counter as Counter
    from nanovllm.features.vllm_api.metrics_reader import Gauge as Gauge
    from nanovllm.features.vllm_api.metrics_reader import Histogram as Histogram
    from nanovllm.features.vllm_api.metrics_reader import Metric as Metric
    from nanovllm.kvcache.base import KVStats as KVStats
    from nanovllm.llm import LLM as LLM
    from nanovllm.lora_request import LoRARequest as LoRARequest
    from nanovllm.ops.cpu_kernels import cpu_kernel_choice as cpu_kernel_choice
    from nanovllm.ops.cpu_kernels import cpu_machine as cpu_machine
    from nanovllm.outputs import CompletionOutput as CompletionOutput
    from nanovllm.outputs import Logprob as Logprob
    from nanovllm.outputs import RequestMetrics as RequestMetrics
    from nanovllm.outputs import RequestOutput as RequestOutput
    from nanovllm.outputs import RequestOutputKind as RequestOutputKind
    from nanovllm.sampling_params import SamplingParams as SamplingParams
    from nanovllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from nanovllm.text.chat_template import ChatTemplate as ChatTemplate
    from nanovllm.text.prompts import TextPrompt as TextPrompt
    from nanovllm.text.prompts import TokensPrompt as TokensPrompt

__version__ = "0.2.0"

_NAMES = {  # by module: what users and applications import from here
    "nanovllm.apps.batch.predictor": "LLMPredictor",
    "nanovllm.apps.cli.arguments": "EngineArgs",
    "nanovllm.apps.server.async_llm": "AsyncLLM",
    "nanovllm.build": "build_engine",
    "nanovllm.client": "EngineClient",
    "nanovllm.engine.llm_engine": "LLMEngine",
    "nanovllm.engine.block_pool": "KVBlockState",
    "nanovllm.engine.view": "EngineView",
    "nanovllm.lora_request": "LoRARequest",
    "nanovllm.features.vllm_api.beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "nanovllm.features.vllm_api.choices": "ChoiceScore",
    "nanovllm.features.vllm_api.metrics_reader": "Counter Gauge Histogram Metric",
    "nanovllm.kvcache.base": "KVStats",
    "nanovllm.llm": "LLM",
    "nanovllm.ops.cpu_kernels": "cpu_kernel_choice cpu_machine",
    "nanovllm.outputs": "CompletionOutput Logprob RequestMetrics RequestOutput RequestOutputKind",
    "nanovllm.sampling_params": "SamplingParams StructuredOutputsParams",
    "nanovllm.text.chat_template": "ChatTemplate",
    "nanovllm.text.prompts": "TextPrompt TokensPrompt",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the scheduler and the block manager can be imported without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
