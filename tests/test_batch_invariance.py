"""The logits of a request are the same to the bit alone, in any batch, chunked, cached, preempted or offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import for_groups, logits_by_request, offloaded, random_prompt, set_prefill, watch_layerwise
from torch import Tensor

from nanovllm import LLM

BLOCK = 16
VOCAB = 203
# so many that requests are preempted, and enough for all else
MAX_TOKENS = 17
FEW_TOKENS = 8
LENGTHS = (1, 15, 16, 17, 40, 63, 64, 130)
ENGINES: dict[str, dict[str, Any]] = {
    "all at once": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 200},
    "small steps": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 200, "max_num_batched_tokens": 13},
    "preempted": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 14, "enable_prefix_caching": False},
    "offloaded": offloaded(BLOCK, 4, 100),
    "offloaded, small steps, chunk by chunk": offloaded(BLOCK, 5, 30, max_num_batched_tokens=19, cpu_attention=False),
    "offloaded, small steps, layer by layer": offloaded(BLOCK, 5, 30, max_num_batched_tokens=19, cpu_attention=False),
}


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        pytest.param("qwen3", "bfloat16", {"head_dim": 64}, marks=pytest.mark.slow),
        pytest.param("qwen2", "bfloat16", {"head_dim": 32}, marks=pytest.mark.slow),  # biases
        pytest.param("llama", "float32", {"head_dim": 16}, marks=pytest.mark.slow),
        pytest.param("mistral", "float32", {"head_dim": 48, "sliding_window": 21}, marks=pytest.mark.slow),
        pytest.param("olmo3", "bfloat16", {"head_dim": 32, "sliding_window": 21, "layers": 4}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", "bfloat16", {"n_group": 2, "experts": 8, "layers": 3}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", "float32", {"experts": 8}, marks=pytest.mark.slow),
        pytest.param("gemma3", "bfloat16", {"head_dim": 32, "sliding_window": 21}, marks=pytest.mark.slow),
        ("gpt_oss", "bfloat16", {"sliding_window": 21, "layers": 2}),
        pytest.param("qwen3_moe", "bfloat16", {"mlp_only_layers": [1], "layers": 3}, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_the_batch(tmp_path: Path, family: str, dtype: str, options: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, family, vocab=VOCAB, dtype=dtype, hidden=128, intermediate=160, **options)
    prompts = [random_prompt(length, VOCAB, seed=6) for length in LENGTHS]
    alone: dict[tuple[int, int], Tensor] = {}
    with LLM(tmp_path, **for_groups(tmp_path, {"kvcache_block_size": BLOCK, "num_gpu_blocks": 40})) as llm:
        for index, prompt in enumerate(prompts):
            alone |= {(index, token): row for (_, token), row in logits_by_request(llm, [prompt], MAX_TOKENS).items()}
    assert len(alone) == len(LENGTHS) * MAX_TOKENS
    for name, arguments in ENGINES.items():
        with LLM(tmp_path, **for_groups(tmp_path, arguments)) as llm:
            layerwise_memory = watch_layerwise(llm)
            set_prefill(llm, "chunk-major" if "chunk by chunk" in name else "layer-major")
            max_tokens = MAX_TOKENS if name == "preempted" else FEW_TOKENS
            for state in ("cold",) if name == "preempted" else ("cold", "warm"):
                together = logits_by_request(llm, prompts, max_tokens)
                assert len(together) == len(LENGTHS) * max_tokens
                differing = [key for key in together if not torch.equal(alone[key], together[key])]
                assert not differing, f"{name}, {state}: {differing[:5]}"
            assert bool(layerwise_memory) == ("layer by layer" in name)
            assert llm.engine.scheduler.preemption.stats.total > 0 or name != "preempted"
