"""Time for the fuzz tests, and their counts at the end of the run."""

from __future__ import annotations

import os
from typing import Any

import pytest
from bounded import FuzzCount, FuzzRun, FuzzTarget

SECONDS = "NANOVLLM_FUZZ_SECONDS"
DEFAULT_SECONDS = 60.0
SEED = "NANOVLLM_FUZZ_SEED"
COUNT = "fuzz count"  # a property of the test, which reaches the summary from other processes too


@pytest.fixture
def fuzz_run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> FuzzRun:
    """Runs a target for this test's share of the time that all tests with this fixture have together."""
    first_seed = int(os.environ.get(SEED, "0"))
    sharing = sum("fuzz_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    seconds = float(os.environ.get(SECONDS, DEFAULT_SECONDS)) / max(sharing, 1)

    def run(target: FuzzTarget) -> FuzzCount:
        try:
            return target.run_for(seconds, first_seed)
        finally:
            for line in capsys.readouterr().out.splitlines():
                if line.startswith("fuzz "):
                    request.node.user_properties.append((COUNT, line))

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The counts of every run, also where nothing failed."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, line in getattr(report, "user_properties", ()):
                if name == COUNT and report.when == "call":
                    terminalreporter.write_line(line)
