"""Ten files tell how a prompt goes from `generate` to the kernel and back, and none of them names a feature."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPINE = (
    "README.md",
    "nanovllm/llm.py",
    "nanovllm/engine/llm_engine.py",
    "nanovllm/engine/scheduler.py",
    "nanovllm/engine/block_manager.py",
    "nanovllm/engine/model_runner.py",
    "nanovllm/models/qwen3.py",
    "nanovllm/kvcache/chunked_attention.py",
    "nanovllm/kvcache/offload_engine.py",
    "nanovllm/kvcache/transfer_order.py",
)
FEATURES = re.compile(
    r"\b(drafts?|snapshots?|adapters?|lora|grammars?|store|disk|mtp|beams?|gemma|ranks?|trace)\b", re.IGNORECASE
)


@pytest.mark.parametrize("name", SPINE[1:])
def test_a_file_of_the_spine_names_no_feature(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    named = [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if FEATURES.search(line)]
    assert not named, f"{name} names features: {named}"


def test_the_reading_order_is_the_spine() -> None:
    text = (ROOT / "docs/structure.md").read_text()
    section = text.split("## Ten files", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| \d+ \| (?:\[[^]]*\]\([^)]*\)|`([^`]+)`)", section, re.MULTILINE)
    assert [name or "README.md" for name in rows] == [name.removeprefix("nanovllm/") for name in SPINE]


def test_the_picture_of_the_readme_stands_in_the_offload_engine() -> None:
    """With the names of its attributes and methods, which exist."""
    text = (ROOT / "nanovllm/kvcache/offload_engine.py").read_text()
    picture, code = text.split("from __future__", 1)
    for name in ("load_to_slot_layer", "offload_slot_layer", "ring", "resident", "host", "move_blocks"):
        assert re.search(rf"\b{name}\b", picture), name
    for name in ("load_to_slot_layer", "offload_slot_layer"):
        assert f"def {name}" in code
