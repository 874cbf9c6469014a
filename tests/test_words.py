"""The project uses the field's words: private ones from earlier versions do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("nanovllm", "csrc", "tests", "benchmarks", "tools", "examples", "docs")
ENDINGS = (".py", ".pyi", ".h", ".cpp", ".cu", ".md")

# Every word, with what says it better. As parts of names too: kv_room, ArmRun, num_seats.
PRIVATE = {
    "arm": "CPU attention",
    "seat": "free sequence slot",
    "door": "KV cache",
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


def texts() -> Iterator[tuple[Path, str]]:
    """Sources and documents of the project, but not this file or built ones."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in ENDINGS]
    for file in [*files, *ROOT.glob("*.md"), *ROOT.glob("*.py")]:
        if file != Path(__file__):
            yield file, file.read_text()


def test_no_private_words() -> None:
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(PRIVATE)})s?(?![a-z])")
    found = [
        f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]} -> {PRIVATE[match[1]]}"
        for file, text in texts()
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_names_and_prose(tmp_path: Path) -> None:
    pattern = re.compile(r"(?<![A-Za-z])(arm|KVRoom)s?(?![a-z])")
    assert [bool(pattern.search(text)) for text in ("the arm's share", "two arms", "host_arm", "harm", "warm_up")] == [
        True,
        True,
        True,
        False,
        False,
    ]
