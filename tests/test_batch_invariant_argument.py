"""The engine argument `batch_invariant`: what it computes with, what it refuses, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import random_prompt

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.layers import dense_weight as linear_layer


def torch_products(model_dir: Path, monkeypatch: pytest.MonkeyPatch, value: bool | None, *, amx: bool) -> int:
    """How many products of an engine with that argument torch computes."""
    products: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
        with LLM(model_dir, kvcache_block_size=16, num_gpu_blocks=20, batch_invariant=value) as llm:
            of_torch = torch.nn.functional.linear
            patch.setattr(linear_layer.F, "linear", lambda *args: (products.append(len(args[0])), of_torch(*args))[1])
            llm.generate(random_prompt(40, 97, 1), SamplingParams(max_tokens=3), use_tqdm=False)
    assert all(rows > linear_layer.MAX_OWN_ROWS for rows in products)
    return len(products)


def test_only_false_gives_the_promise_up_and_only_for_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, vocab=97, dtype="bfloat16", layers=2)
    assert torch_products(tmp_path, monkeypatch, None, amx=True) == 0
    assert torch_products(tmp_path, monkeypatch, True, amx=True) == 0
    assert torch_products(tmp_path, monkeypatch, False, amx=False) == 0
    assert torch_products(tmp_path, monkeypatch, False, amx=True) == 2 * 4


@pytest.mark.parametrize(("head_dim", "said"), [(32, "do not depend on its batch"), (24, "heads of 24 are attended")])
def test_the_log_says_what_holds(head_dim: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, vocab=97, head_dim=head_dim)
    with caplog.at_level(logging.INFO), LLM(tmp_path, kvcache_block_size=16, num_gpu_blocks=20):
        assert any(said in record.message for record in caplog.records)


def test_true_is_refused_where_it_cannot_be_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=97, head_dim=24)
    with pytest.raises(ConfigError, match="batch_invariant=True: heads of 24 are attended by torch's operator"):
        LLM(tmp_path, kvcache_block_size=16, num_gpu_blocks=20, batch_invariant=True)
