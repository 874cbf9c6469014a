"""The sweep's choice and its table; the facts of a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_mode import DEVICE, TRITON_MARKS

from benchmarks.kernels import Sizes
from benchmarks.sweep import Problems, Sweep, Timing, cudnn_from_block, fastest, keep
from nanovllm.ops import triton_prefill
from nanovllm.ops.kernel_config import DecodeConfig, PrefillConfig, TunedEntry, read_table

SLOW, FAST, ODD = (PrefillConfig(128, keys, 8, 3) for keys in (64, 128, 32))
DECODE = DecodeConfig(64, 4, 3, 4, 4)


def test_every_problem_counts_against_the_default() -> None:
    """A configuration that gains much on a short problem and loses on a long one is not judged by seconds alone."""
    assert fastest([Timing(SLOW, (1.0, 0.1)), Timing(FAST, (1.1, 0.05)), Timing(ODD, (), "too large")]) == FAST
    assert fastest([Timing(SLOW, (1.0, 0.1)), Timing(FAST, (0.9, 0.13))]) == SLOW
    with pytest.raises(RuntimeError, match="the default configuration cannot be timed: no memory"):
        fastest([Timing(SLOW, (), "no memory"), Timing(FAST, (1.0,))])


@pytest.mark.parametrize(
    "cudnn, expected", [((9, 9, 9), None), ((9, 9, 0.9), 4096), ((9, 0.9, 0.9), 1024), ((0.9, 9, 0.98), None)]
)
def test_cudnn_is_taken_from_the_block_size_on_from_which_it_is_faster(
    cudnn: tuple[float, ...], expected: int | None
) -> None:
    rows = [{"block_size": s, "triton": 1.0, "cudnn": c} for s, c in zip((256, 1024, 4096), cudnn, strict=True)]
    assert cudnn_from_block(rows) == expected and cudnn_from_block([]) is None


def test_a_table_keeps_entries_of_other_heads(tmp_path: Path) -> None:
    first, other = TunedEntry(128, "bfloat16", SLOW, DECODE), TunedEntry(64, "bfloat16", FAST, DECODE, 4096)
    better = replace(first, prefill=FAST)
    for entry in (first, other, better):
        path = keep(entry, {"commit": "abc"}, "NVIDIA H200", tmp_path / "tuned")
    assert path.name == "nvidia-h200.json" and read_table(path) == (other, better)
    assert json.loads(path.read_text())["machine"] == {"commit": "abc"}


class TestOnTheDevice:
    pytestmark = TRITON_MARKS

    def test_a_configuration_with_other_results_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = triton_prefill.prefill_
        one = Sweep(Sizes.tiny(), Problems.tiny(), torch.device(DEVICE))
        wrong, broken = ODD, FAST
        one.prefill_configs = [one.prefill_configs[0], wrong, broken]

        def prefill(*args: Any) -> None:
            if args[-1] == broken:
                raise RuntimeError("out of resource: shared memory")
            real(*args[:-1], one.prefill_configs[0])
            if args[-1] == wrong:
                args[3].lse.mul_(1.4)

        monkeypatch.setattr(triton_prefill, "prefill_", prefill)
        good, off, failed = one.prefill()
        assert good.seconds and not off.seconds and not failed.seconds
        assert "its results are off by" in off.note and "shared memory" in failed.note
        assert capsys.readouterr().out.count("left out") == 2
        assert fastest([good, off, failed]) == good.config


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
