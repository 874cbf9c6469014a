"""Side: batches of rows, from files to files, on one machine or over a cluster of Ray; and a class for Ray Data."""

from __future__ import annotations

from nanovllm import LLMPredictor

__all__ = ["LLMPredictor"]
