"""The sweep's choice and its table; the facts of a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sweep import Timing, fastest, keep
from nanovllm.ops.kernel_config import DecodeConfig, PrefillConfig, TunedEntry, read_table

SLOW, FAST, ODD = (PrefillConfig(128, keys, 8, 3) for keys in (64, 128, 32))
DECODE = DecodeConfig(64, 4, 3, 4, 4)


def test_every_problem_counts_against_the_default() -> None:
    """A configuration that gains much on a short problem and loses on a long one is not judged by seconds alone."""
    assert fastest([Timing(SLOW, (1.0, 0.1)), Timing(FAST, (1.1, 0.05)), Timing(ODD, (), "too large")]) == FAST
    assert fastest([Timing(SLOW, (1.0, 0.1)), Timing(FAST, (0.9, 0.13))]) == SLOW
    with pytest.raises(RuntimeError, match="the default configuration cannot be timed: no memory"):
        fastest([Timing(SLOW, (), "no memory"), Timing(FAST, (1.0,))])


def test_a_table_keeps_entries_of_other_heads(tmp_path: Path) -> None:
    first, other = TunedEntry(128, "bfloat16", SLOW, DECODE), TunedEntry(64, "bfloat16", FAST, DECODE)
    better = replace(first, prefill=FAST)
    for entry in (first, other, better):
        path = keep(entry, {"commit": "abc"}, "NVIDIA H200", tmp_path / "tuned")
    assert path.name == "nvidia-h200.json" and read_table(path) == (other, better)
    assert json.loads(path.read_text())["machine"] == {"commit": "abc"}


def test_the_facts_are_written_before_torch_is_imported(tmp_path: Path) -> None:
    """A machine whose torch does not even import still says what it is."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    path = tmp_path / "facts.json"
    code = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.gpu_facts import main; main(sys.argv[2:])"
    command = [sys.executable, "-c", code, str(tmp_path), "--output-json", str(path)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert "broken" in done.stderr
    facts = json.loads(path.read_text())
    assert set(facts) == {"host", "memory", "tools", "packages"}
    assert facts["memory"]["MemTotal"] > 0 and facts["packages"]["pytest"]
