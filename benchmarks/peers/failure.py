"""The failure of an engine, which is reported while the others continue."""

from __future__ import annotations

import re

NAMES_AN_ERROR = re.compile(r"^(\w+\.)*(\w*Error|\w*Exception|Killed)\b", re.IGNORECASE)


class EngineFailure(RuntimeError):
    """The message is one sentence."""


def last_line(text: str) -> str:
    """The last line of output that names an error, since warnings may follow it, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if NAMES_AN_ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1]
