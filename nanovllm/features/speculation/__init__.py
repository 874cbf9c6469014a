"""Speculative decoding: guesses of what follows, verified several in a pass. Outputs are those without it."""
