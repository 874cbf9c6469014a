"""Finding the module of a side. The core imports none by name, so that it runs without them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def find_side(module: str) -> Any | None:
    """The module, or None if it is not installed. An error within an installed module is raised."""
    package, _, _ = module.rpartition(".")
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        return None
    return importlib.import_module(module)
