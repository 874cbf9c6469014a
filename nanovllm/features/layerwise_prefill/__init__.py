"""Prefill of long prompts layer by layer: a side of the engine, see `nanovllm.engine.sides.LayerwisePrefill`."""
