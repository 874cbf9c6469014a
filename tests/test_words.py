"""The project uses the field's words: private ones from earlier versions do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("nanovllm", "csrc", "tests", "benchmarks", "tools", "examples", "docs")
ENDINGS = (".py", ".pyi", ".h", ".cpp", ".cu", ".md")

# Every word, with what says it better.
PRIVATE = {
    "arm": "CPU attention",
    "seat": "free sequence slot",
    "door": "KV cache",
    "company": "other rows, other requests",
    "segment": "sequence",
    "newcomer": "reader, user",
    "whoever": "the noun that is meant",
    "nobody": "no request, no stream, ...",
    "himself": "the noun that is meant",
    "KVRoom": "KVCacheBase",
    "place_of": "physical_id",
    "BlockVisit": "BlockRead",
    "PrefillSpan": "LayerwisePrefill",
    "StepChunks": "SchedulingBudget",
    "KVSegment": "SequenceMetadata",
    "IdleBlocks": "Evictor",
}

# Whole words and parts of names: "two arms" and "host_arm", but not "harm" or "warm_up".
PATTERN = re.compile(rf"(?<![A-Za-z])({'|'.join(PRIVATE)})s?(?![a-z])")


def texts() -> Iterator[tuple[Path, str]]:
    """Sources and documents of the project, but not this file or built ones."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in ENDINGS]
    for file in [*files, *ROOT.glob("*.md"), *ROOT.glob("*.py")]:
        if file != Path(__file__):
            yield file, file.read_text()


def test_no_private_words() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]} -> {PRIVATE[match[1]]}"
        for file, text in texts()
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["the arm's share", "two arms", "host_arm", "num_seats", "KVRoom(", "place_of(3)"])
def test_private_words_are_found(text: str) -> None:
    assert PATTERN.search(text)


@pytest.mark.parametrize("text", ["no harm", "warm_up", "outdoors", "a replaced offset"])
def test_other_words_are_not(text: str) -> None:
    assert not PATTERN.search(text)
