"""The benchmark of GGUF types: its own Q4_K, and files that it writes again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf
import numpy as np
from checkpoints import make_checkpoint
from gguf.quants import dequantize
from gguf_files import WIDE, write_gguf

from benchmarks import requantize as script
from benchmarks.gguf_types import quantize_q4_k


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_q4_k_rounds_to_the_nearest_step(scale: float) -> None:
    rng = np.random.default_rng(0)
    weight = (scale * rng.normal(size=(8, 512)) + scale * rng.normal(size=(8, 1))).astype(np.float32)
    found = dequantize(quantize_q4_k(weight), gguf.GGMLQuantizationType.Q4_K)
    groups = weight.reshape(-1, 32)
    step = (groups.max(-1) - np.minimum(groups.min(-1), 0)) / 15
    # Half a step, and what rounding scale and minimum to 6 bits adds.
    assert (np.abs(found - weight).reshape(-1, 32) <= 1.3 * step[:, None] + 1e-9).all()


def test_files_are_written_in_other_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path / "model", layers=1, **{**WIDE, "intermediate": 224})
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0", changes={"qwen3.context_length": 300})
    monkeypatch.setattr(script, "story", lambda: "th in " * 40)
    assert script.main([str(path), "--types", "Q4_K", "--tokens", "60"]) == 0
    as_it_is, other = capsys.readouterr().out.splitlines()
    assert as_it_is.startswith("as it is") and "perplexity" in as_it_is
    assert other.startswith("8 x Q4_K, 1 x Q8_0"), "down has rows of 224"
    assert script.main([str(tmp_path / "none.gguf")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
