"""Mixtures of experts: routing, grouping, checkpoints, sizes. `test_generate.py` compares whole engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file
from test_models import assert_same_logits
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from nanovllm.data.network import ExpertSpec
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.experts import Experts
from nanovllm.layers.mlp import GatedMLP

CPU = torch.device("cpu")
EXPERTS = 12
CHOSEN = 3
HIDDEN = 40
INNER = 24
NORMED = ExpertSpec(EXPERTS, CHOSEN)
SIGMOID = ExpertSpec(EXPERTS, CHOSEN, scoring="sigmoid")
GROUPED = replace(SIGMOID, num_groups=4, chosen_groups=2, weight_scale=2.5)
BIAS = {"correction_bias": "gate.e_score_correction_bias"}
SHARED = {"shared": ("shared_experts", 2 * INNER)}  # a module and its inner features
GATED = {"shared": ("shared_expert", 16), "shared_gate": "shared_expert_gate"}
# How experts are chosen, what a layer has besides, and Transformers' class with the further fields of its config.
BLOCKS: dict[str, tuple[ExpertSpec, dict[str, Any], Any, dict[str, Any]]] = {
    "glm": (
        GROUPED,
        {**BIAS, **SHARED, "fp32_router": True},
        Glm4MoeMoE,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    ),
    "glm, one group": (
        replace(SIGMOID, norm_topk_prob=False),
        {**BIAS, **SHARED},
        Glm4MoeMoE,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "minimax": (
        SIGMOID,
        {"correction_bias": "e_score_correction_bias"},
        MiniMaxM2SparseMoeBlock,
        {"router_jitter_noise": 0.0, "intermediate_size": INNER},
    ),
    "qwen3_next": (NORMED, GATED, Qwen3NextSparseMoeBlock, {"shared_expert_intermediate_size": 16}),
}


def layer(
    dtype: torch.dtype = torch.float32,
    spec: ExpertSpec = NORMED,
    shared: tuple[str, int] | None = None,
    **others: Any,
) -> Experts:
    """One with random weights."""
    build = BuildContext(dtype, CPU)
    if shared is not None:
        name, inner = shared
        others["shared"] = GatedMLP(HIDDEN, inner, "silu", build.at(name))
    made = Experts(HIDDEN, INNER, "silu", spec, build, **others)
    generator = torch.Generator().manual_seed(0)
    for _, slot in made.slots():
        slot.view.copy_(torch.randn(slot.shape, generator=generator) / slot.shape[-1] ** 0.5)
    return made


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


# ---- the layer


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("router", [Qwen3MoeTopKRouter, MixtralTopKRouter])
def test_the_router_chooses_as_transformers(router: Any, norm: bool) -> None:
    norm = norm or router is MixtralTopKRouter
    made = layer(spec=replace(NORMED, norm_topk_prob=norm))
    x = rows(200)
    made.gate[5:8] = made.gate[4]  # equal probabilities, of which only some are among the chosen
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    theirs = router(SimpleNamespace(**sizes, norm_topk_prob=norm))
    with torch.no_grad():
        theirs.weight.copy_(made.gate)
        _, expected_weights, expected = theirs(x)
    weights, chosen = made.route(x)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)
    ties = ((chosen >= 4) & (chosen < 8)).sum(1)
    assert ((ties > 0) & (ties < 4)).any()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_layer_is_that_of_transformers(name: str) -> None:
    spec, others, block, fields = BLOCKS[name]
    made = layer(spec=spec, **others)
    x = rows(200)
    config = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "_experts_implementation": "eager",
        **fields,
    }
    theirs = block(SimpleNamespace(**config))
    theirs.load_state_dict(fused(made))
    with torch.no_grad():
        torch.testing.assert_close(made(x), theirs(x[None])[0], atol=2e-6, rtol=1e-5)
    if made.correction_bias is not None:  # it matters for the choice, and for nothing else
        weights, chosen = made.route(x)
        made.correction_bias.zero_()
        others, otherwise = made.route(x)
        same = (chosen == otherwise).all(1)
        assert 0 < same.sum() < len(x) and torch.equal(weights[same], others[same])


def fused(made: Experts) -> dict[str, Tensor]:
    """The weights of a layer under the names of Transformers' block."""
    named = {name: slot.view for name, slot in made.slots()}
    found = {name: tensor for name, tensor in named.items() if not name.startswith("experts.")}
    return found | {"experts.gate_up_proj": made.gate_up.dense, "experts.down_proj": made.down.dense}


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("spec", "others"), [(NORMED, {}), (GROUPED, {**BIAS, **GATED})], ids=["softmax", "sigmoid, groups, shared"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(
    dtype: torch.dtype, spec: ExpertSpec, others: dict[str, Any]
) -> None:
    made = layer(dtype, spec, **others)
    x = rows(70, dtype)
    together = made(x)
    alone = torch.cat([made(row[None]) for row in x])
    assert torch.equal(together, alone)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    assert torch.equal(made(x[order]), together[order])
    assert made(x[:0]).shape == (0, HIDDEN)


# ---- whole networks


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"])
def test_fused_experts_are_read(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(tmp_path, family, fused_experts=True, sharded=True)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.1.mlp.experts.gate_up_proj" in names and not any("experts.0" in name for name in names)
    assert_same_logits(model, tmp_path)
