"""Beam search against Transformers' own on small random models: the same sequences and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import beam_reference, offloaded, random_prompt
from fast import fast_only

from nanovllm import LLM, RequestOutput, SamplingParams

BLOCK = 16
VOCAB = 61
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120},
    "offloaded, in chunks": offloaded(BLOCK, 6, 110, max_num_batched_tokens=21),
}


def beams_of(output: RequestOutput, penalty: float) -> list[tuple[list[int], float]]:
    found = []
    for beam in output.outputs:
        assert beam.cumulative_logprob is not None
        found.append((beam.token_ids, beam.cumulative_logprob / len(beam.token_ids) ** penalty))
    return found


SEARCHES = [(penalty, stopping) for penalty in (0.0, 1.0, -1.0, 2.0) for stopping in (True, False, "never")]


@pytest.mark.parametrize(
    ("family", "seed", "ends"),
    fast_only(
        [("qwen3", 0, []), ("qwen2", 2, [3, 9, 15, 31])],
        [("qwen3", 0, []), ("llama", 1, [7]), ("qwen2", 2, [3, 9, 15, 31]), ("llama", 3, [0, 5])],
    ),
)
def test_same_sequences_and_scores(tmp_path: Path, family: str, seed: int, ends: list[int]) -> None:
    model = make_checkpoint(
        tmp_path, family, seed, vocab=VOCAB, layers=1, hidden=32, intermediate=32, eos_token_id=ends
    )
    model.generation_config.eos_token_id = None  # given to each call
    cases = [(2 + 2 * (index % 2), 6 + index % 5, *search) for index, search in enumerate(SEARCHES)]
    prompts = [random_prompt(3 + 4 * index, VOCAB, seed=index) for index in range(len(cases))]
    expected = [
        beam_reference(model, prompt, width, max_tokens, ends, length_penalty=penalty, early_stopping=stopping)
        for prompt, (width, max_tokens, penalty, stopping) in zip(prompts, cases, strict=True)
    ]
    params = [
        SamplingParams(
            n=width, use_beam_search=True, temperature=0.0, max_tokens=max_tokens,
            length_penalty=penalty, early_stopping=stopping,
        )
        for width, max_tokens, penalty, stopping in cases
    ]  # fmt: skip
    for arguments in ENGINES.values():
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.engine.scheduler.block_manager.num_copied_blocks > 0
        for case, output, beams in zip(cases, outputs, expected, strict=True):
            found = beams_of(output, case[2])
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in beams], case
            assert [score for _, score in found] == pytest.approx([score for _, score in beams], abs=2e-4), case
