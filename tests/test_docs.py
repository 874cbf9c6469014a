"""The documents name only what exists: paths of the repository, targets of make, modules that are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
# A history names what was there at its time.
LIVING = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOMS = ("nanovllm", "csrc", "tests", "benchmarks", "docs", "tools", "examples")
PATH = re.compile(
    r"`((?:nanovllm|csrc|tests|benchmarks|docs|tools|examples)/[\w./*-]*|[\w]+(?:/[\w]+)*\.(?:py|h|cpp|cu|pyi|md))[`:]"
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"python3? -m ((?:nanovllm|benchmarks|tools|tests)[\w.]*)")
TARGET = re.compile(r"`make ([a-z-]+)")


FILES = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*")]


def _exists(name: str, page: Path) -> bool:
    """Whether there is such a path: from the root, beside the page, or as the end of a longer one."""
    return any(list(base.glob(name)) for base in (ROOT, page.parent)) or any(path.match(name) for path in FILES)


@pytest.mark.parametrize("page", LIVING, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    paths = {match.rstrip("/") for match in PATH.findall(text)} | {match for match in LINK.findall(text)}
    missing = sorted(name for name in paths if not _exists(name, page))
    modules = {name.replace(".", "/") for name in MODULE.findall(text)}
    missing += sorted(
        name for name in modules if not any((ROOT / f"{name}{end}").exists() for end in (".py", "/__main__.py"))
    )
    makefile = (ROOT / "Makefile").read_text()
    missing += sorted(name for name in TARGET.findall(text) if not re.search(rf"^{name}:", makefile, re.MULTILINE))
    assert not missing, f"{page.relative_to(ROOT)} names {missing}, which are not there"
