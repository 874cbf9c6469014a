"""matplotlib, which is an optional dependency."""

from __future__ import annotations

from typing import Any

from nanovllm.errors import ConfigError


def load_pyplot() -> Any:
    """matplotlib.pyplot, set up to draw into files. Raises ConfigError if it cannot be imported."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib, which cannot be imported ({error}): pip install 'nanovllm[plot]', or do"
            " without the picture"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
