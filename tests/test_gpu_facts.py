"""The facts of a machine that the GPU check writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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
