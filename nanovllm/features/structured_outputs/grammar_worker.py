"""The process that reads grammars, which are programs from a request, with bounds on time, memory and stack.

Runs as a script: `python -I -S grammar_worker.py DIRECTORY`, where the directory holds llguidance. It imports nothing
else outside of the standard library. Requests and answers are lines of JSON: {"kind", "text", "options", "limits"}
gives {"grammar"}, what llguidance compiles, or {"error"}.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from typing import Any

CPU_SECONDS = 5  # of one grammar
MEMORY_BYTES = 1 << 30
# Deep grammars recurse in the library, and a stack that overflows ends the process. The engine's threads have 8 MiB.
STACK_BYTES = 1 << 20


def main() -> None:
    """Answer requests until standard input ends."""
    sys.path.insert(0, sys.argv[1])
    import llguidance

    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 16)):
        _lower(limit, value)
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    _lower(resource.RLIMIT_AS, MEMORY_BYTES)
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + CPU_SECONDS))
        try:
            answer = _answer(llguidance, json.loads(line))
        except Exception as error:  # the library raises several types
            answer = {"error": str(error)[:1000] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(library: Any, request: Mapping[str, Any]) -> dict[str, str]:
    """Convert the text to what the library compiles, compile it for a tokenizer of bytes, and make its first mask."""
    grammar = _grammar(library, request["kind"], request["text"], request["options"])
    matcher = library.LLMatcher(
        library.LLTokenizer("byte"), grammar, log_level=0, limits=library.LLParserLimits(**request["limits"])
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error() and "NoExtension" in matcher.get_error():
        return {"error": "it matches nothing"}
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def _grammar(library: Any, kind: str, text: str, options: dict[str, Any]) -> str:
    if kind == "json":
        return str(library.LLMatcher.grammar_from_json_schema(text, defaults=options))
    if kind == "choice":
        # One terminal: its automaton takes thousands of choices, where a parser would follow each of them.
        texts = json.loads(text)
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in texts if choice)
        lark = f"start: CHOICE{'?' if '' in texts else ''}\nCHOICE: {choices}" if choices else "start:"
        return str(library.LLMatcher.grammar_from_lark(lark))
    return str(library.grammar_from(kind, text))


def _lower(limit: int, value: int) -> None:
    """Set a soft limit, as far as the hard one allows."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
