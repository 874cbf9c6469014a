"""Phi-3: merged projections, partial rotation, and longrope, which has other angles if long sequences are possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fix_rope, make_checkpoint
from engines import (
    greedy,
    greedy_reference,
    logits_by_request,
    offloaded,
    random_prompt,
    set_prefill,
    token_ids,
)
from test_models import CPU, FLOAT32_BOUND, random_prompts, reference, run
from transformers import PreTrainedModel

from nanovllm import LLM
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

TRAINED = 48
LONGEST = 160
VOCAB = 199
BLOCK = 16
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80},
    "small steps": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80, "max_num_batched_tokens": 29},
    "offloaded": offloaded(BLOCK),
    "few blocks": offloaded(BLOCK, num_gpu_blocks=6, num_cpu_blocks=14, max_num_batched_tokens=37, cpu_attention=False),
}


def longrope(pairs: int, **others: Any) -> dict[str, Any]:
    """Factors that differ much, so that the wrong ones show."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.7 * i for i in range(pairs)],
        **others,
    }


def make_phi3(path: Path, partial: float = 1.0, **others: Any) -> PreTrainedModel:
    """One with heads of 16 features, trained on TRAINED tokens."""
    rope = longrope(int(16 * partial) // 2, partial_rotary_factor=partial)
    arguments = {"max_positions": LONGEST, "original_max_position_embeddings": TRAINED, "rope": rope, "seed": 3}
    return make_checkpoint(path, "phi3", **{**arguments, **others})


@pytest.mark.parametrize("options", [{}, {"partial": 0.75}, {"sliding_window": 20, "kv_heads": 1}], ids=str)
@pytest.mark.parametrize("longest", [TRAINED, TRAINED + 1])
def test_logits_equal_transformers(tmp_path: Path, options: dict[str, Any], longest: int) -> None:
    """Of prompts on both sides of the trained length."""
    model = make_phi3(tmp_path, **options)
    prompts = random_prompts(VOCAB)
    suitable = [prompt for prompt in prompts if (len(prompt) > TRAINED) == (longest > TRAINED)]
    same_factors = reference(model, suitable)
    fix_rope(model, longest)
    for before, fixed in zip(same_factors, reference(model, suitable), strict=True):
        torch.testing.assert_close(before, fixed, atol=FLOAT32_BOUND, rtol=0)
    own = load_model(tmp_path, load_network_config(tmp_path).for_length(longest), torch.float32, CPU)
    for ours, theirs in zip(run(own, prompts, (0.4,)), reference(model, prompts), strict=True):
        torch.testing.assert_close(ours, theirs, atol=FLOAT32_BOUND, rtol=0)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("partial", "longest"), [(0.5, TRAINED), (1.0, LONGEST)])
@pytest.mark.slow
def test_tokens_are_transformers(tmp_path: Path, partial: float, longest: int) -> None:
    model = make_phi3(tmp_path, partial)
    fix_rope(model, longest)
    lengths = (5, TRAINED - 30, TRAINED - 20, TRAINED + 1, 2 * TRAINED + 7)
    prompts = [random_prompt(length, VOCAB, seed=1) for length in lengths if length + 20 <= longest]
    expected = [greedy_reference(model, prompt, 20) for prompt in prompts]
    for name, arguments in WAYS.items():
        with LLM(tmp_path, dtype="float32", max_model_len=longest, **arguments) as llm:
            assert token_ids(llm, prompts, greedy(20)) == expected, name
            assert token_ids(llm, prompts[::-1], greedy(20)) == expected[::-1], name  # with cached prefixes
            if name == "few blocks":
                set_prefill(llm, "chunk-major")
                assert token_ids(llm, prompts, greedy(20)) == expected


def test_bits_do_not_depend_on_batch_or_budget(tmp_path: Path) -> None:
    make_phi3(tmp_path, 0.75)
    prompts = [random_prompt(length, VOCAB, seed=2) for length in (TRAINED - 3, 20, TRAINED + 30, TRAINED)]
    recorded = []
    for arguments in WAYS.values():
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            recorded.append(logits_by_request(llm, prompts, 12))
    for other in recorded[1:]:
        assert all(torch.equal(other[key], logits) for key, logits in recorded[0].items())
