"""SmolLM2-135M-Instruct with adapters that PEFT made: PEFT's tokens, resident and offloaded, in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import offloaded
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.features.lora.request import LoRARequest

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.slow

MAX_TOKENS = 24
TOSS = 1e-3  # two logits nearer than this may change order with the order of a sum
TEXT = "The whale, like all things that are mighty, wears a false brow to the common world. " * 20
PROMPTS = ("Name three rivers of Europe.", TEXT + "\nWhat does the whale wear?")
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 16, "target_modules": "all-linear", "use_rslora": True},
}
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": 64, "num_gpu_blocks": 64},
    "offloaded": offloaded(64, 4, 64, max_num_batched_tokens=128, cpu_attention=False),
}


def perturbed(model: Any, seed: int, **config: Any) -> Any:
    """PEFT's model with small random A and B."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **config)).eval()
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.02)
    return adapted


def certain_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens up to the first that last bits could change."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tops: list[Tensor] = [logits[0].topk(2).values for logits in found.logits]
    sure = next((i for i, (first, second) in enumerate(tops) if first - second < TOSS), MAX_TOKENS)
    return list(found.sequences[0, len(prompt) :][:sure].tolist())


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[LoRARequest | None, list[list[int]]]:
    """What PEFT generates with each adapter, and Transformers without one."""
    folder, tokenizer = tmp_path_factory.mktemp("adapters"), AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    found: dict[LoRARequest | None, list[list[int]]] = {None: [certain_tokens(model, prompt) for prompt in prompts]}
    for number, (name, config) in enumerate(ADAPTERS.items(), start=1):
        adapted = perturbed(model, number, **config)
        adapted.save_pretrained(folder / name)
        request = LoRARequest(name, number, str(folder / name))
        found[request] = [certain_tokens(adapted, prompt) for prompt in prompts]
        model = adapted.unload()
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_the_tokens_are_those_of_peft(
    name: str, smollm2_dir: Path, expected: dict[LoRARequest | None, list[list[int]]]
) -> None:
    tokens = list(expected.values())
    assert all(len(each) > 5 for found in tokens for each in found)
    assert len({str(found) for found in tokens}) == 3, "the adapters change the answers"
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    arguments = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "enable_lora": True, "max_loras": 2}
    with LLM(smollm2_dir, **{**arguments, **ENGINES[name]}) as llm:
        lora_requests = [request for request in expected for _ in PROMPTS]
        outputs = llm.generate(list(PROMPTS) * len(expected), params, use_tqdm=False, lora_request=lora_requests)
        if name == "offloaded":
            assert llm.kv_stats().transfers.h2d_bytes > 0
    flat = [each for found in tokens for each in found]
    found = [output.outputs[0].token_ids[: len(each)] for output, each in zip(outputs, flat, strict=True)]
    assert found == flat
