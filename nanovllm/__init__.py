"""nanovllm: a compact LLM engine that runs prompts whose KV cache is larger than the device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, RequestOutputKind
    from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "nanovllm.llm",
    "CompletionOutput": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "RequestOutputKind": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputsParams": "nanovllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the scheduler and the block manager can be imported without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
