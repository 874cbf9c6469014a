"""Time for the fuzz tests, and their counts at the end of the run."""

from __future__ import annotations

import os
from typing import Any

import pytest
from bounded import FuzzCount, FuzzRun, FuzzTarget

SECONDS = "NANOVLLM_FUZZ_SECONDS"
DEFAULT_SECONDS = 600.0
COUNTS = pytest.StashKey[list[str]]()


@pytest.fixture
def fuzz_run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> FuzzRun:
    """Runs a target for this test's share of the time that all tests with this fixture have together."""
    sharing = sum("fuzz_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    seconds = float(os.environ.get(SECONDS, DEFAULT_SECONDS)) / max(sharing, 1)
    counts = request.config.stash.setdefault(COUNTS, [])

    def run(target: FuzzTarget) -> FuzzCount:
        try:
            return target.run_for(seconds)
        finally:
            counts.extend(line for line in capsys.readouterr().out.splitlines() if line.startswith("fuzz "))

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The counts of every run, also where nothing failed."""
    for line in config.stash.get(COUNTS, []):
        terminalreporter.write_line(line)
