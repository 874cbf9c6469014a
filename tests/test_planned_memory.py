"""The memory of a step that `nanovllm plan` computes from shapes is what the engine counts on meta tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from text_cases import QUICK

from nanovllm import EngineArgs
from nanovllm.apps.cli.plan import CONFIGS
from nanovllm.data.expert_spec import ExpertSpec
from nanovllm.data.rope_spec import RopeSpec
from nanovllm.features.planner.activations import activation_peak
from nanovllm.layers.parallel import MetaRanks
from nanovllm.memory import profiling
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec, read_decoder_spec
from nanovllm.models.spec import DecoderSpec

META = torch.device("meta")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def check(spec: DecoderSpec, dtype: torch.dtype, tokens: int = 16_384, seqs: int = 512, logprobs: int = 20) -> None:
    group = None if spec.sharding is None else MetaRanks(0, spec.sharding.num_ranks)
    sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_logprobs": logprobs}
    config = EngineArgs(model="/", **sizes).create_engine_config()
    counted = profiling.activation_peak(Decoder(spec, dtype, META, group), config)
    assert activation_peak(spec, dtype.itemsize, tokens, seqs, logprobs) == counted


@pytest.mark.parametrize("family", FAMILIES)
@given(dtype=DTYPES, tokens=st.sampled_from([30, 300, 9000]), seqs=st.sampled_from([1, 300]))
@QUICK
def test_every_family(
    family: str, tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, tokens: int, seqs: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"planned-{family}"
    if not path.exists():
        make_checkpoint(path, family)
    check(load_decoder_spec(path), dtype, tokens, seqs)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    check(read_decoder_spec(CONFIGS[name]), torch.bfloat16)


ROPES = st.builds(
    RopeSpec,
    kind=st.sampled_from(["default", "dynamic", "longrope"]),
    theta=st.just(1e4),
    original_max_position=st.just(64),
    factor=st.just(2.0),
    rotary_dim=st.sampled_from([None, 8]),
)


@st.composite
def specs(draw: st.DrawFn) -> DecoderSpec:
    """Networks in which each part takes most of the memory at times."""
    head_dim, experts, rope = draw(st.sampled_from([16, 64])), draw(st.sampled_from([0, 4, 200])), draw(ROPES)
    if rope.kind == "longrope":
        factors = (1.0,) * ((rope.rotary_dim or head_dim) // 2)
        rope = replace(rope, frequency_factors=factors, long_factors=factors)
    boolean = st.booleans()
    spec = read_decoder_spec(CONFIGS["qwen3-8b"]).of_layers([0, 1])
    return replace(
        spec,
        vocab_size=draw(st.sampled_from([50, 5000, 300_000])),
        hidden_size=draw(st.sampled_from([32, 1000])),
        intermediate_size=draw(st.sampled_from([16, 1500])),
        num_heads=draw(st.sampled_from([4, 40])),
        num_kv_heads=draw(st.sampled_from([1, 4])),
        head_dim=head_dim,
        rope=rope,
        local_rope=draw(st.none() | st.just(RopeSpec("default", 1e4))),
        sliding_windows=(5, None),
        qk_norm=draw(boolean),
        output_norms=draw(boolean),
        zero_centered_norms=draw(boolean),
        experts=ExpertSpec(experts, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([8, 900])), draw(boolean),
                           draw(st.tuples(boolean, boolean))) if experts else None,
    )  # fmt: skip


@given(
    spec=specs(),
    dtype=DTYPES,
    ranks=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from([1, 40, 300, 9000, 50_000]),
    seqs=st.sampled_from([1, 5, 600]),
    logprobs=st.sampled_from([-1, 0, 20]),
)
@QUICK
def test_any_network(spec: DecoderSpec, dtype: torch.dtype, ranks: int, tokens: int, seqs: int, logprobs: int) -> None:
    check(spec if ranks == 1 else spec.of_rank(0, ranks), dtype, tokens, seqs, logprobs)
