"""Configs and tensors of quantized checkpoints: what is refused by name, and what tools write and is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_checkpoint, refusal
from mtp_heads import add_mtp_head
from quantized_checkpoints import dequantized, edit_tensors, load, quantize, set_quantization, weight_of
from safetensors.torch import load_file, save_file
from transformers import AutoRoundConfig, AwqConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from benchmarks.quantize_checkpoint import quantized as parts_of
from nanovllm import LLM
from nanovllm.apps.cli.main import main
from nanovllm.errors import ConfigError
from nanovllm.formats.quantization import read_quantization
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_mtp_head

SMALL = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 40}


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gptq-128", {"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "gptq, awq, auto-round"]),
    ("gptq-128", {"bits": 3}, ["bits=3", "4 or 8"]),
    ("gptq-128", {"group_size": 20}, ["group_size=20", "32, 64 and 128"]),
    ("gptq-128", {"desc_act": True}, ["desc_act=True"]),
    ("gptq-128", {"bits": None}, ["must say the bits"]),
    ("awq-128", {"version": "gemv"}, ["version='gemv'", "'gemm'"]),
    ("fp8", {"weight_block_size": [64, 128]}, ["weight_block_size=[64, 128]"]),
    ("float-quantized", {"format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized", "pack-quantized"]),
    ("float-quantized", {"config_groups": {}}, ["with one group"]),
    ("float-quantized", {"sparsity_config": {"format": "2:4"}}, ["sparsity_config"]),
    ("float-quantized", {"ignore": ["re:(a+)+$"]}, ["'re:(a+)+$'", "list the names"]),
    ("float-quantized", {"ignore": ["re:["]}, ["'re:['", "no regular expression"]),
]


def refused_with(path: Path, **changes: Any) -> str:
    """The message with which a checkpoint is refused whose quantization_config has these changes, for now."""
    config = (path / "config.json").read_bytes()
    set_quantization(path, **changes)
    message = refusal(lambda: LLM(path, **SMALL))
    (path / "config.json").write_bytes(config)
    return message


def test_other_configs_are_refused_by_name(quantized_copy: Callable[[str], Path]) -> None:
    paths = {variant: quantized_copy(variant) for variant in {variant for variant, *_ in REFUSED}}
    for variant, changes, says in REFUSED:
        message = refused_with(paths[variant], **changes)
        words = ["quantization_config", str(paths[variant]), *says]
        assert all(text in message for text in words) and "\n" not in message, message


def test_checkpoints_of_modelopt_are_refused_where_only_their_own_file_says_so(
    plain_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(plain_checkpoint, tmp_path / "modelopt"))
    own = path / "hf_quant_config.json"
    for quantization, says in (
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}, "quant_algo='NVFP4'"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo='FP8'"),
    ):
        own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
        message = refusal(lambda: LLM(path, **SMALL))
        assert f"{own}: {says}: checkpoints that ModelOpt has quantized are not supported" in message
        for model in (path, path / "config.json"):
            assert main(["plan", "--model", str(model), "--gpu-mem", "8GB"]) == 2
            assert message in capsys.readouterr().err
    own.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}))
    assert load_network_config(path).network == load_network_config(plain_checkpoint).network


def group_128(**changes: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **changes}}


def test_other_schemes_of_compressed_tensors_are_refused(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("pack-quantized-32")
    group = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    for changes, says in (
        (group_128(actorder="group"), "actorder='group'"),
        (group_128(strategy="tensor_group"), "'tensor_group'"),
        (group_128(strategy="channel"), "contradicts group_size=128"),
        ({"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}, "input_activations"),
        ({"format": "int-quantized"}, "'int-quantized'"),
    ):
        assert says in refused_with(path, config_groups={"group_0": group | changes})


Q_PROJ = "model.layers.0.self_attn.q_proj"
DAMAGED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gptq-128", {"scales": lambda t: t[:, :-1]}, [f"{Q_PROJ}.scales", "expected [1, 128]"]),
    ("gptq-128", {"qweight": lambda t: t.long()}, [f"{Q_PROJ}.qweight I64", "I32"]),
    ("gptq-128", {"g_idx": lambda t: t.flip(0) + 1}, [f"{Q_PROJ}.g_idx", "act-order"]),
    ("gptq-128", {"qzeros": lambda t: t + 1}, [f"{Q_PROJ}.qzeros", "sym=true"]),
    ("gptq-128", {"scales": lambda t: t.float() * 1.0001}, [f"{Q_PROJ}.scales", "does not fit into float16"]),
    ("fp8", {"weight": lambda t: torch.full_like(t, float("nan"))}, [f"{Q_PROJ}.weight", "NaN"]),
    ("pack-quantized-32", {"weight_shape": lambda t: t + 1}, [f"{Q_PROJ}.weight_shape", "[129, 129]"]),
]


def test_tensors_that_do_not_fit_are_named(quantized_copy: Callable[[str], Path]) -> None:
    paths = {variant: quantized_copy(variant) for variant in {variant for variant, *_ in DAMAGED}}
    for variant, changes, says in DAMAGED:
        path = paths[variant]
        weights = (paths[variant] / "model.safetensors").read_bytes()
        edit_tensors(path, **changes)
        message = refusal(lambda path=path: load(path))
        assert all(text in message for text in [str(path), *says]), message
        (path / "model.safetensors").write_bytes(weights)


def test_a_head_for_multi_token_prediction_is_checked_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_5", hidden=128, intermediate=128, linear_value_head_dim=32)
    add_mtp_head(tmp_path / "plain")
    path = quantize(tmp_path / "plain", tmp_path / "quantized", "gptq-128")
    module = "mtp.layers.0.mlp.up_proj"
    plain = [r"-:mtp\.fc", r"-:mtp.*attn", r"-:mtp.*(gate|down)_proj", r"-:.*in_proj_[ab]"]
    set_quantization(path, dynamic={pattern: {} for pattern in plain})
    tensors = load_file(path / "model.safetensors")
    parts = dict(parts_of(tensors.pop(f"{module}.weight").float(), "gptq", 4, 128, True))
    for wrong in (0, 1):
        changed = parts | {"qzeros": parts["qzeros"] + wrong}
        named = {f"{module}.{name}": part.contiguous() for name, part in changed.items()}
        save_file(tensors | named, path / "model.safetensors")
        if wrong:
            assert f"{module}.qzeros: sym=true" in refusal(lambda: load_mtp_head(path, load(path)))
        else:
            load_mtp_head(path, load(path))


def test_sizes_that_the_format_cannot_have_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, intermediate=100)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    message = refusal(lambda: load_network_config(tmp_path))
    assert "model.layers.0.mlp.gate_proj cannot be stored as gptq: out_features=100 must be a multiple of 8" in message


def test_scales_in_bfloat16_that_fit_are_read_also_without_group_order(quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy("gptq-128")
    edit_tensors(path, scales=lambda t: t.bfloat16(), g_idx=None)
    tensors = load_file(path / "model.safetensors")
    assert tensors[f"{Q_PROJ}.scales"].dtype is torch.bfloat16
    assert torch.equal(weight_of(load(path).layers[0].mixer.input)[:128], dequantized(path)[f"{Q_PROJ}.weight"])


def test_biases_of_zeros_that_the_network_does_not_have(quantized_copy: Callable[[str], Path]) -> None:
    """AutoGPTQ writes them for every matrix."""
    path = quantized_copy("gptq-128")
    tensors = load_file(path / "model.safetensors")
    zeros = {
        name.replace("qweight", "bias"): torch.zeros(t.shape[1]) for name, t in tensors.items() if "qweight" in name
    }
    save_file(tensors | zeros, path / "model.safetensors")
    load(path)
    name = next(iter(zeros))
    save_file(tensors | zeros | {name: torch.ones(128)}, path / "model.safetensors")
    assert f"{name} is not zero" in refusal(lambda: load(path))
    save_file(tensors | {"model.layers.0.other.bias": torch.zeros(3)}, path / "model.safetensors")
    assert "model.layers.0.other.bias" in refusal(lambda: load(path))


MODULES = ("mlp.up_proj", "mlp.experts.0.up_proj")  # all are quantized by a method, or the experts


# What tools write, as far as it is not in `quantize_checkpoint`. None of it changes how a matrix is stored.
REAL = {
    "gptq-128": {
        "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": None,
        "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
        "tokenizer": None, "use_cuda_fp16": False, "use_exllama": True, "static_groups": False, "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.0.0"]}, "dynamic": None, "autoround_version": "0.13.0", "data_type": "int",
        "enable_quanted_input": False, "iters": 0, "low_gpu_mem_usage": True, "provider": "auto-round",
    },
    "awq-128": {
        "backend": "autoawq", "do_fuse": False, "exllama_config": None, "modules_to_fuse": None, "method": "awq",
        "desc_act": False, "lm_head": False, "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32",
        "dynamic": {"-:.*visual.*": {}}, "meta": {"quantizer": ["gptqmodel:6.1.0"]},
        "provider": "auto-round", "sym": False, "nsamples": 512, "seqlen": 1024, "modules_to_not_convert": ["lm_head"],
    },
    "fp8": {
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
        "weight_per_tensor": False, "act_per_tensor": False,
    },
    "float-quantized": {
        "version": "0.9.1", "provider": "auto-round", "transform_config": {}, "sparsity_config": {
            "format": "dense", "global_sparsity": 0.1, "ignore": [], "registry_requires_subclass": False,
            "sparsity_structure": "unstructured", "targets": [],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", REAL)
def test_fields_that_tools_write_have_no_effect(variant: str, quantized_copy: Callable[[str], Path]) -> None:
    path = quantized_copy(variant)
    before = load_network_config(path)
    set_quantization(path, **REAL[variant], a_new_field=1)
    forms = [
        [(name, tensor._replace(check=None)) for name, tensor in config.on_meta().tensors()]
        for config in (before, load_network_config(path))
    ]
    assert forms[0] == forms[1]


WRITTEN = {
    "gptq": GPTQConfig(bits=4, group_size=128, desc_act=False),
    "auto-round": AutoRoundConfig(),
    "awq": AwqConfig(),
    "fp8": FineGrainedFP8Config(),
    "mxfp4": Mxfp4Config(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_transformers_writes_is_read(name: str) -> None:
    fields = json.loads(WRITTEN[name].to_json_string(use_diff=False))
    method = read_quantization(fields, "bfloat16")
    assert method.name == name and any(method.modules.include(f"model.layers.0.{each}") for each in MODULES)


def test_the_argument_quantization_must_name_the_checkpoints_method(
    quantized_copy: Callable[[str], Path], plain_checkpoint: Path
) -> None:
    path = quantized_copy("gptq-128")
    for name in ("gptq", "gptq_marlin"):
        LLM(path, quantization=name, **SMALL).close()
    message = refusal(lambda: LLM(path, quantization="awq", **SMALL), ConfigError)
    assert "quantization='awq'" in message and "gptq" in message
    message = refusal(lambda: LLM(plain_checkpoint, quantization="fp8", **SMALL), ConfigError)
    assert "quantization='fp8'" in message and "not quantized" in message
