"""gpt-oss: sinks, experts with biases whose gate and up alternate in the checkpoint, and experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GPT_OSS_ROPE, edit_config, make_checkpoint, refusal
from cpu_attention_helpers import add_cpu_attention_streams, force_share
from engines import greedy, greedy_reference, offloaded, random_prompt, token_ids
from quantized_checkpoints import load
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm import LLM
from nanovllm.data.network import RopeSpec
from nanovllm.layers.experts import Experts
from nanovllm.models.hf_config import read_network_config
from nanovllm.ops.packed_weights import dequantize

VOCAB = 199
BLOCK = 16
RESIDENT = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80}
SHAPE: dict[str, Any] = {"family": "gpt_oss", "layers": 3, "sliding_window": 18, "rope": GPT_OSS_ROPE}
WAYS: list[dict[str, Any]] = [
    {**RESIDENT, "max_num_batched_tokens": 29},
    offloaded(BLOCK, max_num_batched_tokens=31),
    offloaded(BLOCK, num_gpu_blocks=6, num_cpu_blocks=16, max_num_batched_tokens=37, cpu_attention=False),
]
# What gpt-oss-20b's config.json says.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    return path


# ---- configs


def test_the_published_config_is_read(published: Path) -> None:
    network = read_network_config(published).network
    assert network.kv_windows == (128, None) * 12 and network.max_model_len == 131072 and network.dtype == "bfloat16"
    yarn = RopeSpec("yarn", 150000.0, 32.0, 4096, 1.3465735902799727, truncate=False)
    assert network.ropes == (yarn,)
    assert network.experts is not None
    assert (network.experts.num_experts, network.experts.num_experts_per_tok) == (32, 4)
    edit_config(published.parent, layer_types=..., rope_scaling=..., rope_theta=..., num_local_experts=...)
    defaults = read_network_config(published).network
    assert defaults.kv_windows == network.kv_windows and defaults.ropes == (yarn,)
    assert defaults.experts is not None and defaults.experts.num_experts == 128


def test_bytes_of_the_published_sizes(published: Path) -> None:
    """20.9 billion parameters, of which 19.1 billion in the experts' matrices take 4.25 bits, norms and sinks 32."""
    plain = read_network_config(published, {"quantization_config": None}).network
    assert plain.num_weights == 20_914_757_184
    experts = 24 * 32 * 3 * 2880 * 2880
    wide = 24 * (2 * 2880 + 64) + 2880
    assert plain.weight_bytes == 2 * plain.num_weights + 2 * wide
    packed = read_network_config(published).network
    assert packed.weight_bytes == plain.weight_bytes - 2 * experts + experts * 17 // 32


def test_fused_tensors_of_other_shapes_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**stored, name: stored[name].transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    message = refusal(lambda: load(tmp_path))
    assert name in message and "[5, 64, 192]" in message and "[5, 192, 64]" in message


# ---- whole networks


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_concurrent_cpu_attention_is_merged_into_the_sinks(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path, **SHAPE)
    prompts = [random_prompt(length, VOCAB, seed=6) for length in (90, 5 * BLOCK)]
    expected = [greedy_reference(model, prompt, 12) for prompt in prompts]
    add_cpu_attention_streams(monkeypatch)
    with LLM(tmp_path, dtype="float32", **offloaded(BLOCK, 4, 40, max_num_batched_tokens=31)) as llm:
        force_share(llm, share)
        assert token_ids(llm, prompts, greedy(12)) == expected
        assert llm.kv_stats().transfers.cpu_attention_blocks > 0


# ---- MXFP4


def write_mxfp4(path: Path, target: Path, plain_layers: tuple[int, ...] = ()) -> PreTrainedModel:
    """The checkpoint with random experts in MXFP4, and Transformers' model with its own values of them."""
    generator = torch.Generator().manual_seed(9)
    stored = load_file(path / "model.safetensors")
    target.mkdir()
    (target / "plain").mkdir()
    config = json.loads((path / "config.json").read_text())
    (target / "plain" / "config.json").write_text(json.dumps(config))
    ignored = ["model.layers.*.self_attn", "lm_head", *(f"model.layers.{layer}.mlp.experts" for layer in plain_layers)]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (target / "config.json").write_text(json.dumps(config))
    plain = dict(stored)
    packed = dict(stored)
    for name in stored:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and int(name.split(".")[2]) not in plain_layers:
            experts, inputs, outputs = stored[name].shape
            shape = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 124, shape[:3], dtype=torch.uint8, generator=generator)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(packed, target / "model.safetensors")
    save_file(plain, target / "plain" / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(target / "plain", attn_implementation="eager").eval()


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    make_checkpoint(tmp_path / "model", **SHAPE)
    return tmp_path / "mxfp4", write_mxfp4(tmp_path / "model", tmp_path / "mxfp4", plain_layers=(1,))


def expert_matrix(experts: Experts, expert: int) -> Tensor:
    """Gate over up, as they are in memory."""
    weight: Any = experts.gate_up[expert]
    return weight.dense if weight.dense is not None else dequantize(weight.packed)


def test_mxfp4_has_transformers_values(mxfp4: tuple[Path, PreTrainedModel]) -> None:
    """One layer is named as not converted."""
    path, model = mxfp4
    decoder = load(path)
    forms = []
    for layer, theirs in zip(decoder.layers, model.model.layers, strict=True):
        assert isinstance(layer.mlp, Experts)
        forms.append(layer.mlp.gate_up.dense is None and layer.mlp.gate_up[0].dense is None)
        for expert in range(5):
            gate_up = theirs.mlp.experts.gate_up_proj[expert].T
            assert torch.equal(expert_matrix(layer.mlp, expert), torch.cat((gate_up[0::2], gate_up[1::2])))
    assert forms == [True, False, True]


@pytest.mark.usefixtures("instruction_set")
def test_mxfp4_gives_transformers_tokens(mxfp4: tuple[Path, PreTrainedModel]) -> None:
    path, model = mxfp4
    prompts = [random_prompt(length, VOCAB, seed=5) for length in (1, 3 * BLOCK + 5)]
    expected = [greedy_reference(model, prompt, 12) for prompt in prompts]
    for arguments in (RESIDENT, *WAYS):
        with LLM(path, dtype="float32", **arguments) as llm:
            assert token_ids(llm, prompts, greedy(12)) == token_ids(llm, prompts, greedy(12)) == expected


@pytest.mark.slow
def test_mxfp4_is_divided_between_ranks(mxfp4: tuple[Path, PreTrainedModel]) -> None:
    path, model = mxfp4
    prompts = [random_prompt(length, VOCAB, seed=5) for length in (40, 7)]
    expected = [greedy_reference(model, prompt, 8) for prompt in prompts]
    with LLM(path, dtype="float32", tensor_parallel_size=2, **RESIDENT) as llm:
        assert token_ids(llm, prompts, greedy(8)) == expected


def test_a_scale_that_is_nan_is_refused(mxfp4: tuple[Path, PreTrainedModel]) -> None:
    path, _ = mxfp4
    stored = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    stored[name][1, 2, 1] = 255
    save_file(stored, path / "model.safetensors")
    message = refusal(lambda: load(path))
    assert "a scale is NaN" in message and "experts.1.down_proj.scales" in message


def test_random_mxfp4_weights_are_of_the_usual_size(mxfp4: tuple[Path, PreTrainedModel]) -> None:
    with LLM(mxfp4[0], load_format="dummy", dtype="float32", **RESIDENT) as llm:
        (tokens,) = token_ids(llm, random_prompt(30, VOCAB, seed=5), greedy(8))
    assert len(set(tokens)) > 2
