"""nanovllm: a compact LLM engine that runs prompts whose KV cache is larger than the device's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# torch's threads spin for milliseconds after each of its parallel operators unless told otherwise, on cores that the
# kernels' own threads need. Read when torch is loaded, so without effect where that has happened.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"

if TYPE_CHECKING:
    from nanovllm.apps.cli.engine_args import EngineArgs
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.features.vllm_api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from nanovllm.features.vllm_api.choices import ChoiceScore
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, RequestOutputKind
    from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
    from nanovllm.text.prompts import TextPrompt, TokensPrompt

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChoiceScore",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "BeamSearchOutput": "nanovllm.features.vllm_api.beam_search",
    "BeamSearchParams": "nanovllm.features.vllm_api.beam_search",
    "BeamSearchSequence": "nanovllm.features.vllm_api.beam_search",
    "ChoiceScore": "nanovllm.features.vllm_api.choices",
    "CompletionOutput": "nanovllm.outputs",
    "EngineArgs": "nanovllm.apps.cli.engine_args",
    "LLM": "nanovllm.llm",
    "LLMEngine": "nanovllm.engine.llm_engine",
    "Logprob": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "RequestOutputKind": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputsParams": "nanovllm.sampling_params",
    "TextPrompt": "nanovllm.text.prompts",
    "TokensPrompt": "nanovllm.text.prompts",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the scheduler and the block manager can be imported without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
