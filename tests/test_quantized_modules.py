"""Which matrices of a quantized checkpoint are quantized: those that its config does not leave out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from engines import greedy, random_prompt, token_ids
from plans import parameter_bytes
from quantized_checkpoints import VOCAB, dequantized, load, set_quantization, write_dequantized
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.formats.quantization.config_fields import Modules
from nanovllm.formats.quantization.packed_method import QuantizedWeight
from nanovllm.layers.packed_matrix import StackedWeights

SMALL = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 40}


def test_ignored_modules_stay_plain(plain_checkpoint: Path, quantized_copy: Callable[[str], Path]) -> None:
    """k of layer 0 between quantized q and v, and all of layer 1's MLP."""
    path = quantized_copy("pack-quantized-32")
    names = [*(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")), "model.layers.0.self_attn.k_proj"]
    tensors = load_file(path / "model.safetensors")
    source = load_file(plain_checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in names}
    save_file(kept | {f"{name}.weight": source[f"{name}.weight"] for name in names}, path / "model.safetensors")
    set_quantization(path, ignore=["lm_head", r"re:model\.layers\.1\.mlp\..*", names[-1]])
    decoder = load(path)
    assert isinstance(decoder.layers[0].mixer.input.weight, StackedWeights)
    assert decoder.layers[1].mlp.down.weight.dense is not None
    assert decoder.network.weight_bytes == parameter_bytes(decoder)
    expected = dequantized(path)
    for layer in decoder.layers:
        rows = torch.cat([expected[f"{module}.weight"] for module in layer.mixer.input.parts])
        x = torch.randn(5, 128)
        torch.testing.assert_close(layer.mixer.input(x), x @ rows.T, rtol=1e-5, atol=1e-5)
        indices = torch.tensor([0, 130, 200, 255, 3])
        assert torch.equal(layer.mixer.input.weight.rows(indices), rows[indices])


def test_parts_of_names_that_stay_plain() -> None:
    """As lists of AutoAWQ and Transformers have them: whole names, and parts of them with and without a dot."""
    for listed, module, stays_plain in (
        ("self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("shared_expert", "model.layers.3.mlp.shared_expert.up_proj", True),
        ("gate", "model.layers.3.block_sparse_moe.gate", True),
        ("", "model.layers.3.mlp.up_proj", False),
    ):
        assert Modules((listed,)).include(module) is not stays_plain, listed


def test_patterns_match_as_regular_expressions() -> None:
    names = ("self_attn.q_proj", "linear_attn.in_proj_b", "mlp.gate", "mlp.gate_proj", "mlp.shared_expert.up_proj")
    modules = [f"model.layers.{layer}.{name}" for layer in (1, 11) for name in names]
    for pattern in (
        r".*attn.*",
        r".*attn",
        r".*layers\.1\..*",
        r".*model\.layers\.1\.mlp.*",
        r".*layers.1.mlp.*",
        r".*mlp.gate$",
        r"model\.layers\.1\b.*",
        r".*(gate|up)_proj$",
        r"attn.*",
    ):
        plain = [not Modules((f"re:{pattern}",), as_parts=False).include(module) for module in modules]
        assert plain == [re.match(pattern, module) is not None for module in modules], pattern


def test_a_quantized_output_projection(quantized_copy: Callable[[str], Path], tmp_path: Path) -> None:
    from benchmarks.quantize_checkpoint import quantized as parts_of

    path = quantized_copy("pack-quantized-32")
    tensors = load_file(path / "model.safetensors")
    head = tensors.pop("lm_head.weight").float()
    parts = dict(parts_of(head, "pack-quantized", 4, 32, True))
    save_file(
        tensors | {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}, path / "model.safetensors"
    )
    set_quantization(path, ignore=[])
    decoder = load(path)
    assert isinstance(decoder.lm_head.weight, QuantizedWeight) and decoder.network.weight_bytes == parameter_bytes(
        decoder
    )
    assert decoder.network.head_bytes == decoder.lm_head.weight.packed.rows(slice(None)).nbytes
    with LLM(path, **SMALL) as llm, LLM(write_dequantized(path, tmp_path / "plain"), **SMALL) as reference:
        prompt = [random_prompt(20, VOCAB, 4)]
        assert token_ids(llm, prompt, greedy(4)) == token_ids(reference, prompt, greedy(4))
