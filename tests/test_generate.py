"""Whole engines against Transformers: greedy, float32, token for token, resident and offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, GPT_OSS_ROPE, ROPES, fix_rope, make_checkpoint
from engines import (
    PREFILL_WAYS,
    for_groups,
    greedy,
    greedy_reference,
    offloaded,
    random_prompt,
    recorded_logits,
    set_prefill,
    token_ids,
)
from fast import fast_only

from nanovllm import LLM
from nanovllm.models.hf_config import load_network_config

BLOCK = 16
VOCAB = 199
# One token, and one less than, exactly and one more than one and several blocks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 7 * BLOCK + 5)
MAX_TOKENS = BLOCK + 3  # generation crosses a block boundary from everywhere

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 32},
    "qwen3-tied-mha": {"family": "qwen3", "tie": True, "heads": 2, "kv_heads": 2, "head_dim": 128},
    "qwen3-yarn": {"family": "qwen3", "rope": ROPES["yarn"], "heads": 4, "kv_heads": 1, "head_dim": 16},
    "qwen2": {"family": "qwen2", "heads": 6, "kv_heads": 2, "head_dim": 16, "tie": True},
    "qwen2-windows": {"family": "qwen2", "layers": 3, "sliding_window": 21, "head_dim": 16},
    "qwen2-dynamic": {"family": "qwen2", "rope": ROPES["dynamic"], "max_positions": 64, "head_dim": 16},
    "llama": {"family": "llama", "heads": 4, "kv_heads": 4, "head_dim": 16},
    "llama3-rope": {"family": "llama", "rope": ROPES["llama3"], "heads": 4, "kv_heads": 1, "head_dim": 64, "tie": True},
    "llama-linear": {"family": "llama", "rope": ROPES["linear"], "attention_bias": True, "mlp_bias": True},
    "qwen3-odd-heads": {"family": "qwen3", "heads": 3, "kv_heads": 1, "head_dim": 24},  # not a multiple of 16
    "mistral": {"family": "mistral", "heads": 8, "kv_heads": 2, "head_dim": 80},
    "qwen3-moe": {"family": "qwen3_moe", "layers": 3, "mlp_only_layers": [0], "experts": 6, "experts_per_tok": 3},
    "mixtral": {"family": "mixtral", "heads": 4, "kv_heads": 1, "experts": 4, "sliding_window": 40},
    "gemma3": {"family": "gemma3", "layers": 4, "sliding_window": 18, "head_dim": 32, "rope": ROPES["linear"]},
    "gemma3-tied": {
        "family": "gemma3",
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention"],
        "kv_heads": 1,
        "tie": True,
    },
    "gpt-oss": {"family": "gpt_oss", "layers": 3, "sliding_window": 18, "kv_heads": 1, "rope": GPT_OSS_ROPE},
    "gpt-oss-odd-heads": {"family": "gpt_oss", "heads": 3, "kv_heads": 3, "head_dim": 24},  # not a multiple of 16
    "mistral-window": {"family": "mistral", "sliding_window": 18, "head_dim": 16},
}
NAMED = {fields["family"] for fields in CHECKPOINTS.values()}
CHECKPOINTS |= {
    family: {"family": family, **tested.options[0]}
    for family, tested in FAMILIES.items()
    if family not in NAMED and tested.options
}  # test_longrope.py has Phi-3
FAST = ["qwen3"]
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80},
    "resident, small steps": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80, "max_num_batched_tokens": 29},
    "offloaded": offloaded(BLOCK),
    "offloaded, small steps, few blocks": offloaded(
        BLOCK, num_gpu_blocks=6, num_cpu_blocks=12, max_num_batched_tokens=37, cpu_attention=False
    ),
}
WAYS = [*((name, PREFILL_WAYS[0]) for name in ENGINES), ("offloaded, small steps, few blocks", "chunk-major")]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", fast_only(FAST, CHECKPOINTS))
def test_same_tokens_as_transformers(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, seed=3, vocab=VOCAB, **CHECKPOINTS[name])
    fix_rope(reference, load_network_config(tmp_path).network.max_model_len)
    prompts = [random_prompt(length, VOCAB, seed=1) for length in LENGTHS]
    expected = [greedy_reference(reference, prompt, MAX_TOKENS) for prompt in prompts]
    for engine, way in WAYS:
        with LLM(tmp_path, dtype="float32", **for_groups(tmp_path, ENGINES[engine])) as llm:
            set_prefill(llm, way)
            assert token_ids(llm, prompts, greedy(MAX_TOKENS)) == expected, engine
            # Again, now that prefixes are cached and blocks have been used.
            assert token_ids(llm, prompts[::-1], greedy(MAX_TOKENS)) == expected[::-1], engine


@pytest.mark.usefixtures("instruction_set")
def test_bfloat16_logits_stay_near_the_float32_reference(tmp_path: Path) -> None:
    """bf16 keeps 8 bits: each rounding errs by up to 2^-9 of the value. Through two layers the logits, with a standard
    deviation near 4, stay within 0.25 of the float32 ones at every position asked for, offloaded or not."""
    reference = make_checkpoint(tmp_path, seed=5, vocab=VOCAB, dtype="bfloat16", head_dim=64)
    prompts = [random_prompt(length, VOCAB, seed=2) for length in LENGTHS]
    with torch.inference_mode():
        exact = reference.float()
        expected = torch.stack([exact(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    for arguments in (ENGINES["resident"], ENGINES["offloaded"]):
        with LLM(tmp_path, **arguments) as llm, recorded_logits(llm) as logits:
            llm.generate(prompts, greedy(1), use_tqdm=False)
        error = (torch.cat(logits).float() - expected).abs().max().item()
        assert error < 0.25, error


def test_two_engines_side_by_side(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", "llama", seed=1, vocab=VOCAB)
    make_checkpoint(tmp_path / "b", "qwen2", seed=2, vocab=VOCAB)
    prompt = random_prompt(50, VOCAB, 1)
    with LLM(tmp_path / "a", **offloaded()) as a, LLM(tmp_path / "b", **offloaded()) as b:
        alone_a = token_ids(a, prompt, greedy(8))
        alone_b = token_ids(b, prompt, greedy(8))
        a.engine.add_request("x", None, greedy(8), prompt)
        b.engine.add_request("x", None, greedy(8), prompt)
        last = {}
        while a.engine.has_unfinished_requests() or b.engine.has_unfinished_requests():
            for name, llm in (("a", a), ("b", b)):
                for output in llm.engine.step():
                    last[name] = output.outputs[0].token_ids
        assert ([last["a"]], [last["b"]]) == (alone_a, alone_b)
