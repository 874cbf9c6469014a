"""Log-probabilities of real engines: right, complete, and the same to the bit however the prompt was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import offloaded, random_prompt, recorded_logits
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import Logprob, RequestOutput

VOCAB = 290
BLOCK = 16
LENGTHS = (1, 2, 15, 16, 17, 33, 70, 130)
ENGINES: dict[str, dict[str, Any]] = {
    "all at once": {"num_gpu_blocks": 100},
    "chunks": {"num_gpu_blocks": 100, "max_num_batched_tokens": 21},
    "preempted": {"num_gpu_blocks": 14, "max_num_batched_tokens": 40},
    "preempted, no cache": {"num_gpu_blocks": 14, "max_num_batched_tokens": 40, "enable_prefix_caching": False},
    "offloaded": offloaded(BLOCK, 4, 60, max_num_batched_tokens=64),
}


model_dir = checkpoint_fixture(vocab=VOCAB, tokenizer={})


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedModel:
    return make_checkpoint(model_dir, vocab=VOCAB)  # the same arguments give the same weights


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)


def reported(output: RequestOutput) -> tuple[Any, ...]:
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs


def check_position(found: Mapping[int, Logprob], token: int, logprobs: Tensor, count: int) -> None:
    """`count` entries, or one more where the token is none of the most likely; each with its rank in the softmax."""
    best = set(logprobs.topk(count).indices.tolist())
    assert set(found) == best | {token}
    assert next(iter(found)) == token
    for other, entry in found.items():
        assert entry.logprob == pytest.approx(logprobs[other].item(), abs=2e-5)
        assert entry.rank == 1 + int((logprobs > logprobs[other]).sum())


def test_logprobs_are_those_of_transformers(model_dir: Path, reference: PreTrainedModel) -> None:
    prompts = [random_prompt(length, VOCAB, seed=1) for length in LENGTHS]
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=100) as llm:
        outputs = run(llm, prompts, asked(temperature=1.3, seed=5, top_k=40, logprobs=3, prompt_logprobs=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for position, found in enumerate(output.prompt_logprobs[1:], 1):
            assert found is not None
            check_position(found, prompt[position], logprobs[position - 1], 2)
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        chosen = list(zip(completion.logprobs, completion.token_ids, strict=True))
        for position, (found, token) in enumerate(chosen, len(prompt) - 1):
            check_position(found, token, logprobs[position], 3)
        assert completion.cumulative_logprob == pytest.approx(sum(found[token].logprob for found, token in chosen))
        assert any(found[token].rank > 3 for found, token in chosen if found[token].rank), "never one entry more"


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[tuple[Any, ...]]:
    """Each prompt in an engine that has seen nothing else."""
    found = []
    for length in LENGTHS:
        with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=12) as llm:
            prompt = random_prompt(length, VOCAB, seed=2)
            found.append(reported(run(llm, [prompt], asked(logprobs=2, prompt_logprobs=3))[0]))
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_do_not_depend_on_how_they_were_computed(
    name: str, model_dir: Path, alone: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(length, VOCAB, seed=2) for length in LENGTHS]
    monkeypatch.setattr("nanovllm.engine.row_sampling.LOGPROB_ROWS", 8)
    monkeypatch.setattr("nanovllm.layers.sampler.LOGPROB_ROWS", 5)
    with LLM(model_dir, **{"kvcache_block_size": BLOCK, **ENGINES[name]}) as llm:
        for state in ("cold", "warm"):
            outputs = run(llm, prompts, asked(logprobs=2, prompt_logprobs=3))
            assert [reported(output) for output in outputs] == alone, state
        assert llm.engine.scheduler.preemption.stats.total > 0 or not name.startswith("preempted")


def test_a_cached_prefix_is_recomputed_where_its_logprobs_are_asked_for(model_dir: Path) -> None:
    prompt = random_prompt(70, VOCAB, seed=3)
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=30) as llm:
        run(llm, [prompt], asked())
        (output,) = run(llm, [prompt], asked(prompt_logprobs=0))
        assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None
        assert [list(found or ()) for found in output.prompt_logprobs] == [[], *([token] for token in prompt[1:])]
        llm.engine.scheduler.block_manager.reset_prefix_cache()
        assert reported(run(llm, [prompt], asked(prompt_logprobs=0))[0]) == reported(output)
        (output,) = run(llm, [prompt], asked())
        assert output.num_cached_tokens == 64 and output.prompt_logprobs is None, "it was written to the cache"


@pytest.mark.parametrize("caching", [True, False])
def test_logits_of_a_prompt_are_computed_once_and_a_few_rows_at_a_time(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caching: bool
) -> None:
    """Also when sequences are preempted in the middle of their prompts' rows and after them."""
    monkeypatch.setattr("nanovllm.engine.row_sampling.LOGPROB_ROWS", 8)
    prompts = [random_prompt(length, VOCAB, seed=4) for length in (60, 61, 62, 63)]
    engine = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 13, "max_num_batched_tokens": 50}
    with LLM(model_dir, **engine, enable_prefix_caching=caching) as llm, recorded_logits(llm) as steps:
        outputs = run(llm, prompts, asked(prompt_logprobs=1, max_tokens=40))
        assert llm.engine.scheduler.preemption.stats.total > 0
        rows = [len(logits) for logits in steps]
        generated = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert max(rows) <= 8 and sum(rows) == generated + sum(len(prompt) - 1 for prompt in prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.prompt_logprobs is not None
            assert [next(iter(found or [None])) for found in output.prompt_logprobs] == [None, *prompt[1:]]


def test_tokens_are_decoded_and_adjustments_leave_logprobs_alone(model_dir: Path) -> None:
    prompt = random_prompt(20, VOCAB, seed=5)
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=30, max_logprobs=-1) as llm:
        (plain,) = run(llm, [prompt], asked(logprobs=-1, max_tokens=1))
        (first,) = plain.outputs[0].logprobs or ()
        assert len(first) == VOCAB and sum(2.718281828**entry.logprob for entry in first.values()) == pytest.approx(1)
        likeliest = plain.outputs[0].token_ids[0]
        changed = asked(logprobs=-1, max_tokens=1, logit_bias={likeliest: -100.0}, repetition_penalty=1.9)
        (other,) = run(llm, [prompt], changed)
        assert other.outputs[0].token_ids[0] != likeliest
        assert dict((other.outputs[0].logprobs or [{}])[0]) == dict(first)
        texts = {token: entry.decoded_token for token, entry in first.items()}
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None and texts == {token: tokenizer.token_text(token) for token in range(VOCAB)}
        assert "<|end|>" in texts.values(), "special tokens are shown"
