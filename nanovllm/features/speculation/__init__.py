"""Speculative decoding: guesses of what follows, verified several in a pass. Outputs are those without it."""

from nanovllm.features.speculation.draft_model import DraftModel
from nanovllm.features.speculation.drafter import NgramDrafter
from nanovllm.features.speculation.mtp import MTPDrafter

__all__ = ["DraftModel", "MTPDrafter", "NgramDrafter"]
