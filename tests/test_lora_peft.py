"""Adapters that PEFT made: the tokens are those of PEFT's own model, adapter by adapter, in one batch."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import greedy, greedy_reference, offloaded, random_prompt
from lora_helpers import write_adapter
from safetensors.torch import load_file, save_file
from whole_models import WHOLE, make_whole

from nanovllm import LLM
from nanovllm.errors import RequestError
from nanovllm.features.lora.adapter_files import AdapterRegistry
from nanovllm.lora_request import LoRARequest
from nanovllm.models.hf_config import WHOLE_MODELS, load_network_config

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


# ---- adapters of whole models for images and text

LINEAR = ["q_proj", "v_proj", "up_proj", "in_proj_qkv", "in_proj_z", "linear_fc1"]  # the vision tower has some of them
# Names of parts of the model, in the text model alone.
OF_TEXT: dict[str, Any] = {
    "r": 2,
    "lora_alpha": 4,
    "target_modules": r".*language_model.*\.(o_proj|down_proj)",
    "rank_pattern": {"^model.language_model.layers.1.self_attn.o_proj": 7},
    "alpha_pattern": {"language_model.layers.1.self_attn.o_proj": 3},
}


def write_older(new: Path, old: Path) -> Path:
    """The same adapter as Transformers' models of a year before had the names of their parts."""
    old.mkdir()
    config = (new / "adapter_config.json").read_text().replace("language_model.layers.", "language_model.model.layers.")
    (old / "adapter_config.json").write_text(config.replace("^model.", "^"))
    renamed = {}
    for name, tensor in load_file(new / "adapter_model.safetensors").items():
        whole = name.removeprefix("base_model.model.model.").replace("language_model.", "language_model.model.", 1)
        renamed[f"base_model.model.{whole}"] = tensor
    save_file(renamed, old / "adapter_model.safetensors")
    return old


@pytest.mark.parametrize(
    "which",
    [name if name.startswith("Gemma3") else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE],
)
def test_the_tokens_of_a_whole_model_are_those_of_peft(
    which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = r".*vision.*" if which.startswith("Gemma4For") else None  # whose linear layers PEFT does not know
    linear = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "exclude_modules": own}
    prompts = [random_prompt(length, VOCAB, seed=length) for length in (9, 40)]
    expected = [greedy_reference(make_whole(tmp_path / "model", which), prompt, 8) for prompt in prompts]
    requests: list[LoRARequest | None] = [None]
    for name, config in {"linear": linear, "of text": OF_TEXT}.items():
        torch.manual_seed(len(requests))
        options = peft.LoraConfig(init_lora_weights=False, **config)
        adapted = peft.get_peft_model(make_whole(tmp_path / "again", which), options).eval()
        adapted.save_pretrained(tmp_path / name)
        older = write_older(tmp_path / name, tmp_path / f"older {name}")
        found = [greedy_reference(adapted, prompt, 8) for prompt in prompts]
        assert found != expected[:2]
        for path in (tmp_path / name, older):
            requests.append(LoRARequest(path.name, len(requests), str(path)))
            expected += found
    adapters = [request for request in requests for _ in prompts]
    arguments: dict[str, Any] = {"device": "cpu", "enable_lora": True, "max_loras": 4, "dtype": "float32"}
    with caplog.at_level(logging.INFO), LLM(tmp_path / "model", **arguments, **offloaded(16, 4, 80)) as llm:
        outputs = llm.generate(prompts * len(requests), greedy(8), use_tqdm=False, lora_request=adapters)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    told = [record.getMessage() for record in caplog.records if record.name.endswith("adapter_files")]
    tower = [name for name in load_file(tmp_path / "linear/adapter_model.safetensors") if "language_model" not in name]
    assert [tower[0] in line for line in told[:1]] == [True] * bool(tower)


def test_every_whole_model_is_tested() -> None:
    assert {name.split()[0] for name in WHOLE} == set(WHOLE_MODELS)


NAME = "base_model.model.{}.layers.0.{}.lora_{}.weight"


@pytest.mark.parametrize(
    "names, says",
    [
        (["model.vision_tower.encoder 8 self_attn.q_proj"], "adapts what only images or sounds pass, 2: base_model"),
        (
            ["model.language_model 64 self_attn.q_proj", "language_model.model 64 self_attn.q_proj"],
            "lora_A.weight': names of two models; save the adapter anew",
        ),
        (["model.language_model 64 self_attn.qkv"], "Gemma3ForCausalLM of 2 layers has no such linear layer"),
        (["model.audio 64 self_attn.q_proj"], "Gemma3ForCausalLM of 2 layers has no such linear layer"),
    ],
)
def test_adapters_of_other_parts_are_refused(gemma: Path, names: list[str], says: str, tmp_path: Path) -> None:
    tensors = {}
    for name in names:
        part, size, module = name.split()
        tensors[NAME.format(part, module, "A")] = torch.ones(4, int(size))
        tensors[NAME.format(part, module, "B")] = torch.ones(64, 4)
    path = write_adapter(tmp_path / "adapter", tensors)
    registry = AdapterRegistry(load_network_config(gemma).network, max_lora_rank=8)
    with pytest.raises(RequestError, match=re.escape(says)):
        registry.find(LoRARequest("a", 1, str(path)))


gemma = checkpoint_fixture("gemma3")
