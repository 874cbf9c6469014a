"""The fuzz runner itself: it counts, stops in time, shrinks a failure, keeps it, and runs it again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import bounded
import pytest
from bounded import FuzzTarget, decode, encode
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bounded, "CASES", tmp_path)
    return tmp_path


def test_values_come_back_from_a_case() -> None:
    value = {"a": [1, -(2**70), 1.5, None, True, "\ud800"], "b": b"\xff\x00", "c": {5: "five", "$bytes": "no bytes"}}
    assert decode(json.loads(json.dumps(encode(value)))) == value
    assert decode(json.loads(json.dumps(encode(10**5000)))) == 10**5000
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


@pytest.mark.slow
def test_a_run_counts_and_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    target = FuzzTarget("even", lambda number: "even" if number % 2 == 0 else "odd", number=st.integers())
    begin = time.monotonic()
    count = target.run_for(3.0)
    assert time.monotonic() - begin < 60
    assert count.examples == sum(count.outcomes.values()) > 1 and set(count.outcomes) == {"even", "odd"}
    assert capsys.readouterr().out.strip() == str(count)


@pytest.mark.slow
def test_a_failure_is_shrunk_kept_and_run_again(cases: Path) -> None:
    def small(number: int) -> str:
        assert number < 1000 or limit_is_lifted
        return "small"

    limit_is_lifted = False
    target = FuzzTarget("small", small, number=st.integers(0, 10**6))
    with pytest.raises(AssertionError, match=r"1 failures\nkept as .*small"):
        target.run_for(2)
    (case,) = (cases / "small").glob("*.json")
    assert json.loads(case.read_text()) == {"number": 1000}
    with pytest.raises(AssertionError, match=case.name):
        target.replay()
    limit_is_lifted = True
    target.replay()


def test_a_slow_example_is_no_failure_without_pytest() -> None:
    """Nor where pytest is given this folder: then bounded.py is loaded before the profile of all tests."""
    code = (
        "import time; from bounded import FuzzTarget; from hypothesis import strategies as st\n"
        "target = FuzzTarget('slow', lambda number: time.sleep(0.3), number=st.just(0))\n"
        "target.run_examples(1); target.run_for(0.1)"
    )
    command, folder = [sys.executable, "-c", code], Path(bounded.__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # where hypothesis has none
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_different_failures_are_all_kept(cases: Path) -> None:
    def check(number: int) -> None:
        if number % 2:
            raise ValueError(number)
        if number > 100:
            raise KeyError(number)

    with pytest.raises(AssertionError, match="2 failures"):
        FuzzTarget("two", check, number=st.integers(0, 10**4)).run_for(3)
    assert len(list((cases / "two").glob("*.json"))) == 2
