"""What the tests of whole engines share: references, prompts, and a look at the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams


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


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def token_ids(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """The generated tokens of each prompt."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def offloaded(block_size: int = 16, num_gpu_blocks: int = 4, num_cpu_blocks: int = 80, **others: Any) -> dict[str, Any]:
    """Engine arguments for offload with little room on the device."""
    return {
        "enable_cpu_offload": True,
        "kvcache_block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        **others,
    }


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """The logits of every sampled row, `[rows, vocab]` for each step, while the context is open."""
    model, recorded = llm._runner.model, []
    compute_logits = model.compute_logits

    def record(hidden: Tensor) -> Tensor:
        recorded.append(compute_logits(hidden))
        return recorded[-1].clone()

    model.compute_logits = record
    try:
        yield recorded
    finally:
        model.compute_logits = compute_logits
