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

from benchmarks.quantize_checkpoint import quantized as parts_of
from nanovllm import LLM
from nanovllm.formats.quantization import read_quantization
from nanovllm.formats.quantization.packed_method import QuantizedWeight
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec

SMALL = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 40}
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


def assert_weights(decoder: Decoder, expected: dict[str, Tensor]) -> None:
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


def test_what_transformers_writes_is_read() -> None:
    from transformers import AutoRoundConfig

    method = read_quantization(json.loads(AutoRoundConfig().to_json_string(use_diff=False)), "bfloat16")
    assert method.name == "auto-round" and method.modules.include("model.layers.0.mlp.up_proj")


def test_the_engine_names_the_form(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-128")
    as_auto_round(path)
    LLM(path, quantization="auto-round", **SMALL).close()


def test_modules_of_16_bits_and_outside_the_blocks_are_plain(
    plain_checkpoint: Path, quantized_copy: Callable[[str], Path]
) -> None:
    path, (q, up) = quantized_copy("gptq-128"), ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    stored, plain = load_file(path / "model.safetensors"), load_file(plain_checkpoint / "model.safetensors")
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


def test_a_quantized_output_projection(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-128")
    tensors = load_file(path / "model.safetensors")
    head = torch.nn.functional.pad(tensors.pop("lm_head.weight").float(), (0, 0, 0, 1))  # a multiple of 8
    embedding = torch.nn.functional.pad(tensors["model.embed_tokens.weight"], (0, 0, 0, 1))
    parts = {f"lm_head.{name}": each.contiguous() for name, each in parts_of(head, "gptq", 4, 128, True)}
    save_file({**tensors, **parts, "model.embed_tokens.weight": embedding}, path / "model.safetensors")
    edit_config(path, vocab_size=len(head))
    as_auto_round(path, extra_config={"lm_head": SAME})
    assert isinstance(load(path).lm_head, QuantizedWeight)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"packing_format": "auto_round:llm_compressor"}, ["'auto_round:llm_compressor'", "auto_round:auto_awq"]),
    ({"packing_format": "auto_round:auto_awq", "bits": 8}, ["bits=8", "must be 4", "auto_round:auto_awq"]),
    ({"bits": 2}, ["bits=2", "4 or 8"]),
    ({"bits": ...}, ["must say its bits"]),
    ({"data_type": "mx_fp"}, ["data_type='mx_fp'", "'int'"]),
    ({"act_bits": 8}, ["act_bits=8", "16"]),
    ({"block_name_to_quantize": [5]}, ["block_name_to_quantize=[5]"]),
    ({"extra_config": {"model.layers.0.mlp.up_proj": 16}}, ["extra_config['model.layers.0.mlp.up_proj']=16"]),
    ({"extra_config": {"a": {"bits": 8}}}, ["extra_config['a']", "bits=8, but bits=4", "16 bits"]),
    ({"extra_config": {"a": {"bits": 4, "sym": False}}}, ["extra_config['a']", "sym=False, but sym=True"]),
    ({"extra_config": {"a": {"bits": 3}}}, ["extra_config['a']", "bits=3", "4 or 8"]),
    ({"extra_config": {"(a+)+$": {"bits": 16}}}, ["(a+)+$", "list the names"]),
    ({"rotation_config": {"kind": "hadamard"}}, ["'rotation_config'"]),
]


def test_other_forms_are_refused_by_name(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-128")
    config = (path / "config.json").read_bytes()
    for changes, says in REFUSED:
        as_auto_round(path, **changes)
        message = refusal(lambda: load_decoder_spec(path))
        assert all(text in message for text in ["quantization_config", *says]) and "\n" not in message, message
        (path / "config.json").write_bytes(config)
