"""Quantized checkpoints in safetensors: weights to the bit, logits, memory, and bits that depend on nothing else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GATED_DELTA, edit_config, make_checkpoint, refusal
from engines import greedy, random_prompt, token_ids
from plans import parameter_bytes
from quantized_checkpoints import (
    VARIANTS,
    VOCAB,
    dequantized,
    load,
    quantize,
    set_quantization,
    weight_of,
    write_dequantized,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.quantize_checkpoint import quantization_config
from nanovllm import LLM, SamplingParams
from nanovllm.formats.quantization import read_quantization
from nanovllm.formats.quantization.packed_method import QuantizedWeight
from nanovllm.layers.packed_matrix import StackedWeights
from nanovllm.models.hf_config import load_network_config

CPU = torch.device("cpu")
# Log-probabilities of a quantized model differ from those of the dequantized one in plain numbers by the order of sums.
LOGPROB_BOUND = 2e-4
SMALL = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 40}


@pytest.fixture(scope="module")
def quantized(plain_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint in the form of a variant; written once, not to be changed."""
    folder = tmp_path_factory.mktemp("quantized")

    def of(variant: str) -> Path:
        path = folder / variant
        return path if path.exists() else quantize(plain_checkpoint, path, variant)

    return of


# ---- values


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_the_published_formula_and_stay_packed(
    variant: str, quantized: Callable[[str], Path]
) -> None:
    """To the bit, and the memory that they take is counted as stored."""
    path = quantized(variant)
    expected = dequantized(path)
    config = load_network_config(path)
    decoder = load(path)
    for layer in decoder.layers:
        for linear in layer.linears:
            assert linear.weight.dense is None
            rows = torch.cat([expected[f"{module}.weight"] for module in linear.parts])
            assert torch.equal(weight_of(linear), rows), linear.parts
    network = decoder.network
    assert network.weight_bytes == parameter_bytes(decoder) == config.on_meta("float32").network.weight_bytes
    assert network.num_layers * network.layer_weight_bytes() == sum(
        slot.view.nbytes for layer in decoder.layers for _, slot in layer.slots()
    )
    declared = config.on_meta().tensors()
    assert {name for name, tensor in declared if tensor.check is None} == {name for name, _ in decoder.slots()}
    copied = pickle.loads(pickle.dumps(config))
    assert copied.method == config.method and copied.network == copied.on_meta().network == config.network


def prompt_logprobs(llm: LLM, prompt: list[int]) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]


FEW = ("gptq-32-asymmetric", "awq-128", "pack-quantized-8-bits", "fp8")


@pytest.mark.parametrize("variant", [v if v in FEW else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_logits_are_those_of_transformers_on_the_dequantized_weights(
    variant: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    path = quantized(variant)
    prompt = random_prompt(50, VOCAB, 1)
    model = AutoModelForCausalLM.from_pretrained(write_dequantized(path, tmp_path / "plain"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    expected = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    with LLM(path, **SMALL) as llm:
        found = prompt_logprobs(llm, prompt)
    assert (torch.tensor(found).double() - expected).abs().max() < LOGPROB_BOUND


@pytest.mark.parametrize("variant", ["gptq-64", "awq-128", "pack-quantized-asymmetric", "fp8"])
def test_the_last_group_may_be_shorter(variant: str, tmp_path: Path) -> None:
    """Groups of 64 or 128 and blocks of 128 in 96 inputs; 160 in the MLP."""
    make_checkpoint(tmp_path / "plain", hidden=96, intermediate=160, heads=4, kv_heads=2, head_dim=24, vocab=VOCAB)
    path = quantize(tmp_path / "plain", tmp_path / variant, variant)
    expected = dequantized(path)
    decoder = load(path)
    for linear in (each for layer in decoder.layers for each in layer.linears):
        rows = torch.cat([expected[f"{module}.weight"] for module in linear.parts])
        assert torch.equal(weight_of(linear), rows), linear.parts
        x = torch.randn(30, linear.in_features, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(linear(x), x @ rows.T, rtol=1e-5, atol=1e-5)


# ---- the recall network, and other families


BESIDE_MLP = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("family", "variant", "options"),
    [
        ("qwen3_moe", "gptq-32-asymmetric", {}),
        ("glm4_moe", "float-quantized", {"layers": 3, "attention_bias": True}),
        ("minimax_m2", "fp8", {}),
        ("qwen3_5", "fp8", {}),
        ("qwen3_next", "awq-32", {"shared_expert_intermediate_size": 96}),
        pytest.param("glm4_moe", "awq-32", {"n_group": 3, "topk_group": 2, "experts": 6}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", "gptq-128", {}, marks=pytest.mark.slow),
        pytest.param("olmo3", "pack-quantized-32", {"layers": 4, "sliding_window": 21}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", "pack-quantized-asymmetric", {}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_5_moe", "gptq-32-asymmetric", {"shared_expert_intermediate_size": 96}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_next", "fp8", {}, marks=pytest.mark.slow),
        pytest.param("gemma4", "float-quantized", {"hidden_size_per_layer_input": 32}, marks=pytest.mark.slow),
        pytest.param("gemma4", "pack-quantized-32", BESIDE_MLP, marks=pytest.mark.slow),
    ],
)
def test_other_families(family: str, variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Every matrix of MLP and experts is quantized, also of an expert that all rows share; the router is plain, and so
    are the few rows of a recurrent layer that its config names."""
    sizes = {"linear_value_head_dim": 32} if family in GATED_DELTA else {}
    make_checkpoint(tmp_path / "plain", family, vocab=VOCAB, hidden=128, intermediate=256, **sizes, **options)
    path = quantize(tmp_path / "plain", tmp_path / "quantized", variant)
    if family == "minimax_m2" and variant == "fp8":  # as it is published
        set_quantization(path, modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"])
    decoder = load(path)
    prompts = [random_prompt(length, VOCAB, 5) for length in (30, 3)]
    mlps = [module for layer in decoder.layers for module in layer.mlp.modules()]
    assert all(weight.dense is None for module in mlps for weight in module.own_weights())
    assert family not in GATED_DELTA or isinstance(decoder.layers[0].mixer.input.weight, StackedWeights)
    assert decoder.network.weight_bytes == parameter_bytes(decoder)
    with LLM(path, **SMALL) as llm, LLM(write_dequantized(path, tmp_path / "dequantized"), **SMALL) as reference:
        assert token_ids(llm, prompts, greedy(6)) == token_ids(reference, prompts, greedy(6))


@pytest.mark.parametrize("variant", ["fp8", "gptq-64"])
def test_text_of_a_quantized_model_for_images(variant: str, tmp_path: Path) -> None:
    """Its config names modules as the whole model does, and what it says of the others is of no effect."""
    sizes = {"hidden": 128, "intermediate": 256, "linear_value_head_dim": 32}
    make_checkpoint(tmp_path / "text", "qwen3_5", vocab=VOCAB, **sizes)
    fields = json.loads((tmp_path / "text/config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": fields}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").write_text(json.dumps(whole))
    stored = load_file(tmp_path / "text/model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): part for name, part in stored.items()}
    save_file(renamed | {"model.visual.merger.weight": torch.ones(4, 4)}, tmp_path / "whole/model.safetensors")
    path = quantize(tmp_path / "whole", tmp_path / "quantized", variant)
    if variant == "fp8":
        plain = [f"model.language_model.layers.0.linear_attn.in_proj_{name}" for name in "ba"]
        set_quantization(path, modules_to_not_convert=[*plain, "model.visual.merger", "mtp.fc"])
    else:
        set_quantization(path, dynamic={"-:.*in_proj_[ab]$": {}, "-:.*visual.*": {}, "lm_head": {}})
    expected = dequantized(path)
    decoder = load(path)
    assert isinstance(decoder.layers[0].mixer.input.weight, StackedWeights)
    names = [name.replace("model.", "model.language_model.", 1) for name in decoder.layers[0].mixer.input.parts]
    assert torch.equal(
        weight_of(decoder.layers[0].mixer.input), torch.cat([expected[f"{name}.weight"] for name in names])
    )
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"+:.*": {"bits": 8}}}
    edit_config(path, quantization_config=gptq)
    assert "dynamic={'+:.*': {'bits': 8}}: must be" in refusal(lambda: load_network_config(path))


# ---- inputs


def test_which_checkpoints_ask_for_inputs_in_fp8() -> None:
    """Those whose config says that activations are scaled as they come; their weights carry it to the products."""

    def ask(config: dict[str, Any], **changes: Any) -> bool:
        fields = {name: value for name, value in (config | changes).items() if value != ...}
        weight = read_quantization(fields, "bfloat16").create({"a": 128}, 128, torch.bfloat16, torch.device("meta"))
        assert isinstance(weight, QuantizedWeight)
        return weight.packed.fp8_inputs

    for variant in ("fp8", "fp8-tensor"):
        config = quantization_config(variant, 8, 128, True)
        assert ask(config) and not ask(config, activation_scheme=...)
    config = quantization_config("float-quantized", 8, 128, True)
    group = config["config_groups"]["group_0"]
    assert ask(config) and not ask(config, config_groups={"a": group | {"input_activations": None}})
    assert not ask(quantization_config("gptq", 4, 128, True))
    inputs = group["input_activations"] | {"num_bits": 4}
    message = refusal(lambda: ask(config, config_groups={"a": group | {"input_activations": inputs}}))
    assert "'num_bits': 4" in message and "float with 8 bits" in message
