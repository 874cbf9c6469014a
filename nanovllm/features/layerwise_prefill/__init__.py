"""Prefill of long prompts layer by layer."""
