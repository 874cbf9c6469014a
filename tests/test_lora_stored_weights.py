"""Adapters over weights that are stored packed: quantized safetensors and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, greedy_reference, offloaded, random_prompt
from fast import fast_only
from lora_helpers import ALL, make_adapter, merge_adapter
from quantized_checkpoints import quantize, write_dequantized

from nanovllm import LLM, RequestOutput, SamplingParams

VOCAB = 199
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_gpu_blocks": 60}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
# Log-probabilities with packed weights differ from those with plain ones by the order of sums.
LOGPROB_BOUND = 5e-4


def numbers(output: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities of prompt and output, to the bit."""
    positions = [position for position in output.prompt_logprobs or () if position]
    sequence = output.outputs[0]
    found = [*positions, *(sequence.logprobs or ())]
    return [sequence.token_ids, [{token: each.logprob for token, each in position.items()} for position in found]]


VARIANTS = ("gptq-128", "awq-32", "pack-quantized-32", "float-quantized", "fp8")


@pytest.mark.parametrize("variant", fast_only(["gptq-128"], dict.fromkeys(VARIANTS)))
def test_quantized_checkpoints(variant: str, tmp_path: Path) -> None:
    """As over the same weights in plain numbers; alone, among others and offloaded the bits are the same."""
    model = make_checkpoint(tmp_path / "plain", hidden=128, intermediate=256, heads=8, kv_heads=4, vocab=VOCAB)
    quantize(tmp_path / "plain", tmp_path / "packed", variant)
    write_dequantized(tmp_path / "packed", tmp_path / "dense")
    adapters = [
        make_adapter(tmp_path / "a", model, 1, ALL, rank=8, lora_alpha=4),
        make_adapter(tmp_path / "b", model, 2, ("k_proj", "up_proj"), rank=3),
        None,
    ]
    prompts = [random_prompt(length, VOCAB, seed=1) for length in (50, 9, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(tmp_path / "dense", **SMALL, **LORA) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    with LLM(tmp_path / "packed", **SMALL, **LORA) as llm:
        assert llm.engine.executor.model.layers[0].qkv.weight.dense is None
        found = [
            llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0]
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        llm.reset_prefix_cache()
        together = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    with LLM(tmp_path / "packed", **{**SMALL, **offloaded(16, 4, 60, max_num_batched_tokens=40)}, **LORA) as llm:
        moved = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    assert list(map(numbers, found)) == list(map(numbers, together)) == list(map(numbers, moved))
    for mine, theirs in zip(found, expected, strict=True):
        pairs = zip(mine.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
        for position, other in pairs:
            if position and other:
                differences = [
                    abs(position[token].logprob - other[token].logprob) for token in other if token in position
                ]
                assert differences and max(differences) < LOGPROB_BOUND


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_gguf_files(family: str, tmp_path: Path) -> None:
    """llama.cpp turns the rows of a Llama's q and k, and an adapter of PEFT does not."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from gguf_files import VOCAB as GGUF_VOCAB
    from gguf_files import WIDE, write_gguf

    model = make_checkpoint(tmp_path / "model", family, **{"layers": 1, **WIDE})
    path = write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    adapter = make_adapter(tmp_path / "a", model, 1, ALL, rank=8, lora_alpha=4)
    prompt = random_prompt(40, GGUF_VOCAB, seed=1)
    expected = [greedy_reference(model, prompt, 8)]
    merge_adapter(model, tmp_path / "a")
    expected.append(greedy_reference(model, prompt, 8))
    assert expected[0] != expected[1]
    with LLM(path, **SMALL, **LORA) as llm:
        outputs = llm.generate([prompt] * 2, greedy(8), use_tqdm=False, lora_request=[None, adapter])
        assert [output.outputs[0].token_ids for output in outputs] == expected
