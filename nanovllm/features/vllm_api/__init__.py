"""Beam search, scored choices and metrics with vLLM's names."""
