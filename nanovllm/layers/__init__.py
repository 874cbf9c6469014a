"""Layers of a network: weights and arithmetic, independent of model families."""
