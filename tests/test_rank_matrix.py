"""Two ranks on the CPU, over the checkpoints that they divide in different ways: the tokens are Transformers'. Slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import beam_reference, greedy, greedy_reference, offloaded, random_prompt, token_ids
from fast import pairs
from rank_processes import kept_rank_processes

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.slow

# The vocabulary and the intermediate size are odd: no part of a rank is as large as the other's. Llama's hidden size is
# a multiple of the number of heads, for 2, 4, 6 and 8 of them.
VOCAB = 199
SIZES = {"hidden": 96, "intermediate": 97}
LENGTHS = (30, 45, 52)
MAX_TOKENS = 40
BEAMS, BEAM_TOKENS = 3, 12
RESIDENT: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 40}
FEW_BLOCKS = {**RESIDENT, "num_gpu_blocks": 12}
WAYS: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "chunks": {**RESIDENT, "max_num_batched_tokens": 20},
    "offload": offloaded(16, 4, 60, max_num_batched_tokens=32),
    "offload without CPU attention": offloaded(16, 9, 60, cpu_attention=False, max_num_batched_tokens=50),
    "recompute": {**FEW_BLOCKS, "preemption_mode": "recompute"},
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "swap_space": 0.01},
    "swap under offload": offloaded(16, 4, 9, preemption_mode="swap", swap_space=0.01),
}
BIASES: dict[str, dict[str, Any]] = {
    "no biases": {"family": "qwen3"},
    "QKV biases": {"family": "qwen2"},
    "all biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(scope="module", autouse=True)
def rank_processes() -> Iterator[None]:
    with kept_rank_processes():
        yield


@pytest.mark.parametrize(("biases", "tie", "kv_heads"), pairs(BIASES, [False, True], [1, 3]))
def test_tokens_are_those_of_transformers(biases: str, tie: bool, kv_heads: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, **BIASES[biases], kv_heads=kv_heads, heads=2 * kv_heads, tie=tie, **SIZES)
    prompts = [random_prompt(length, VOCAB, kv_heads) for length in LENGTHS]
    expected = [greedy_reference(model, prompt, MAX_TOKENS) for prompt in prompts]
    expected_beams = [[tokens for tokens, _ in beam_reference(model, prompt, BEAMS, BEAM_TOKENS)] for prompt in prompts]
    with LLM(tmp_path, **RESIDENT) as llm:
        assert token_ids(llm, prompts, greedy(MAX_TOKENS)) == expected
    for way, arguments in WAYS.items():
        with LLM(tmp_path, tensor_parallel_size=2, **arguments) as llm:
            assert token_ids(llm, prompts, greedy(MAX_TOKENS)) == expected, way
            if "preemption_mode" in arguments:
                assert getattr(llm.metrics(), f"preemptions_by_{arguments['preemption_mode']}") > 0, way
            else:
                outputs = llm.generate(prompts, greedy(MAX_TOKENS), use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == expected, f"{way}, from the prefix cache"
                assert all(output.num_cached_tokens for output in outputs), way
            assert beams(llm, prompts) == expected_beams, way


def beams(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
    params = SamplingParams(use_beam_search=True, n=BEAMS, temperature=0.0, max_tokens=BEAM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[beam.token_ids for beam in output.outputs] for output in outputs]
