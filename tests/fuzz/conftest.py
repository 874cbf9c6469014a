"""Time for the fuzz tests, and their counts at the end of the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from bounded import FuzzTarget

COUNTS = "fuzz counts"  # a property of the test, which reaches the summary from other processes too


@pytest.fixture
def fuzz_run(request: pytest.FixtureRequest) -> Callable[[FuzzTarget], None]:
    """Runs a target for this test's share of the time that all tests with this fixture have together."""
    sharing = sum("fuzz_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    seconds = float(os.environ.get("NANOVLLM_FUZZ_SECONDS", "60")) / max(sharing, 1)

    def run(target: FuzzTarget) -> None:
        counts = target.run_for(seconds, int(os.environ.get("NANOVLLM_FUZZ_SEED", "0")))
        request.node.user_properties.append((COUNTS, counts))

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, counts in report.user_properties:
            if name == COUNTS:
                terminalreporter.write_line(counts)
