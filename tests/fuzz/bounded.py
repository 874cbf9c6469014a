"""Fuzz targets: a hypothesis test that runs for a number of examples, for a time, or over the cases it once failed on.

A target is a name, a check and the strategies of the check's keyword arguments. The check raises where the code under
test is wrong, and otherwise returns a word for what happened ("accepted", "refused"), which is counted:

    TARGET = FuzzTarget("engine-flags", check_flags, flags=st.lists(st.text()))

    def test_flags() -> None:  # fast, the same examples in every run
        TARGET.replay()
        TARGET.run_examples(100)

    @pytest.mark.slow
    def test_flags_for_long(fuzz_run: FuzzRun) -> None:
        fuzz_run(TARGET)

`fuzz_run` is a fixture of tests/fuzz/conftest.py. All tests that use it share NANOVLLM_FUZZ_SECONDS (60 if unset)
evenly. It prints the counts at the end of the pytest run. `run_for` is the same without pytest. The examples are the
same in every run, so that a failure is due to the change that is tested; NANOVLLM_FUZZ_SEED selects others.

A failure is shrunk by hypothesis and kept as tests/fuzz/cases/NAME/DIGEST.json, which `replay` runs from then on. A run
for a time goes on after a failure and raises at its end. Arguments must be made of None, bool, int, float, str, bytes,
lists and dicts. Tuples come back from a file as lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

CASES = Path(__file__).parent / "cases"
ROUND = 100  # examples between two looks at the clock
MOST_FAILURES = 10  # distinct ones, after which a run for a time ends

Check = Callable[..., str | None]


@dataclass
class FuzzCount:
    """What a run did. `outcomes`: how often the check returned each word. `failures`: what to do about each."""

    name: str
    examples: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count:,} {word}" for word, count in self.outcomes.most_common()) or "no outcomes"
        return (
            f"fuzz {self.name}: {self.examples:,} examples in {self.seconds:.0f} s ({outcomes}), "
            f"{len(self.failures)} failures"
        )


class FuzzTarget:
    """A check and the strategies of its arguments. `name` is that of the folder for the cases that failed."""

    def __init__(self, name: str, check: Check, **strategies: SearchStrategy[Any]) -> None:
        self.name = name
        self._check = check
        self._strategies = strategies

    def run_examples(self, count: int) -> None:
        """Run `count` examples, the same in every run. Raises what the check raises, with the smallest example."""
        profile = settings(_SETTINGS, max_examples=count, derandomize=True)
        profile(given(**self._strategies)(self._plain_check))()

    def run_for(self, seconds: float, first_seed: int = 0) -> FuzzCount:
        """Run random examples for so many seconds, print the counts, and raise if there was a failure."""
        count, end = FuzzCount(self.name), time.monotonic() + seconds
        begin, number, seen = time.monotonic(), first_seed, set[str]()
        while time.monotonic() < end and len(seen) < MOST_FAILURES:
            number += 1
            self._round(count, number, end, seen)
        count.seconds = time.monotonic() - begin
        print(count)
        if count.failures:
            raise AssertionError("\n".join([str(count), *count.failures]))
        return count

    def replay(self) -> None:
        """Run every case that failed once."""
        for path in sorted((CASES / self.name).glob("*.json")):
            try:
                self._check(**decode(json.loads(path.read_text(encoding="ascii"))))
            except Exception as error:
                raise AssertionError(f"{path} fails: {type(error).__name__}: {error}") from error

    def _plain_check(self, **arguments: Any) -> None:
        self._check(**arguments)

    def _round(self, count: FuzzCount, number: int, end: float, seen: set[str]) -> None:
        """One hypothesis run. A failure in it is shrunk; the last failing arguments are the smallest."""
        failing: dict[str, dict[str, Any]] = {}

        def check(**arguments: Any) -> None:
            if time.monotonic() > end and not failing:  # out of time: let the round run out
                return
            count.examples += 1
            try:
                word = self._check(**arguments)
            except Exception as error:
                if _kind(error) in seen:  # kept already: look for others
                    count.outcomes["failed again"] += 1
                    return
                failing[_kind(error)] = arguments
                raise
            if word is not None:
                count.outcomes[word] += 1

        try:
            seed(number)(settings(_SETTINGS, max_examples=ROUND)(given(**self._strategies)(check)))()
        except Exception as error:
            kind = _kind(error)
            if kind not in failing:  # several at once come as a group, each of them shrunk
                kind = next(iter(failing), kind)
            if kind not in seen:
                seen.add(kind)
                kept = self._keep(failing[kind]) if kind in failing else "nothing could be kept"
                count.failures.append(f"{kept}: {type(error).__name__}: {str(error)[:500]}")

    def _keep(self, arguments: dict[str, Any]) -> str:
        text = json.dumps(encode(arguments), indent=1)
        path = CASES / self.name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
        return f"kept as {path}"


FuzzRun = Callable[[FuzzTarget], FuzzCount]  # the type of the fixture `fuzz_run`

_SETTINGS = settings(
    deadline=None,  # said here too: there is no profile without pytest, nor yet when this folder's conftest is loaded
    database=None,  # failures are kept as files that can be read and committed
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)


def _kind(error: BaseException) -> str:
    """The same for failures that are likely the same: their type, and the line that raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    location = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
    return f"{type(error).__name__} {location}"


def encode(value: Any) -> Any:
    """The value as JSON that gives it back: bytes, large whole numbers and keys that are no strings are marked."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return {"$int": hex(value)}  # json refuses whole numbers of more than 4,300 digits
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"$items": [[encode(key), encode(item)] for key, item in value.items()]}
    assert value is None or isinstance(value, bool | int | float | str), f"a {type(value).__name__} cannot be kept"
    return value


def decode(value: Any) -> Any:
    """What `encode` was given, tuples as lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$int" in value:
        return int(value["$int"], 16)
    if "$items" in value:
        return {decode(key): decode(item) for key, item in value["$items"]}
    return {key: decode(item) for key, item in value.items()}
