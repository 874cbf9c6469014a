"""Prefill of long prompts layer by layer: a side of the engine, see `nanovllm.engine.sides.LayerwisePrefill`."""

from nanovllm.layerwise_prefill.runner import LayerwiseOrder

__all__ = ["LayerwiseOrder"]
