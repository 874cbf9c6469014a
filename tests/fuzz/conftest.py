"""Time for the fuzz tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bounded import FuzzTarget


@pytest.fixture
def fuzz_run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[[FuzzTarget], None]:
    """Runs a target for this test's share of the time that all tests with this fixture have together, and says so."""
    sharing = sum("fuzz_run" in getattr(item, "fixturenames", ()) for item in request.session.items)
    seconds = float(os.environ.get("NANOVLLM_FUZZ_SECONDS", "60")) / max(sharing, 1)

    def run(target: FuzzTarget) -> None:
        counts = target.run_for(seconds, int(os.environ.get("NANOVLLM_FUZZ_SEED", "0")))
        with capsys.disabled():
            print(counts)

    return run
