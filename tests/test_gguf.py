"""GGUF files as models: the same tokens as Transformers on the dequantized weights, and everything that is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf
from checkpoints import GPT_OSS_ROPE, ROPES, make_checkpoint, refusal
from engines import greedy, greedy_reference, offloaded, random_prompt, token_ids
from gguf_files import TEMPLATE, VOCAB, WIDE, write_gguf
from test_gemma4 import MIXTURE
from test_gemma4 import SMALL as WITH_OWN_INPUTS

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ModelError
from nanovllm.models.hf_config import load_network_config

SMALL: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 40, "dtype": "float32"}
PROMPTS = [random_prompt(length, VOCAB, seed=1) for length in (1, 40)]


def check_tokens(path: Path, model: Any, **arguments: Any) -> None:
    with LLM(path, **SMALL, **arguments) as llm:
        assert token_ids(llm, PROMPTS, greedy(5)) == [greedy_reference(model, prompt, 5) for prompt in PROMPTS]


def mixed(name: str) -> str:
    """As llama.cpp mixes types, which takes Q5_0 where blocks of 256 do not divide the rows."""
    others = {"attn_v": "Q6_K", "token_embd": "Q6_K", "attn_output": "Q5_0", "ffn_up": "Q5_1", "ffn_down": "F16"}
    return next((kind for part, kind in others.items() if part in name), "Q4_K")


# ---- networks and types


FAST = ("F32", "Q8_0", mixed)
SLOW = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_every_type_gives_the_tokens_of_transformers(tmp_path: Path, kind: Any) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", layers=1, **WIDE)
    check_tokens(write_gguf(tmp_path / "model.gguf", model, kind), model)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie": True, "sliding_window": 24, "max_window_layers": 0},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"intermediate": 128, "attention_bias": True},
    "mixtral": {"tie": True, "sliding_window": 24},
    "gemma3": {"tie": True, "sliding_window": 24, "layers": 4, "head_dim": 24},  # as query_pre_attn_scalar
    "seed_oss": {},
    "qwen3_5": {"linear_value_head_dim": 32, "linear_num_value_heads": 6},
    "qwen3_5_moe": {"shared_expert_intermediate_size": 64, "intermediate": 128},
    "qwen3_next": {"shared_expert_intermediate_size": 64, "intermediate": 128, "linear_value_head_dim": 32},
    "gpt_oss": {"sliding_window": 24, "rope": GPT_OSS_ROPE},
    "gemma4": {**WITH_OWN_INPUTS, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB},
    "gemma4, a mixture": {**MIXTURE, "family": "gemma4", "moe_intermediate_size": 64},
}
KINDS = {"gpt_oss": lambda name: "MXFP4" if "_exps" in name else "Q8_0"}
# Another family of the fast tests passes the same code, but for names.
SIMILAR = ("mistral", "qwen2", "mixtral", "qwen3_5")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in SIMILAR else []) for name in FAMILIES]
)
def test_every_family_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path / "model", vocab=VOCAB, **{"family": family, **FAMILIES[family]})
    check_tokens(write_gguf(tmp_path / "model.gguf", model, KINDS.get(family, "Q8_0")), model)
    network = load_network_config(tmp_path / "model.gguf").network
    expected = load_network_config(tmp_path / "model").network
    assert network.dtype == "bfloat16" and network.architecture == expected.architecture
    assert network.layers == expected.layers and network.ropes == expected.ropes
    assert network.experts == expected.experts and network.attention_scale == expected.attention_scale


def test_experts_of_several_types_in_host_memory(tmp_path: Path) -> None:
    """Types as llama.cpp mixes them in Q4_K_M; the KV cache of the longest prompt does not fit on the device."""
    types = {"attn_v": "Q8_0", "ffn_down": "Q6_K", "ffn_up": "Q5_0", "output": "Q6_K"}
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", **{**WIDE, "intermediate": 512, "experts": 4})
    kind = lambda name: next((kind for part, kind in types.items() if part in name), "Q4_K")  # noqa: E731
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    prompt = random_prompt(5 * 16 + 7, VOCAB, seed=3)
    with LLM(path, dtype="float32", **offloaded(16, 4, 40, max_num_batched_tokens=40)) as llm:
        assert token_ids(llm, [prompt], greedy(5)) == [greedy_reference(model, prompt, 5)]


def test_what_a_gemma_file_does_not_say_is_as_in_llama_cpp(tmp_path: Path) -> None:
    """Every sixth layer without a window, RoPE scaled in these alone; of 62 layers, other attention scores."""
    options = {"layers": 62, "heads": 2, "sliding_window": 24, "layer_types": ["full_attention"] * 62}
    model = make_checkpoint(tmp_path / "model", "gemma3", vocab=VOCAB, **options)
    left_out = {f"gemma3.{key}": None for key in ("attention.sliding_window_pattern", "rope.freq_base_swa")}
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    path = write_gguf(tmp_path / "model.gguf", model, changes={**left_out, **scaling})
    config = load_network_config(path)
    network = config.network
    assert network.kv_windows == tuple(None if layer % 6 == 5 else 24 for layer in range(62))
    ropes = {(rope.kind, rope.theta, rope.factor) for rope in network.ropes}
    assert ropes == {("linear", 1e4, 8.0), ("default", 1e4, 1)}
    assert (network.attention_scale, network.kv_heads[0][1]) == (32**-0.5, 16)
    assert config.on_meta("float32").embedding_scale == 8
    path = write_gguf(path, model, changes={**left_out, "gemma3.attention.sliding_window": None})
    assert set(load_network_config(path).network.kv_windows) == {None}


def test_what_a_gemma4_file_says_of_its_layers_is_checked(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "gemma4", vocab=VOCAB, **{**MIXTURE, "moe_intermediate_size": 64})
    for changes, message in (
        ({"attention.sliding_window_pattern": [True, False]}, r"pattern=\[True, False\]: must be for each of 3 layers"),
        ({"attention.sliding_window_pattern": [False, True, True]}, "the last layer must have no window"),
        ({"feed_forward_length": [96, 96, 64]}, r"feed_forward_length=\[96, 96, 64\]: layers must have one MLP size"),
        ({"attention.head_count_kv": [4, 0, 1]}, r"head_count_kv=\[4, 0, 1\]: must be for each of 3 layers a whole"),
        ({"rope.dimension_count": 16}, "rope.dimension_count=16 must be the size of a head, 32"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "rope.scaling.type='linear' is not supported"),
        ({"expert_count": 4}, r"ffn_gate_up_exps.weight has shape \[6, 128, 64\]; it should have .* 4 experts"),
        ({"attention.key_length_swa": None}, "has no gemma4.attention.key_length_swa, which its network needs"),
    ):
        path = write_gguf(
            tmp_path / "model.gguf", model, changes={f"gemma4.{key}": value for key, value in changes.items()}
        )
        with pytest.raises(ModelError, match=message):
            LLM(path)
    with pytest.raises(ModelError, match=r"must hold a factor for each of 16 pairs of a head, .* but it has 16, 0 of"):
        LLM(write_gguf(path, model, factors=[2.0] * 16))
    capped = write_gguf(path, model, changes={"gemma4.final_logit_softcapping": None})
    assert load_network_config(capped).config.final_logit_softcapping == 30.0, "llama.cpp's"


def test_weights_take_the_bytes_of_the_file(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", model, mixed)
    stored = gguf.GGUFReader(path).tensors
    halves = sum(tensor.n_bytes for tensor in stored if tensor.tensor_type.name == "F16")  # they become float32
    with LLM(path, **SMALL) as llm:
        decoder = llm.engine.executor.model
        assert decoder.network.weight_bytes == halves + sum(tensor.n_bytes for tensor in stored)


def rope_factors(head_dim: int, rope: dict[str, Any]) -> list[float]:
    """What llama.cpp's conversion writes for Llama 3.1."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_is_scaled_as_the_file_says(tmp_path: Path, kind: str) -> None:
    rope = ROPES[kind]
    model = make_checkpoint(tmp_path / "model", "llama", vocab=VOCAB, rope=rope)
    scaling: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        scaling["llama.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    scaling["llama.rope.scale_linear"] = 77.0  # the older name of the factor, which then does not count
    factors = rope_factors(16, rope) if kind == "llama3" else None
    changes = {} if factors else scaling
    path = write_gguf(tmp_path / "model.gguf", model, changes=changes, factors=factors)
    check_tokens(path, model)
    if not factors:
        write_gguf(path, model, changes=changes, factors=[1.0] * 8)
        assert f"beside rope.scaling.type={kind!r} is not supported" in refusal(lambda: LLM(path))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", vocab=VOCAB)
    whole = write_gguf(tmp_path / "whole.gguf", model)
    parts = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    split(whole, parts)
    check_tokens(parts[0], model)
    assert "give the first" in refusal(lambda: LLM(parts[1]))
    parts[1].unlink()
    assert "m-00002-of-00002.gguf cannot be read: No such file" in refusal(lambda: LLM(parts[0]))


def split(whole: Path, parts: list[Path]) -> None:
    """Write the tensors alternately into files, all metadata into the first."""
    reader = gguf.GGUFReader(whole)
    for number, path in enumerate(parts):
        writer = gguf.GGUFWriter(path, "qwen3")
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(parts))
        for tensor in reader.tensors[number :: len(parts)]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


# ---- the file in the place of a directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    return write_gguf(folder / "tiny.gguf", make_checkpoint(folder / "model", vocab=VOCAB), changes=sampling)


def test_tokenizer_template_and_defaults_come_from_the_file(tiny: Path) -> None:
    with LLM(tiny, **SMALL, seed=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
        assert llm.engine.limits.eos_token_ids == {2, 0}
        tokenizer = llm.get_tokenizer()
        assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == 2
        (output,) = llm.chat([{"role": "user", "content": "th 42"}], greedy(2), use_tqdm=False)
        assert output.prompt == "<|im_start|>th 42<|im_end|>" and output.prompt_token_ids[0] == 1
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    with LLM(tiny, **SMALL, generation_config="vllm", load_format="gguf") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


OFF = {
    **dict.fromkeys(("pooling_type", "nextn_predict_layers", "leading_dense_block_count", "attention.scale"), 0),
    **dict.fromkeys(("expert_group_count", "expert_weights_scale", "rope.scale_linear", "rope.scaling.factor"), 0),
    **{"attn_logit_softcapping": 0.0, "residual_scale": 0.0, "expert_gating_func": 0, "expert_feed_forward_length": 0},
    **{"expert_count": [0, 0], "rope.scaling.original_context_length": 0},
}


def test_a_key_whose_value_is_off_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    changes = {f"qwen3.{key}": value for key, value in OFF.items()}
    path = write_gguf(tmp_path / "off.gguf", make_checkpoint(tmp_path / "model", vocab=VOCAB), changes=changes)
    network, plain = (load_network_config(file).network for file in (path, tiny))
    unstored = {"quantization": None, "weights": plain.weights}
    assert replace(network, **unstored) == replace(plain, **unstored)


# ---- refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another RoPE": ({"qwen3.rope.scaling.type": "longrope"}, "scaling.type='longrope' is not supported"),
    "a factor of attention": ({"qwen3.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5 is supported with yarn alone"),
    "experts": ({"qwen3.expert_count": 8}, "expert_count=8 may change what"),
    "experts in a layer": ({"qwen3.expert_count": [0, 8]}, r"expert_count=array\(\[0, 8\].* may change what"),
    "embeddings": ({"qwen3.pooling_type": 3}, "pooling_type=3 may change what"),
    "a missing layer": ({"qwen3.block_count": 1}, "holds tensors that a Qwen3ForCausalLM does not have .*layers.1"),
    "partial RoPE": ({"qwen3.rope.dimension_count": 8}, "rope.dimension_count=8: heads of 16"),
    "no size": ({"qwen3.embedding_length": None}, "has no qwen3.embedding_length"),
    "layers that differ": ({"qwen3.attention.head_count": [4, 2]}, r"head_count=\[4, 2\]: must be a whole"),
    "another architecture": ({"general.architecture": "gemma2"}, "architecture='gemma2' is not supported.*qwen3"),
    "an id beyond the tokens": ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id=999: must be one of the 262"),
}


def test_a_network_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", vocab=VOCAB)
    for changes, message in REFUSED.values():
        path = write_gguf(tmp_path / "model.gguf", model, changes=changes)
        with pytest.raises(ModelError, match=message):
            LLM(path)
