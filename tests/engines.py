"""What the tests of whole engines share: references, prompts, and a look at the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.data.batch import Batch, SamplingRow, ScheduledSequence, StepResult
from nanovllm.data.kv_groups import kv_groups
from nanovllm.engine.layerwise_scheduler import LayerwiseScheduler
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.memory import sizing
from nanovllm.memory.budget import DeviceSplit, TransferCount
from nanovllm.models.hf_config import load_network_config

PREFILL_WAYS = ("layer-major", "chunk-major")


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    random = Random(f"{length}-{seed}")
    return [random.randrange(vocab) for _ in range(length)]


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Transformers' own greedy generation, with nothing masked and no end token."""
    input_ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def beam_reference(
    model: PreTrainedModel, prompt: list[int], width: int, max_tokens: int, ends: Sequence[int] = (), **search: Any
) -> list[tuple[list[int], float]]:
    """(generated tokens, score) of each beam that Transformers returns, best first."""
    input_ids = torch.tensor([prompt])
    with torch.inference_mode():
        generated = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **search,
        )
    beams = []
    for tokens, score in zip(
        generated.sequences[:, len(prompt) :].tolist(), generated.sequences_scores.tolist(), strict=True
    ):
        end = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
        beams.append((tokens[:end], score))
    return beams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def several(count: int, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(n=count, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def token_ids(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """The generated tokens of each prompt."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def offloaded(block_size: int = 16, num_gpu_blocks: int = 4, num_cpu_blocks: int = 80, **others: Any) -> dict[str, Any]:
    """Engine arguments for offload with little device memory."""
    return {
        "enable_cpu_offload": True,
        "kvcache_block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        **others,
    }


def for_groups(model: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments whose numbers of blocks are for one KV group, for a model that may have more.

    A token takes a block of every group.
    """
    num_groups = len(kv_groups(load_network_config(model).network.kv_windows, block_size=1))
    counts = {name: num_groups * arguments[name] for name in ("num_gpu_blocks", "num_cpu_blocks") if name in arguments}
    return arguments | counts


def run_random_requests(llm: LLM, vocab: int, count: int, longest: int = 20) -> None:
    """Requests with common prefixes, some with two sequences, a few aborted; all others run to their end.

    longest: the most tokens of an answer.
    """
    random = Random(7)
    for index in range(count):
        prompt = random_prompt(random.choice([10, 33, 64, 100]), vocab, seed=index % 4)
        params = several(2, longest, index) if index % 4 == 3 else greedy(random.choice([1, longest]))
        llm.engine.add_request(str(index), None, params, prompt)
        for _ in range(random.randrange(4)):
            llm.engine.step()
        if random.random() < 0.3:
            llm.engine.abort_request(str(random.randrange(index + 1)))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def recorded_batches(llm: LLM) -> list[tuple[Batch, StepResult, TransferCount]]:
    """Every batch that runs from now on, its result, and what was copied over the link while it ran."""
    batches: list[tuple[Batch, StepResult, TransferCount]] = []
    execute = llm.engine.executor.execute

    def record(batch: Batch) -> StepResult:
        before = llm.kv_stats().transfers
        result = execute(batch)
        batches.append((batch, result, llm.kv_stats().transfers - before))
        return result

    llm.engine.executor.execute = record  # type: ignore[method-assign]
    return batches


@contextmanager
def logits_of_greedy_rows() -> Iterator[None]:
    """Tokens are chosen from `CausalLM.compute_logits` also where a graph could choose them."""
    with mock.patch.object(SamplingRow, "takes_likeliest", property(lambda row: False)):
        yield


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """The logits of every sampled row, `[rows, vocab]` for each step, while the context is open."""
    model = llm._runner.model
    recorded = []
    compute_logits = model.compute_logits

    def record(hidden: Tensor) -> Tensor:
        recorded.append(compute_logits(hidden))
        return recorded[-1].clone()

    model.compute_logits = record
    try:
        with logits_of_greedy_rows():
            yield recorded
    finally:
        model.compute_logits = compute_logits


def logits_by_request(llm: LLM, prompts: list[list[int]], max_tokens: int) -> dict[tuple[int, int], Tensor]:
    """Logits [vocab] of every token, by (prompt, index of the token)."""
    runner = llm._runner
    assert isinstance(runner, ModelRunner)
    generated: dict[tuple[int, int], Tensor] = {}
    execute = runner.execute
    compute_logits = runner.model.compute_logits
    first_ids: list[int] = []  # of the first prompt: the first step has it
    rows: list[tuple[int, int]] = []

    def recording_execute(batch: Batch) -> StepResult:
        first_ids.append(min(s.seq_id for s in batch.sequences))
        rows[:] = [(s.seq_id - first_ids[0], s.samples[0].index) for s in batch.sequences if s.samples]
        return execute(batch)

    def recording_logits(hidden: Tensor) -> Tensor:
        logits = compute_logits(hidden)
        generated.update(zip(rows[: len(logits)], logits.clone(), strict=True))
        del rows[: len(logits)]  # a layer-by-layer prefill that ends has a call of its own, last
        return logits

    # type: ignore[method-assign]
    runner.execute = recording_execute
    runner.model.compute_logits = recording_logits
    with logits_of_greedy_rows():
        llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
    # type: ignore[method-assign]
    runner.execute = execute
    runner.model.compute_logits = compute_logits
    return generated


def set_prefill(llm: LLM, way: str) -> None:
    """From now on plan every prefill chunk-major, or leave it to the planner: layer-major where that saves bytes."""
    assert way in PREFILL_WAYS
    if way == "chunk-major":
        hooks = llm.engine.scheduler.hooks
        hooks[:] = [hook for hook in hooks if not isinstance(hook, LayerwiseScheduler)]


def set_ring(monkeypatch: pytest.MonkeyPatch, ring_slots: int) -> None:
    """Engines made from now on have so many slots, as if they had as many layers."""

    def split(num_gpu_blocks: int, num_layers: int, slot_bytes: int | None = None) -> DeviceSplit:
        return DeviceSplit(ring_slots, num_gpu_blocks - -(-ring_slots // num_layers))

    monkeypatch.setattr(sizing, "split_device", split)


def watch_layerwise(llm: LLM) -> list[ScheduledSequence]:
    """Every share of a step that goes layer by layer, from now on."""
    layerwise_memory: list[ScheduledSequence] = []
    execute = llm.engine.executor.execute

    def watch(batch: Batch) -> StepResult:
        layerwise_memory.extend([batch.layerwise] if batch.layerwise is not None else [])
        return execute(batch)

    llm.engine.executor.execute = watch  # type: ignore[method-assign]
    return layerwise_memory
