"""Patterns of JSON schemas, which are ECMA's regular expressions, in the syntax of other libraries."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[upPx]\{[^}]*\}|.)|.", re.DOTALL)
REPEATS = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
NUL = "\\x00"
NULS = (NUL, "\\u0000", "\\u{0}", "\0")
SET_OPERATORS = ("&", "-", "~")  # doubled, they are operators in the library's classes and characters in ECMA's


def for_library(pattern: str) -> str:
    """The pattern as Rust's regex syntax writes it. Invalid ones stay invalid.

    A class with all control characters takes quotes and backslashes in the library, so that no class keeps NUL.
    """
    tokens = TOKEN.findall(pattern)
    text: list[str] = []
    in_class = False
    for index, token in enumerate(tokens):
        before = text[-1] if text else ""
        if not in_class:
            in_class = token == "["
            if token == "{" and not REPEATS.match("".join(tokens[index : index + 20])):
                token = "\\{"
        elif token == "]":
            in_class = False
        elif token == "^" and before == "[":
            token = f"^{NUL}"
        elif token in NULS and tokens[index + 1 : index + 2] == ["-"]:
            token = "\\x01"
        elif (
            token == "["
            or (token == "-" and before == f"^{NUL}")
            or (token in SET_OPERATORS and before in (token, f"\\{token}"))
        ):
            token = f"\\{token}"
        text.append(token)
    return "".join(text)


def is_plain(pattern: str) -> bool:
    """Whether all dialects of regular expressions mean the same by it, for texts without line breaks at their end."""
    rest = re.sub(r"\\[dDwW.\-/^$*+?()\[\]{}|\\]", "", pattern)
    unusual = ("\\", "(?", "&&", "--", "~~", "||", "[[", "[]", "[^]", "{,", "[:")
    return rest.isascii() and not any(mark in rest for mark in unusual)


def for_python(pattern: str) -> str:
    """A pattern that `is_plain`, for Python: there `$` also stands before a last line break."""
    return re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", lambda match: r"\Z" if match[0] == "$" else match[0], pattern)
