"""Checks that run one after the other, each with a verdict of its own."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, inf

from benchmarks.report import machine_facts, write_json

Check = Callable[[], str | None]  # returns a note; raises on an error


@dataclass(frozen=True, slots=True)
class Outcome:
    check: str
    good: bool
    seconds: float
    note: str


def run_checks(checks: Mapping[str, Check], args: argparse.Namespace, device: str) -> int:
    """Run each check and write `args.output_json` after each. Returns the exit status, 1 if a check failed."""
    outcomes: list[Outcome] = []
    width = max(map(len, checks)) + 2
    for name, check in checks.items():
        print(f"{name:<{width}}", end="", flush=True)
        outcomes.append(outcome_of(name, check))
        print(f"{'good' if outcomes[-1].good else 'FAILED':<8}{outcomes[-1].note}", flush=True)
        write_json(args.output_json, args, machine_facts(device), checks=outcomes)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def outcome_of(name: str, check: Check) -> Outcome:
    start = time.perf_counter()
    try:
        good = True
        note = check() or ""
    except Exception as error:  # a failure of any type does not stop the other checks
        traceback.print_exc()
        good = False
        note = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Outcome(name, good, time.perf_counter() - start, note)


def expect_close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Raise AssertionError if any element differs by more than `bound` or is NaN."""
    difference = (actual.double() - expected.double()).abs().nan_to_num(inf).max().item()
    assert difference <= bound, f"off by {difference:g}, {bound:g} is allowed"
