"""The kernel benchmark runs through, and says in a sentence where it cannot."""

from __future__ import annotations

import pytest
import torch
from triton_mode import DEVICE, TRITON_MARKS

from benchmarks.kernels import Sizes, measure, operations
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


def test_operations_count_what_the_mask_leaves() -> None:
    """One operation pair for each of q.k and w.v over 1 + 2 + 3 visible keys, and over 4 + 5 + 6."""
    one = Sizes(heads=1, head_dim=1)
    assert operations(one, 3, 3) == 4 * 6 and operations(one, 3, 6) == 4 * 15
