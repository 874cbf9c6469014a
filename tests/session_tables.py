"""How many old tokens agents' sessions compute again in less memory, on engines without a network.

    python tests/session_tables.py [--cache 1 0.5 0.25] [--models ...] [--states DEVICE HOST] [--output-json FILE]

The counts are those of the scheduler and the prefix cache, which `python -m benchmarks.sessions` measures with networks
too, in far more time. A cell shows the most old tokens that one request computes again; the last row of a table shows
how many of all old tokens that is in all requests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from content_model import VOCAB
from session_helpers import CACHE, MODELS, SessionBench

from benchmarks.options import Parser, add_json_option, positive, share
from benchmarks.report import machine_facts, write_json
from benchmarks.session_patterns import PATTERNS, Asked, Talk, cell

BETWEEN = 8192  # tokens of an unrelated prompt before each request
TALK = Talk(vocab=VOCAB)
Played = Mapping[str, list[Asked]]  # by pattern


def summary(played: Played) -> dict[str, Any]:
    asked = [each for of_pattern in played.values() for each in of_pattern]
    return {
        "cells": {pattern: cell(of_pattern) for pattern, of_pattern in played.items()},
        "old_tokens": sum(each.old for each in asked),
        "recomputed_tokens": sum(each.recomputed for each in asked),
    }


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """found: a summary of each model."""
    print(f"| | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}")
    for pattern in PATTERNS:
        print(f"| {pattern} | {' | '.join(each['cells'][pattern] for each in found.values())} |")
    shares = [f"{each['recomputed_tokens'] / each['old_tokens']:.1%}" for each in found.values()]
    print(f"| of all old tokens | {' | '.join(shares)} |\n", flush=True)


def run(args: argparse.Namespace) -> int:
    results = {}
    for way in ("resident", "offloaded"):
        for factor in args.cache:
            tokens = int(CACHE * factor)
            found = {}
            for model in args.models:
                windows, is_recurrent = MODELS[model]
                device, host = args.states
                bench = SessionBench(
                    windows,
                    is_recurrent,
                    offload=way == "offloaded",
                    tokens=tokens,
                    states=(device, host),
                    answer=TALK.answer,
                )
                found[model] = summary(dict(bench.play(TALK, BETWEEN)))
            print(f"Old tokens computed again, {tokens:,} tokens {way}:\n")
            print_table(found)
            results[f"{tokens} {way}"] = found
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    shares = [share(part) for part in ("1", "1/2", "1/4")]
    add("--cache", nargs="+", type=share, default=shares, help=f"shares of {CACHE:,} tokens (default: 1, 1/2 and 1/4)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="kinds of models (default: all)")
    add("--states", nargs=2, type=positive, default=[192, 192], help="slots of recurrent states (default: 192 192)")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
