"""Phi-3: merged projections, partial rotation, and longrope, which gives all tokens of a long sequence other angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import (
    greedy,
    greedy_reference,
    logits_by_request,
    offloaded,
    random_prompt,
    set_prefill,
    token_ids,
)
from test_models import assert_same_logits
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams

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
def test_logits_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    """Prompts on both sides of the trained length."""
    model = make_phi3(tmp_path, **options)
    assert_same_logits(model, tmp_path)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("partial", [0.5, 1.0])
@pytest.mark.slow
def test_tokens_are_transformers_on_both_sides_of_the_trained_length(tmp_path: Path, partial: float) -> None:
    """Transformers computes the KV cache again when a sequence outgrows the trained length; so does the engine."""
    reference = make_phi3(tmp_path, partial)
    lengths = (5, TRAINED - 20, TRAINED - 1, TRAINED, TRAINED + 1, 2 * TRAINED + 7)
    prompts = [random_prompt(length, VOCAB, seed=1) for length in lengths]
    expected = [greedy_reference(reference, prompt, 30) for prompt in prompts]
    for name, arguments in WAYS.items():
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            assert token_ids(llm, prompts, greedy(30)) == expected, name
            assert token_ids(llm, prompts[::-1], greedy(30)) == expected[::-1], name  # with cached prefixes
            if name == "few blocks":
                set_prefill(llm, "chunk-major")
                assert token_ids(llm, prompts, greedy(30)) == expected


def test_bits_do_not_depend_on_batch_or_budget(tmp_path: Path) -> None:
    make_phi3(tmp_path, 0.75)
    prompts = [random_prompt(length, VOCAB, seed=2) for length in (TRAINED - 3, 20, TRAINED + 30, TRAINED)]
    found = []
    for arguments in WAYS.values():
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            found.append(logits_by_request(llm, prompts, 12))
    for other in found[1:]:
        assert all(torch.equal(other[key], logits) for key, logits in found[0].items())


def test_prefixes_are_shared_on_one_side_of_the_trained_length_only(tmp_path: Path) -> None:
    make_phi3(tmp_path)
    short = random_prompt(2 * BLOCK + 1, VOCAB, seed=5)
    long = short + random_prompt(40, VOCAB, seed=6)
    longer = short + random_prompt(70, VOCAB, seed=7)
    with LLM(tmp_path, **WAYS["resident"]) as llm:
        cached = []
        for prompt in (short, long, longer, short):
            (output,) = llm.generate([prompt], greedy(1), use_tqdm=False)
            cached.append(output.metrics.cached_tokens)
        assert cached == [0, 0, 2 * BLOCK, 2 * BLOCK]
        # A sequence that outgrows the trained length continues as a long one, and leaves blocks for long ones.
        grown = short + token_ids(llm, [short], greedy(TRAINED - len(short) + 2))[0]
        (output,) = llm.generate([grown + [1] * 20], greedy(1), use_tqdm=False)
        assert output.metrics.cached_tokens == 3 * BLOCK


@pytest.mark.parametrize("params", [{"n": 3, "temperature": 1.0, "seed": 1}, {"use_beam_search": True, "best_of": 2}])
def test_groups_outgrow_the_trained_length_together(tmp_path: Path, params: dict[str, Any]) -> None:
    make_phi3(tmp_path)
    params = SamplingParams(max_tokens=14, ignore_eos=True, **({"temperature": 0.0} | params))
    prompts = [random_prompt(length, VOCAB, seed=8) for length in (TRAINED - 6, TRAINED - 11)]
    found = []
    for arguments in (WAYS["resident"], {**WAYS["resident"], "num_gpu_blocks": 17}):
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[0] == found[1]
    if params.temperature:  # one sequence alone has the tokens of its seed
        with LLM(tmp_path, dtype="float32", **WAYS["resident"]) as llm:
            alone = SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.0, seed=1)
            assert token_ids(llm, prompts, alone) == [texts[0] for texts in found[0]]
