"""Reading configs and weights: what is accepted, and what is refused with its name."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROPES, edit_config, make_checkpoint, write_old_style_rope
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.errors import ConfigError, ModelError
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec, load_eos_token_ids
from nanovllm.models.loader import load_model
from nanovllm.models.registry import FAMILIES

CPU = torch.device("cpu")
ARCHITECTURES = ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
K_PROJ, NORM = "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(root / "single", "qwen3")
    make_checkpoint(root / "tied", "qwen3", tie=True)
    make_checkpoint(root / "sharded", "qwen3", sharded=True)
    return root


@pytest.fixture
def copy_of(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return copied


@pytest.fixture
def single(copy_of: Callable[[str], Path]) -> Path:
    return copy_of("single")


def load(path: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", seed: int = 0) -> Decoder:
    return load_model(path, load_decoder_spec(path), dtype, CPU, load_format, seed)


def refusal(action: Callable[[], object], error: type[Exception] = ModelError) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


def edit_tensors(path: Path, file: str = "model.safetensors", **changes: Any) -> None:
    """Set tensors of a file ("__" stands for "."); a value of `...` removes one."""
    tensors = load_file(path / file)
    tensors.update({name.replace("__", "."): value for name, value in changes.items()})
    save_file({name: value for name, value in tensors.items() if value is not ...}, path / file)


def stored_tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ---- config


def test_the_registry_holds_the_four_families_and_cannot_be_changed() -> None:
    assert list(FAMILIES) == ARCHITECTURES
    with pytest.raises(TypeError):
        FAMILIES["Other"] = FAMILIES[ARCHITECTURES[0]]  # type: ignore[index]


def test_a_spec_says_what_the_config_says(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        "qwen3",
        layers=3,
        heads=6,
        kv_heads=3,
        head_dim=32,
        vocab=77,
        sliding_window=5,
        dtype="bfloat16",
    )
    spec = load_decoder_spec(str(tmp_path))
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (
        "Qwen3ForCausalLM",
        3,
        6,
        3,
    )
    assert (spec.head_dim, spec.q_size, spec.kv_size, spec.vocab_size) == (32, 192, 96, 77)
    assert (spec.qk_norm, spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, False, False, False)
    assert spec.sliding_windows == (None, 5, 5)
    assert (spec.dtype, spec.tie_word_embeddings, spec.max_position_embeddings) == ("bfloat16", False, 256)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_rope_configs_give_equal_specs(tmp_path: Path, kind: str, key: str) -> None:
    make_checkpoint(tmp_path, "llama", rope=ROPES[kind])
    new = load_decoder_spec(tmp_path)
    write_old_style_rope(tmp_path, key)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert load_decoder_spec(tmp_path) == new
    assert new.rope.kind == kind and new.rope.theta == ROPES[kind]["rope_theta"]


def test_old_dtype_key_and_missing_dtype(single: Path) -> None:
    edit_config(single, dtype=..., torch_dtype="float16")
    assert load_decoder_spec(single).dtype == "float16"
    edit_config(single, torch_dtype=...)
    assert load_decoder_spec(single).dtype == "float32"


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (ROPES["default"], 256),
        (ROPES["linear"], 640),  # 256 * 2.5
        (ROPES["dynamic"], 768),  # 256 * 3
        (ROPES["llama3"], 256),
        (ROPES["yarn"], 256),  # 64 * 4
        ({**ROPES["yarn"], "original_max_position_embeddings": 100}, 400),
        ({**ROPES["yarn"], "original_max_position_embeddings": 10}, 256),
    ],
)
def test_max_model_len(single: Path, rope: dict[str, Any], longest: int) -> None:
    edit_config(single, rope_parameters=rope)
    assert load_decoder_spec(single).max_model_len == longest


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A minimal config as Mistral-7B-v0.1 had it: no head_dim, no rope_scaling."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 256,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "sliding_window": 4096,
        "rope_theta": 1000000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_decoder_spec(tmp_path)
    assert (spec.head_dim, spec.num_kv_heads, spec.rope.theta) == (16, 8, 1e6)
    assert spec.sliding_windows == (4096, 4096)
    assert load_eos_token_ids(tmp_path) == (2,)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, None, (5,)),
        (5, [7, 5, 9], (5, 7, 9)),
        ([3, 4], 4, (3, 4)),
        (None, [8], (8,)),
        (None, None, ()),
        (..., [8, 9], (8, 9)),
        (..., ..., (2,)),  # neither names one: Llama's default
        (6, "no file", (6,)),
    ],
)
def test_every_eos_id_counts(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, eos_token_id=in_config)
    if in_generation == "no file":
        (tmp_path / "generation_config.json").unlink()
    else:
        edit_config(tmp_path, "generation_config.json", eos_token_id=in_generation)
    assert load_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("bad", [-1, "</s>", [1, True], 1.5])
def test_bad_eos_ids_are_refused(single: Path, bad: Any) -> None:
    edit_config(single, eos_token_id=bad)
    message = refusal(lambda: load_eos_token_ids(single))
    assert "eos_token_id" in message and repr(bad[-1] if isinstance(bad, list) else bad) in message


def test_nothing_is_fetched(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    message = refusal(lambda: load_decoder_spec("Qwen/Qwen3-0.6B"))
    assert "Qwen/Qwen3-0.6B" in message and "local directory" in message
    assert load(single).spec == load_decoder_spec(single)


def test_missing_and_broken_configs_are_refused(single: Path) -> None:
    config = single / "config.json"
    for content in ("{", "[]", '"text"', ""):
        config.write_text(content)
        assert str(config) in refusal(lambda: load_decoder_spec(single))
    config.write_bytes(b"\xff\xfe")
    assert str(config) in refusal(lambda: load_decoder_spec(single))
    config.unlink()
    assert str(config) in refusal(lambda: load_decoder_spec(single))
    assert "local directory" in refusal(lambda: load_decoder_spec(single / "model.safetensors"))
    assert "absent" in refusal(lambda: load_eos_token_ids(single / "absent"))


def test_broken_generation_configs_are_refused(single: Path) -> None:
    (single / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(lambda: load_eos_token_ids(single))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *ARCHITECTURES]),
        ({"architectures": []}, ["no architecture", *ARCHITECTURES]),
        ({"architectures": ...}, ["no architecture", *ARCHITECTURES]),
        ({"model_type": "llama"}, ["Qwen3ForCausalLM", "'qwen3'", "'llama'"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, ["'su'", "yarn"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["factor"]),
        ({"rope_parameters": {"full_attention": ROPES["default"]}}, ["rope_theta"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "bfloat16"]),
        ({"dtype": "float64"}, ["float64", "bfloat16"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ({"num_hidden_layers": 0, "layer_types": []}, ["num_hidden_layers", "0"]),
        ({"head_dim": 15}, ["15"]),
        ({"head_dim": 3}, ["even", "3"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"hidden_size": "wide"}, ["Qwen3ForCausalLM", "hidden_size"]),
        ({"layer_types": ["full_attention"]}, ["layer"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window"]),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            ["chunked_attention", "sliding_attention"],
        ),
        (
            {"use_sliding_window": True, "sliding_window": 0, "layer_types": ["sliding_attention"] * 2},
            ["sliding_window", "0"],
        ),
    ],
)
def test_unsupported_configs_are_refused_by_name(
    single: Path, changes: dict[str, Any], words: list[str]
) -> None:
    edit_config(single, **changes)
    message = refusal(lambda: load_decoder_spec(single))
    assert [word for word in (str(single / "config.json"), *words) if word not in message] == []
    assert "\n" not in message


def test_a_mistral_with_mixed_layers_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", sliding_window=8)
    edit_config(tmp_path, layer_types=["full_attention", "sliding_attention"])
    assert "layer_types" in refusal(lambda: load_decoder_spec(tmp_path))


# ---- weights


@pytest.mark.parametrize("name", ["single", "tied", "sharded"])
def test_every_tensor_lands_in_its_place(originals: Path, name: str) -> None:
    stored = stored_tensors(originals / name)
    decoder = load(originals / name, load_format="safetensors")
    slots = dict(decoder.slots())
    assert slots.keys() == stored.keys()
    for tensor_name, slot in slots.items():
        assert torch.equal(slot.view, stored[tensor_name].expand(slot.view.shape)), tensor_name
    assert (decoder.lm_head is decoder.embedding) == (name == "tied")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_on_the_way(single: Path, dtype: torch.dtype) -> None:
    edit_tensors(single, model__norm__weight=torch.linspace(0, 2, 64).double())
    stored = stored_tensors(single)
    decoder = load(single, dtype)
    assert torch.equal(decoder.norm.weight, stored[NORM].to(dtype))
    assert torch.equal(decoder.lm_head, stored[LM_HEAD].to(dtype))
    numbers = sum(slot.view.numel() for _, slot in decoder.slots())
    assert decoder.weight_bytes == numbers * dtype.itemsize


def test_missing_tensors_are_named_and_counted(single: Path) -> None:
    edit_tensors(single, **{K_PROJ.replace(".", "__"): ..., "model__norm__weight": ...})
    message = refusal(lambda: load(single))
    assert K_PROJ in message and NORM in message and "(2: " in message and str(single) in message


def test_long_lists_are_cut(single: Path) -> None:
    edit_config(single, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    message = refusal(lambda: load(single))
    assert "(22: " in message and "model.layers.2." in message and "and 17 more" in message


def test_unexpected_tensors_are_named(single: Path) -> None:
    edit_tensors(single, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(lambda: load(single))


def test_misshapen_tensors_show_both_shapes(single: Path) -> None:
    edit_tensors(
        single, **{K_PROJ.replace(".", "__"): torch.zeros(32, 63), "model__norm__weight": torch.zeros(1)}
    )
    message = refusal(lambda: load(single))
    assert f"{K_PROJ} expected [32, 64], found [32, 63]" in message
    assert f"{NORM} expected [64], found [1]" in message  # would broadcast


def test_a_scalar_for_a_head_norm_is_misshapen(single: Path) -> None:
    edit_tensors(single, model__layers__0__self_attn__q_norm__weight=torch.ones(4, 16))
    assert "expected [16], found [4, 16]" in refusal(lambda: load(single))


def test_quantized_tensors_are_refused_by_format(single: Path) -> None:
    edit_tensors(single, **{K_PROJ.replace(".", "__"): torch.zeros(32, 64, dtype=torch.int8)})
    message = refusal(lambda: load(single))
    assert f"{K_PROJ} I8" in message and "BF16" in message


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_files_are_refused(single: Path, kept: float) -> None:
    file = single / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    message = refusal(lambda: load(single))
    assert str(file) in message and "truncated or damaged" in message


def test_garbage_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(b"\xff" * 1000)
    assert str(file) in refusal(lambda: load(single))


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "consolidated.safetensors")
    message = refusal(lambda: load(single))
    assert "model.safetensors" in message and "consolidated.safetensors" in message
    (single / "consolidated.safetensors").rename(single / "pytorch_model.bin")
    message = refusal(lambda: load(single))
    assert "pytorch_model.bin" in message and "save_pretrained" in message
    (single / "pytorch_model.bin").unlink()
    assert str(single) in refusal(lambda: load(single))


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_bad_indexes_are_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("sharded")
    index = path / "model.safetensors.index.json"
    good = index.read_text()

    def message_after(change: Callable[[dict[str, str]], object]) -> str:
        index.write_text(good)
        edit_index(path, change)
        return refusal(lambda: load(path))

    assert "model-9.safetensors" in message_after(lambda m: m.update({NORM: "model-9.safetensors"}))
    assert "../x" in message_after(lambda m: m.update({NORM: "../x"}))
    assert "ghost in model-00001" in message_after(
        lambda m: m.update(ghost="model-00001-of-00004.safetensors")
    )
    assert NORM in message_after(lambda m: m.pop(NORM))
    assert "weight_map" in message_after(lambda m: m.clear())
    for broken in ("{", "[]", "{}"):
        index.write_text(broken)
        assert str(index) in refusal(lambda: load(path))


def test_damaged_shards_are_named(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("sharded")
    shard = path / "model-00002-of-00004.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    assert str(shard) in refusal(lambda: load(path))
    shard.unlink()
    message = refusal(lambda: load(path))
    assert shard.name in message and "do not exist" in message


def test_known_harmless_tensors_are_accepted(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    extras: dict[str, Any] = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
        LM_HEAD: embedding.clone(),
    }
    edit_tensors(path, **{name.replace(".", "__"): tensor for name, tensor in extras.items()})
    with safe_open(path / "model.safetensors", "pt") as file:
        assert set(extras) <= set(file.keys())
    assert torch.equal(load(path).embedding, embedding)


def test_a_tied_embedding_may_be_stored_under_its_other_name(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    edit_tensors(path, model__embed_tokens__weight=..., lm_head__weight=embedding)
    assert torch.equal(load(path).embedding, embedding)


def test_a_tied_head_that_differs_is_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    for other in (embedding + 1, embedding[:-1].clone()):
        edit_tensors(path, lm_head__weight=other)
        message = refusal(lambda: load(path))
        assert LM_HEAD in message and "tie_word_embeddings" in message


def test_an_unknown_load_format_is_refused(single: Path) -> None:
    message = refusal(lambda: load(single, load_format="gguf"), ConfigError)
    assert "'gguf'" in message and "auto, safetensors, dummy" in message


# ---- dummy weights


def test_dummy_weights_need_a_config_alone_and_come_from_the_seed(single: Path) -> None:
    (single / "model.safetensors").unlink()

    def weights(seed: int) -> dict[str, Tensor]:
        return {name: slot.view for name, slot in load(single, load_format="dummy", seed=seed).slots()}

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_dummy_weights_keep_sizes_near_one(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, hidden=256, intermediate=1024)
    decoder = load(tmp_path, torch.bfloat16, "dummy")
    layer = decoder.layers[0]
    assert layer.gate_up.weight.float().std() * 16 == pytest.approx(1, rel=0.02)
    assert layer.down.weight.float().std() * 32 == pytest.approx(1, rel=0.02)
    assert (decoder.norm.weight.float() - 1).abs().max() < 0.11
    assert (layer.qkv.bias is not None) == (family == "qwen2")
    if layer.qkv.bias is not None:
        assert 0 < layer.qkv.bias.abs().max() < 0.11


def test_decoder_slots_cover_every_parameter_once(single: Path) -> None:
    """Adding 1 to each slot must leave 1 everywhere: 0 is a gap, 2 an overlap."""
    spec = dataclasses.replace(load_decoder_spec(single), qkv_bias=True, o_bias=True, mlp_bias=True)
    decoder = Decoder(spec, torch.float32, CPU)
    for _, slot in decoder.slots():
        slot.view.zero_()
    for _, slot in decoder.slots():
        slot.view.add_(1)
    linears = [m for layer in decoder.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    biases = [linear.bias for linear in linears]
    assert all(bias is not None and (bias == 1).all() for bias in biases)
    assert all((linear.weight == 1).all() for linear in linears)
    norms = [norm.weight for layer in decoder.layers for norm in (layer.input_norm, layer.post_norm)]
    assert all(
        (weight == 1).all() for weight in [*norms, decoder.norm.weight, decoder.embedding, decoder.lm_head]
    )
    assert all(layer.qk_norm is not None and (layer.qk_norm == 1).all() for layer in decoder.layers)
