"""Adapters that PEFT made: the tokens are those of PEFT's own model, adapter by adapter, in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, greedy_reference, offloaded, random_prompt

from nanovllm import LLM
from nanovllm.features.lora.request import LoRARequest

peft = pytest.importorskip("peft", reason="peft is not installed")

VOCAB = 199
# Several adapters at a time: different modules, ranks and scales.
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "mlp, rank-stabilized": {"r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"^o_proj": 9, "o_proj": 5, "^model.layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"k_proj": 3},
    },
    "one layer": {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "not in all layers": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": ["layers.0.self_attn.q_proj"],
        "layers_to_transform": [],
    },
    "by a pattern": {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[01]\.(self_attn\.o|mlp\.down)_proj"},
}


def peft_model(model: Any, seed: int, **config: Any) -> Any:
    """PEFT's model with random A and B."""
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)).eval()


@pytest.mark.parametrize(
    "family, engine",
    [
        ("qwen3", {"kvcache_block_size": 16, "num_gpu_blocks": 80}),
        pytest.param("qwen2", offloaded(16, 4, 80, max_num_batched_tokens=32), marks=pytest.mark.slow),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("mistral", offloaded(16, 4, 80), marks=pytest.mark.slow),
        pytest.param("ministral3", offloaded(16, 4, 80), marks=pytest.mark.slow),
        pytest.param("gemma4", offloaded(16, 4, 80), marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_of_peft(family: str, engine: dict[str, Any], tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model", family)
    prompts = [random_prompt(length, VOCAB, seed=length) for length in (9, 40)]
    requests: list[LoRARequest | None] = [None]
    expected = [[greedy_reference(base, prompt, 12) for prompt in prompts]]
    for number, (name, config) in enumerate(ADAPTERS.items(), start=1):
        adapted = peft_model(make_checkpoint(tmp_path / "again", family), seed=number, **config)
        adapted.save_pretrained(tmp_path / name)
        requests.append(LoRARequest(name, number, str(tmp_path / name)))
        expected.append([greedy_reference(adapted, prompt, 12) for prompt in prompts])
    assert all(found != expected[0] for found in expected[1:])
    with LLM(tmp_path / "model", device="cpu", enable_lora=True, max_loras=len(ADAPTERS), **engine) as llm:
        adapters = [request for request in requests for _ in prompts]
        outputs = llm.generate(prompts * len(requests), greedy(12), use_tqdm=False, lora_request=adapters)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for each in expected for tokens in each]
    assert [output.lora_request for output in outputs] == adapters
