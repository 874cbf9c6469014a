"""An engine that cannot take part: reported by name, while the others go on."""

from __future__ import annotations

import re

NAMES_AN_ERROR = re.compile(r"^(\w+\.)*(\w*Error|\w*Exception|Killed)\b", re.IGNORECASE)


class EngineFailure(RuntimeError):
    """Why, in one sentence."""


def last_line(text: str) -> str:
    """Where programs say what went wrong: the last line that names an error, since warnings may follow, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if NAMES_AN_ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1]
