"""Which matrices of a quantized checkpoint are quantized: those that its config does not leave out."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import torch
from engines import greedy, random_prompt, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
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
    tensors, source = load_file(path / "model.safetensors"), load_file(plain_checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in names}
    save_file(kept | {f"{name}.weight": source[f"{name}.weight"] for name in names}, path / "model.safetensors")
    set_quantization(path, ignore=["lm_head", r"re:model\.layers\.1\.mlp\..*", names[-1]])
    decoder = load(path)
    assert isinstance(decoder.layers[0].qkv.weight, StackedWeights)
    assert decoder.layers[1].mlp.down.weight.dense is not None
    assert decoder.weight_bytes == parameter_bytes(decoder)
    expected = dequantized(path)
    for layer in decoder.layers:
        rows = torch.cat([expected[f"{module}.weight"] for module in layer.qkv.parts])
        x = torch.randn(5, 128)
        torch.testing.assert_close(layer.qkv(x), x @ rows.T, rtol=1e-5, atol=1e-5)
        indices = torch.tensor([0, 130, 200, 255, 3])
        assert torch.equal(layer.qkv.weight.rows(indices), rows[indices])


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
    assert isinstance(decoder.lm_head, QuantizedWeight) and decoder.weight_bytes == parameter_bytes(decoder)
    assert decoder.spec.head_bytes(4) == decoder.lm_head.packed.rows(slice(None)).nbytes
    with LLM(path, **SMALL) as llm, LLM(write_dequantized(path, tmp_path / "plain"), **SMALL) as reference:
        prompt = [random_prompt(20, VOCAB, 4)]
        assert token_ids(llm, prompt, greedy(4)) == token_ids(reference, prompt, greedy(4))


# ---- patterns


NAMES = st.lists(
    st.sampled_from(["model", "layers", "0", "1", "mlp", "q_proj", "proj", "lm_head", ""]), max_size=4
).map(".".join)
PATTERNS = st.one_of(NAMES, NAMES.map("re:{}".format), st.sampled_from(["Linear", r"re:.*mlp\.", "re:model$"]))


@settings(max_examples=60)
@given(
    patterns=st.lists(PATTERNS, max_size=5),
    targets=st.lists(PATTERNS, max_size=2),
    as_parts=st.booleans(),
    modules=st.lists(NAMES, min_size=1, max_size=8),
)
def test_names_are_found_as_if_compared_with_every_pattern(
    patterns: list[str], targets: list[str], as_parts: bool, modules: list[str]
) -> None:
    def matches(pattern: str, module: str, parts: bool) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], module) is not None
        if parts and (module.startswith(f"{pattern}.") or module.endswith(pattern)):
            return True
        return pattern in ("Linear", module)

    found = Modules(tuple(patterns), tuple(targets), as_parts)
    for module in modules:
        is_target = any(matches(target, module, False) for target in targets)
        is_ignored = any(matches(pattern, module, as_parts) for pattern in patterns)
        assert found.include(module) == (
            is_target and not is_ignored and module not in ("model.embed_tokens", "lm_head")
        )


def test_patterns_travel_to_the_ranks_and_compare_by_what_they_say() -> None:
    modules = Modules(("model.layers.0", r"re:.*\.mlp\."), as_parts=True)
    copied = pickle.loads(pickle.dumps(modules))
    assert copied == modules != Modules(("model.layers.1",))
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        assert copied.include(name) == modules.include(name) == ("1.self_attn" in name)
