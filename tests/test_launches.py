"""What steps launch on a GPU, counted without one, and that the host waits for nothing that they compute."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import ROPES, make_checkpoint
from test_triton_experts import MXFP4, ROUTERS

from nanovllm.data.network import ExpertSpec
from nanovllm.formats.gguf.model import GgufMethod
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear_method import LinearMethod
from nanovllm.models.hf_config import load_decoder_spec

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
    spec = load_decoder_spec(tmp_path)
    shape = launches.Shape("tiny", tmp_path, spec, torch.bfloat16)
    counted = launches.count(shape, 64, 192)
    assert not counted.decode.on_host
    assert counted.decode.counts["_decode_kernel"] == spec.num_kv_layers
    assert counted.decode.counts["_recurrence_kernel"] == spec.num_recurrent_layers


# ---- experts


def gguf(spec: ExpertSpec, *types: str) -> GgufMethod:
    """Gate, up and down of every expert in these types."""
    modules = [spec.expert(0, index) for index in range(spec.num_experts)]
    return GgufMethod({name: kind for of_expert in modules for name, kind in zip(of_expert, types, strict=True)})


def methods(spec: ExpertSpec) -> dict[str, LinearMethod | None]:
    return {
        "dense": None,
        "mxfp4": MXFP4,
        "gguf": gguf(spec, "Q4_K", "Q4_K", "Q6_K"),
        "gguf, gate and up apart": gguf(spec, "Q4_K", "Q5_K", "Q8_0"),
    }


@pytest.mark.parametrize("method", methods(ExpertSpec(2, 1, 1, True, (True,))))
@pytest.mark.parametrize("facts", ROUTERS.values(), ids=ROUTERS)
def test_a_layer_with_experts_is_few_launches(launches: ModuleType, facts: dict[str, Any], method: str) -> None:
    """The router's product and its choice, gate and up, the activation, down and the sum, and the shared expert."""
    spec = replace(ExpertSpec(12, 3, 256, True, (True,)), **facts)
    with launches.counted() as found:
        layer = Experts(spec, 0, 512, "silu", methods(spec)[method], torch.bfloat16, launches.CUDA)
        for weight in layer.weights():
            weight.finish_loading()
        assert layer.is_recordable
        for rows in (1, 16, 17, 300):
            x = torch.empty(rows, 512, dtype=torch.bfloat16, device=launches.CUDA)
            found.taken()
            assert layer(x).shape == (rows, 512)
            most = 6 + (rows > 16) + (method == "gguf, gate and up apart") * 2
            if spec.shared is not None:
                most += 3 + (spec.shared.gate is not None)
            assert found.total <= most, found.counts


def test_experts_of_several_forms_are_computed_one_by_one(launches: ModuleType) -> None:
    """They are no one weight, and no graph can record them."""
    spec = ExpertSpec(12, 3, 256, True, (True,))
    mixed = gguf(spec, "Q4_K", "Q4_K", "Q6_K")
    types = {**mixed.types, spec.expert(0, 5)[2]: "Q8_0"}
    with launches.counted():
        layer = Experts(spec, 0, 512, "silu", GgufMethod(types), torch.bfloat16, launches.CUDA)
        assert layer.gate_up.is_stacked and not layer.down.is_stacked and not layer.is_recordable
        assert len(list(layer.gate_up)) == 1 and len(list(layer.down)) == 12
