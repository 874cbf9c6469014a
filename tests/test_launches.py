"""What steps launch on a GPU, counted without one, and that the host waits for nothing that they compute."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import ROPES, make_checkpoint
from test_triton_experts import MXFP4, ROUTERS

from nanovllm.formats.gguf.model import GgufMethod
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear_method import LinearMethod
from nanovllm.layers.mlp import GatedMLP
from nanovllm.models.hf_config import load_network_config

ROOT = Path(__file__).resolve().parent.parent
# Launches of a decode step with its greedy token: of each layer at most, and of all of the network at most.
DECODE = {
    "llama-3.1-8b": (12, 405), "llama-3.1-8b:int4": (15, 505), "llama-3.1-8b:q4_k_m": (13, 425),
    "qwen3-30b-a3b": (15, 745), "gpt-oss-20b": (15, 385), "qwen3.5-9b": (14, 435), "qwen3.6-35b-a3b:int4": (26, 1030),
    "gemma-4-31b": (18, 1065),
}  # fmt: skip
OTHERS = 25  # launches of a step that belong to no layer
FEW_LAYERS = 6
NETWORKS = {
    **{kind: {"family": "qwen3", "rope": rope} for kind, rope in ROPES.items()},
    **{family: {"family": family, "layers": 4} for family in ("qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma4", "olmo3")},
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.launches")


def count(launches: ModuleType, name: str, num_layers: int | None) -> Any:
    model, _, stored = name.partition(":")
    with launches.open_shape(model, num_layers, "auto", stored=stored or None) as shape:
        return launches.count(shape, 8192, 32768)


@pytest.mark.parametrize("name", DECODE)
def test_a_layer_of_a_decode_step_is_few_launches(launches: ModuleType, name: str) -> None:
    counted = count(launches, name, FEW_LAYERS)
    assert counted.decode.total <= DECODE[name][0] * FEW_LAYERS + OTHERS, counted.decode.counts
    assert not counted.decode.on_host, "a graph records no copy from the host"


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE)
def test_launches_of_a_token(launches: ModuleType, name: str) -> None:
    counted = count(launches, name, None)
    assert counted.decode.total <= DECODE[name][1], counted.decode.counts


@pytest.mark.parametrize("network", NETWORKS)
def test_a_recorded_step_touches_nothing_of_the_host(launches: ModuleType, network: str, tmp_path: Path) -> None:
    """A value that is read on the host raises, since no tensor has any."""
    make_checkpoint(tmp_path, vocab=101, **NETWORKS[network])
    shape = launches.Shape("tiny", tmp_path, load_network_config(tmp_path), torch.bfloat16)
    counted = launches.count(shape, 64, 192)
    assert not counted.decode.on_host
    assert counted.decode.counts["_decode_kernel"] == shape.network.num_kv_layers
    assert counted.decode.counts["_recurrence_kernel"] == len(shape.network.recurrent_layers)


# ---- experts


def gguf(*types: str) -> GgufMethod:
    """Gate, up and down of every expert in these types."""
    kinds = dict(zip(("gate_proj", "up_proj", "down_proj"), types, strict=True))
    return GgufMethod({f"mlp.experts.{index}.{name}": kind for index in range(12) for name, kind in kinds.items()})


METHODS: dict[str, LinearMethod | None] = {
    "dense": None,
    "mxfp4": MXFP4,
    "gguf": gguf("Q4_K", "Q4_K", "Q6_K"),
    "gguf, gate and up apart": gguf("Q4_K", "Q5_K", "Q8_0"),
}


def made_layer(device: torch.device, router: str, method: LinearMethod | None) -> Experts:
    spec, others = ROUTERS[router]
    build = BuildContext(torch.bfloat16, device, method).at("mlp")
    if "shared" in others:
        others = {**others, "shared": GatedMLP(512, 24, "silu", build.at(others["shared"]))}
    return Experts(512, 256, "silu", spec, build, **others)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("router", ROUTERS)
def test_a_layer_with_experts_is_few_launches(launches: ModuleType, router: str, method: str) -> None:
    """The router's product and its choice, gate and up, the activation, down and the sum, and the shared expert."""
    with launches.counted() as found:
        layer = made_layer(launches.CUDA, router, METHODS[method])
        layer.finish_loading()
        assert layer.is_recordable
        for rows in (1, 16, 17, 300):
            x = torch.empty(rows, 512, dtype=torch.bfloat16, device=launches.CUDA)
            found.taken()
            assert layer(x).shape == (rows, 512)
            most = 6 + (rows > 16) + (method == "gguf, gate and up apart") * 2
            if layer.shared is not None:
                most += 3 + (layer.shared_gate is not None)
            assert found.total <= most, found.counts


def test_experts_of_several_forms_are_computed_one_by_one(launches: ModuleType) -> None:
    """They are no one weight, and no graph can record them."""
    types = {**gguf("Q4_K", "Q4_K", "Q6_K").types, "mlp.experts.5.down_proj": "Q8_0"}
    with launches.counted():
        layer = made_layer(launches.CUDA, "softmax", GgufMethod(types))
        assert layer.gate_up.is_stacked and not layer.down.is_stacked and not layer.is_recordable
        assert len(list(layer.gate_up.own_weights())) == 1 and len(list(layer.down.own_weights())) == 12
