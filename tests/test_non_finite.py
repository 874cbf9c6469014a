"""NaN and infinity, in weights or computed: the request ends with an error that says which, and no other does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams

# the last token's embedding is damaged
VOCAB = 97
BAD = 96
GOOD = [token % BAD for token in random_prompt(40, VOCAB, 1)]
ENGINES: list[dict[str, Any]] = [
    {"kvcache_block_size": 16, "num_gpu_blocks": 40},
    offloaded(16, 4, 60, max_num_batched_tokens=32),
]
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={BAD: float("-inf")})
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 5, "top_p": 0.5},
    {"n": 3, "best_of": 4},
    {"logprobs": 3},
    {"temperature": 0.0, "use_beam_search": True, "n": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 2, "stop_token_ids": [3]},
]


def damage(path: Path, name: str, row: int, value: float, dtype: torch.dtype = torch.float32) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[name][row] = value
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, path / "model.safetensors")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint where one token's embedding is NaN."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, max_positions=256)
    damage(path, "model.embed_tokens.weight", BAD, float("nan"))
    return path


@pytest.mark.parametrize("arguments", ENGINES, ids=["resident", "offloaded"])
def test_a_damaged_weight_ends_the_requests_that_meet_it(model_dir: Path, arguments: dict[str, Any]) -> None:
    with LLM(model_dir, dtype="float32", **arguments) as llm:
        expected = token_ids(llm, GOOD, ANSWER)
        assert len(expected[0]) == 8
        for kind in KINDS:
            params = SamplingParams(**{"max_tokens": 6, "seed": 5, "ignore_eos": True, **kind})
            for bad in ([*GOOD, BAD], [BAD, *GOOD]):
                failed, good = llm.generate([bad, GOOD], [params, ANSWER], use_tqdm=False)
                assert {completion.finish_reason for completion in failed.outputs} == {"error"}, (kind, bad)
                assert failed.error is not None and failed.finished
                assert "and so do the weights, in model.embed_tokens.weight: get the checkpoint anew" in failed.error
                assert all(math.isfinite(output.cumulative_logprob or 0.0) for output in failed.outputs)
                assert good.error is None and [good.outputs[0].token_ids] == expected
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.pool.num_used == 0
        assert token_ids(llm, GOOD, ANSWER) == expected


def test_prompt_logprobs_hold_no_nan(model_dir: Path) -> None:
    """A row of the prompt is not finite, though what is sampled from would be."""
    with LLM(model_dir, dtype="float32", num_gpu_blocks=40, kvcache_block_size=16) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate([[5, BAD, 7]], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        values = [entry.logprob for row in output.prompt_logprobs or [] if row for entry in row.values()]
        assert all(value == value for value in values)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_damaged_output_projection(tmp_path: Path, value: float) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB)
    damage(tmp_path, "lm_head.weight", 5, value)
    damage(tmp_path, "model.layers.1.mlp.down_proj.weight", 0, value)
    with LLM(tmp_path, num_gpu_blocks=8) as llm:
        (output,) = llm.generate(GOOD, greedy(4), use_tqdm=False)
        assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
        assert output.error is not None
        assert "in model.layers.1.mlp.down_proj.weight, lm_head.weight" in output.error


def test_what_grows_too_large_was_computed(tmp_path: Path) -> None:
    """All weights are finite, and a sum of products of theirs is not, in float16."""
    make_checkpoint(tmp_path, vocab=VOCAB)
    damage(tmp_path, "lm_head.weight", 5, 60000.0, torch.float16)
    with LLM(tmp_path, num_gpu_blocks=8, dtype="float16") as llm:
        (output,) = llm.generate(GOOD, greedy(4), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None and "which was computed: all weights are finite" in output.error
    assert "float16 ends at 6.55e+04: use dtype='bfloat16' or 'float32'" in output.error
    with LLM(tmp_path, num_gpu_blocks=8, dtype="float32") as llm:
        (output,) = llm.generate(GOOD, greedy(4), use_tqdm=False)
        assert output.error is None and len(output.outputs[0].token_ids) == 4
