"""Rotary angles against Transformers' own, bit for bit where a formula allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import ROPES, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.data.network import RopeSpec
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.rope_config import rope_parameters, rope_spec
from nanovllm.ops.torch_rows import rotate

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
VARIANTS: dict[str, dict[str, Any]] = {
    **ROPES,
    "default-1m": {"rope_type": "default", "rope_theta": 1e6},
    "linear-8": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8},
    "llama3.1": {**ROPES["llama3"], "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    "llama3.2": {
        **ROPES["llama3"],
        "rope_theta": 5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn-qwen": YARN,
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8},
    "yarn-mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn-one-mscale": {**YARN, "mscale": 0.707},
    "yarn-factor-from-lengths": {**YARN, "factor": None},
    "yarn-shrinking": {**YARN, "factor": 0.5},
}


def llama_config(rope: dict[str, Any], head_dim: int = 64, max_positions: int = 131072) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
    )


def spec_of(config: LlamaConfig) -> RopeSpec:
    assert config.rope_parameters is not None and config.head_dim is not None
    return rope_spec(config.rope_parameters, config.max_position_embeddings, config.head_dim)


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cos_and_sin_are_those_of_transformers(variant: str, head_dim: int) -> None:
    config = llama_config(VARIANTS[variant], head_dim)
    theirs = LlamaRotaryEmbedding(config)
    ours = RotaryEmbedding(spec_of(config), head_dim, CPU)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    positions = torch.cat((torch.arange(300), torch.tensor([4095, 4096, 65535, 131071])))
    cos, sin = ours.cos_sin(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    # Of the same angles: two libraries' cosines differ by a rounding.
    scaled = {"rtol": 0, "atol": 2.0**-23 * max(1.0, ours.rope.attention_factor)}
    torch.testing.assert_close(cos[:, 0], their_cos[0], **scaled)
    torch.testing.assert_close(sin[:, 0], their_sin[0, :, : head_dim // 2], **scaled)


@settings(max_examples=60)
@given(
    factor=st.floats(1.0, 16.0),
    trained=st.integers(2, 8192),
    length=st.integers(1, 200_000),
    head_dim=st.sampled_from([4, 16, 64, 128]),
)
def test_dynamic_frequencies_are_those_of_transformers(factor: float, trained: int, length: int, head_dim: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": factor}
    config = llama_config(rope, head_dim, trained)
    ours = RotaryEmbedding(spec_of(config).for_length(length, head_dim), head_dim, CPU)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    torch.testing.assert_close(ours.inv_freq, theirs, atol=0, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotate_turns_as_transformers_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, 32, generator=generator).to(dtype)
    cos, sin = RotaryEmbedding(RopeSpec(), 32, CPU).cos_sin(torch.arange(9) * 1000)
    full_sin = torch.cat((sin, sin), dim=-1)
    wide = x.float()
    theirs, _ = apply_rotary_pos_emb(wide, wide, cos[:, 0], full_sin[:, 0], unsqueeze_dim=1)
    ours = rotate(x, cos, sin)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.norm(dim=-1), wide.norm(dim=-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_type": "longrope"}, ["'longrope'", "default, linear, dynamic, llama3, yarn"]),
        ({"rope_type": "linear", "factor": 0}, ["factor", "0"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "inf"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({**ROPES["llama3"], "low_freq_factor": 4.0}, ["low_freq_factor=4.0", "high_freq_factor=4.0"]),
    ],
)
def test_bad_parameters_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    parameters = {**ROPES["default"], **changes}
    message = refusal(lambda: rope_spec(rope_parameters(parameters), 4096, 64))
    assert [word for word in words if word not in message] == []
