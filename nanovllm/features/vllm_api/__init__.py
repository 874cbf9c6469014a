"""Beam search, scored choices and metrics with vLLM's names: a side, see `nanovllm.engine.sides.VllmApi`."""

from nanovllm.features.vllm_api.beam_search import beam_search
from nanovllm.features.vllm_api.choices import score_choices
from nanovllm.features.vllm_api.metrics_reader import RequestHistograms, snapshot

__all__ = ["RequestHistograms", "beam_search", "score_choices", "snapshot"]
