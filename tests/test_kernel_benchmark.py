"""The kernel benchmark runs through, and says in a sentence where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from triton_mode import DEVICE, TRITON_MARKS

from benchmarks import kernels
from benchmarks.kernels import Sizes, measure, operations
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.triton_attention import TritonAttention

TINY = Sizes.tiny()
pytestmark = TRITON_MARKS


@pytest.mark.slow
def test_every_part_gives_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(TINY, torch.device(DEVICE), [TritonAttention()])
    assert set(found) == {"ceilings", "merge", "store_kv", "decode", "prefill"}
    for part in found.values():
        assert isinstance(part, list), part
        for figure in part:
            assert all(value > 0 for value in figure.values() if isinstance(value, float))
    assert "Triton paged attention" in capsys.readouterr().out


def test_a_part_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    backends: list[AttentionBackend] = []
    found = measure(TINY, torch.device(DEVICE), [None, *backends])  # type: ignore[list-item]
    assert set(found["decode"]) == set(found["prefill"]) == {"failed"}
    assert isinstance(found["merge"], list) and isinstance(found["store_kv"], list)
    assert "decode                                  failed" in capsys.readouterr().out


def test_operations_count_what_the_mask_leaves() -> None:
    """One operation pair for each of q.k and w.v over 1 + 2 + 3 visible keys, and over 4 + 5 + 6."""
    one = Sizes(heads=1, head_dim=1)
    assert operations(one, 3, 3) == 4 * 6 and operations(one, 3, 6) == 4 * 15


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert capsys.readouterr().err == (
        "kernels: error: torch sees no CUDA device, and these kernels run on nothing else\n"
    )


def test_a_dry_run_writes_every_part(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert kernels.main(["--dry", "--output-json", str(path)]) == 0
    assert set(json.loads(path.read_text())["kernels"]) == {"ceilings", "merge", "store_kv", "decode", "prefill"}
