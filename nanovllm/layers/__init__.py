"""Pieces of a network: weights and arithmetic, no knowledge of any model family."""
