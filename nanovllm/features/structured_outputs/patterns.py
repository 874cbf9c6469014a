"""Patterns of JSON schemas, which are ECMA's regular expressions, in the syntax of other libraries."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\(?:c[A-Za-z]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|[pPx]\{[^}]*\}|(?s:.))|(?s:.)")
CONTROL = {"\\0": "\\x00"}
# The library takes quotes and backslashes for a class with all control characters, so none of them keeps NUL.
NEGATED = "[^\\x00"
NULS = ("\\x00", "\\u0000", "\\u{0}", "\0")
SET_OPERATORS = ("&", "-", "~")  # doubled, they are operators in the library's classes and characters in ECMA's


def for_library(pattern: str) -> str:
    """The pattern as Rust's regex syntax writes it. Invalid ones stay invalid."""
    tokens = TOKEN.findall(pattern)
    text: list[str] = []
    inside = False  # a class
    for index, token in enumerate(tokens):
        if token.startswith("\\c"):
            token = f"\\x{ord(token[2]) % 32:02x}"
        token = CONTROL.get(token, token)
        if inside and token == "\\b":
            token = "\\x08"
        elif inside and (token == "[" or (token in SET_OPERATORS and text[-1] in (token, f"\\{token}"))):
            token = f"\\{token}"
        elif not inside and token == "{" and not re.match(r"\{[0-9]+(,[0-9]*)?\}", "".join(tokens[index : index + 20])):
            token = "\\{"
        elif inside and token in NULS and tokens[index + 1 : index + 2] == ["-"]:
            token = "\\x01"
        elif not inside and token == "[":
            inside = True
            ahead = "".join(tokens[index : index + 3])
            if ahead.startswith(("[]", "[^]")):
                token = "[^\\s\\S" if ahead.startswith("[]") else "[\\s\\S"
            elif ahead.startswith("[^"):
                token = NEGATED
                tokens[index + 2 : index + 3] = ["\\-"] if ahead == "[^-" else tokens[index + 2 : index + 3]
            if ahead.startswith("[^"):
                tokens[index + 1] = ""
        elif inside and token == "]":
            inside = False
        text.append(token)
    return "".join(text)


def is_plain(pattern: str) -> bool:
    """Whether all dialects of regular expressions mean the same by it, for texts without line breaks at their end."""
    rest = re.sub(r"\\[dDwW.\-/^$*+?()\[\]{}|\\]", "", pattern)
    unusual = ("\\", "(?", "&&", "--", "~~", "||", "[[", "[]", "[^]", "{,", "[:")
    return rest.isascii() and not any(mark in rest for mark in unusual)


def for_python(pattern: str) -> str:
    """A pattern that `is_plain`, for Python: there `$` also stands before a last line break."""
    return re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", lambda found: r"\Z" if found[0] == "$" else found[0], pattern)
