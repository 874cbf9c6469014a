"""Fuzz targets: a hypothesis test that runs for a number of examples, or over the cases it once failed on.

A target is a name, a check and the strategies of the check's keyword arguments. The check raises where the code under
test is wrong, and otherwise returns a word for what happened ("accepted", "refused").

NANOVLLM_FUZZ_TIMES is how many times as many examples are run. They are the same in every run, so that a failure is due
to the change that is tested; NANOVLLM_FUZZ_SEED selects others.

A failure is shrunk by hypothesis and kept as tests/fuzz/cases/NAME/DIGEST.json, which `replay` runs from then on.
Arguments must be made of None, bool, int, float, str, bytes, lists and dicts. Tuples come back from a file as lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from nanovllm.errors import ConfigError, ModelError, RequestError

LONGEST = 2000  # characters of a message
CASES = Path(__file__).parent / "cases"
TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))
SEED = int(os.environ.get("NANOVLLM_FUZZ_SEED", "0"))

Check = Callable[..., str]


class FuzzTarget:
    """A check and the strategies of its arguments. `name` is that of the folder for the cases that failed."""

    def __init__(self, name: str, check: Check, **strategies: SearchStrategy[Any]) -> None:
        self.name = name
        self._check = check
        self._strategies = strategies

    def run_examples(self, count: int) -> None:
        """Run random examples. Raises what the check raises; the smallest arguments that fail are kept as a case."""
        failing = list[dict[str, Any]]()

        def check(**arguments: Any) -> None:
            try:
                self._check(**arguments)
            except Exception:
                failing.append(arguments)
                raise

        try:
            seed(SEED)(settings(_SETTINGS, max_examples=count * TIMES)(given(**self._strategies)(check)))()
        except Exception as error:
            error.add_note(f"kept as {self._keep(failing[-1])}" if failing else "nothing could be kept")
            raise

    def replay(self) -> None:
        """Run every case that failed once."""
        for path in sorted((CASES / self.name).glob("*.json")):
            try:
                self._check(**decode(json.loads(path.read_text(encoding="ascii"))))
            except Exception as error:
                raise AssertionError(f"{path} fails: {type(error).__name__}: {error}") from error

    def _keep(self, arguments: dict[str, Any]) -> Path:
        text = json.dumps(encode(arguments), indent=1)
        path = CASES / self.name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
        return path


_SETTINGS = settings(
    deadline=None,  # said here too: there is no profile without pytest, nor yet when this folder's conftest is loaded
    database=None,  # failures are kept as files that can be read and committed
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)


def loaded_or_refused(load: Callable[[], object], growth: int, *words: str) -> str:
    """ "accepted", or "refused" with one sentence that holds the words; the process grows by `growth` KiB at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    word = "accepted"
    try:
        load()
    except (ModelError, ConfigError, RequestError) as error:
        message = str(error)
        word = "refused"
        assert message and "\n" not in message and len(message) < LONGEST, message
        assert all(word in message for word in words), message
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < growth, f"{grown} KiB more than ever before"
    return word


@contextmanager
def with_file(original: Path, file: str, content: bytes) -> Iterator[Path]:
    """A copy of the directory in which the file holds `content`."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-fuzz-") as name:
        for path in original.iterdir():
            if path.name != file:
                os.link(path, Path(name) / path.name)
        (Path(name) / file).write_bytes(content)
        yield Path(name)


def split_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


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
