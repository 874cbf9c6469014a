"""AutoRound's own form of GPTQ's and AWQ's tensors: which packing is meant, and which modules are quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, refusal
from quantized_checkpoints import dequantized, load, weight_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.formats.quantization import read_quantization
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.models.hf_config import load_network_config

# What the tool writes beside what a test gives.
WRITTEN = {
    "quant_method": "auto-round", "autoround_version": "0.13.0", "data_type": "int", "iters": 0, "act_bits": 16,
    "act_data_type": "float", "act_dynamic": True, "act_group_size": None, "act_sym": None, "super_bits": None,
    "block_name_to_quantize": "model.layers", "enable_quanted_input": False, "low_gpu_mem_usage": True,
}  # fmt: skip
SAME = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int"}  # as the variant gptq-128
GPTQ = "auto_round:auto_gptq"


def as_auto_round(path: Path, packing: str = GPTQ, **changes: Any) -> None:
    """Write the config of a GPTQ or AWQ checkpoint as AutoRound would. A value of `...` removes a field."""
    own = json.loads((path / "config.json").read_text())["quantization_config"]
    config = {**WRITTEN, "bits": own["bits"], "group_size": own["group_size"], "sym": own.get("sym", False)}
    config |= {"packing_format": packing, **changes}
    edit_config(path, quantization_config={name: value for name, value in config.items() if value is not ...})


def assert_weights(decoder: CausalLM, expected: dict[str, Tensor]) -> None:
    for layer in decoder.layers:
        for linear in layer.linears:
            rows = torch.cat([expected[f"{module}.weight"] for module in linear.parts])
            assert torch.equal(weight_of(linear), rows), linear.parts


@pytest.mark.parametrize(
    ("variant", "packing", "changes"),
    [
        ("gptq-128", GPTQ, {}),
        ("gptq-32-asymmetric", GPTQ, {"block_name_to_quantize": [["model.layers.0", "model.layers.1"]]}),
        ("gptq-8-bits-asymmetric", GPTQ, {"backend": "auto"}),
        ("gptq-v2-asymmetric", "auto_round:gptqmodel", {"block_name_to_quantize": None}),
        ("gptq-v2-asymmetric", "auto_round", {"block_name_to_quantize": "model.visual.blocks, model.layers"}),
        ("awq-32", "auto_round:auto_awq", {}),
        ("awq-128", "auto_round:awq", {"sym": True}),
    ],
)
def test_weights_are_those_of_the_packing(
    variant: str, packing: str, changes: dict[str, Any], quantized_copy: Callable[[str], Path]
) -> None:
    path = quantized_copy(variant)
    expected = dequantized(path)
    as_auto_round(path, packing, **changes)
    assert_weights(load(path), expected)


def test_the_packing_of_older_configs_and_of_those_that_name_none(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-32-asymmetric")
    expected = dequantized(path)
    for changes in (
        {"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"},
        {"backend": "gptq:marlin"},  # what multiplies
    ):
        as_auto_round(path, packing_format=..., **changes)
        assert_weights(load(path), expected)


def test_modules_of_16_bits_and_outside_the_blocks_are_plain(
    plain_checkpoint: Path, quantized_copy: Callable[[str], Path]
) -> None:
    path = quantized_copy("gptq-128")
    (q, up) = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    stored = load_file(path / "model.safetensors")
    plain = load_file(plain_checkpoint / "model.safetensors")
    left_plain = {name: plain[name] for name in plain if name.startswith(("model.layers.1.", f"{q}."))}
    kept = {name: each for name, each in stored.items() if not name.startswith(("model.layers.1.", f"{q}."))}
    save_file(kept | left_plain, path / "model.safetensors")
    extra = {
        q: {"bits": 16, "data_type": "float"},
        "model.layers.0.input_layernorm": {"bits": 16},
        up: {"group_size": 128},
    }
    for changes in (
        {"block_name_to_quantize": "model.layers.0", "extra_config": extra},
        {"extra_config": extra | {r".*layers\.1\..*": {"bits": 16}}},
        {"extra_config": extra | {r"layers\.1\.(self_attn|mlp)": {"bits": 32}}},
    ):
        edit_config(path, quantization_config=SAME)
        as_auto_round(path, **changes)
        decoder = load(path)
        edit_config(path, quantization_config={"quant_method": "gptq", "checkpoint_format": "gptq", **SAME})
        assert_weights(decoder, dequantized(path))
        assert all(linear.weight.dense is not None for linear in decoder.layers[1].linears)
        assert decoder.layers[0].mlp.down.weight.dense is None


def test_the_output_projection_is_quantized_where_the_config_names_it() -> None:
    for extra, is_quantized in (({"lm_head": SAME}, True), ({"lm_head": {"bits": 16}}, False), ({}, False)):
        method = read_quantization({**WRITTEN, **SAME, "extra_config": extra}, "bfloat16")
        assert method.modules.include("lm_head") is is_quantized


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"packing_format": "auto_round:llm_compressor"}, ["'auto_round:llm_compressor'", "auto_round:auto_awq"]),
    ({"packing_format": "auto_round:auto_awq", "bits": 8}, ["bits=8", "must be 4", "auto_round:auto_awq"]),
    ({"bits": ...}, ["must say the bits"]),
    ({"data_type": "mx_fp"}, ["data_type='mx_fp'", "'int'"]),
    ({"act_bits": 8}, ["act_bits=8", "16"]),
    ({"block_name_to_quantize": [5]}, ["block_name_to_quantize=[5]"]),
    ({"extra_config": {"model.layers.0.mlp.up_proj": 16}}, ["extra_config['model.layers.0.mlp.up_proj']=16"]),
    ({"extra_config": {"a": {"bits": 8}}}, ["extra_config['a']", "bits=8, but bits=4", "16 bits"]),
    ({"extra_config": {"a": {"bits": 4, "sym": False}}}, ["extra_config['a']", "sym=False, but sym=True"]),
    ({"extra_config": {"(a+)+$": {"bits": 16}}}, ["(a+)+$", "list the names"]),
    ({"rotation_config": {"kind": "hadamard"}}, ["rotation_config={'kind': 'hadamard'}"]),
]


def test_other_forms_are_refused_by_name(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-128")
    config = (path / "config.json").read_bytes()
    for changes, says in REFUSED:
        as_auto_round(path, **changes)
        message = refusal(lambda: load_network_config(path))
        assert all(text in message for text in ["quantization_config", *says]) and "\n" not in message, message
        (path / "config.json").write_bytes(config)
