"""Engines on the emulated GPU have the right tokens whatever the delays of copies, kernels, host tasks and events."""

from __future__ import annotations

from typing import Any

import emulated_gpu
import pytest
from emulated_engines import CASES, Model, Tokens, use_torch_operators

NAMES = ["resident, graphs", "offloaded", "CPU attention", "swapped", "prefix hits on both tiers"]


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Model, Tokens]]:
    return {}


@pytest.fixture(autouse=True)
def torch_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_operators(monkeypatch)


def model_of(
    name: str, models: dict[str, tuple[Model, Tokens]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Tokens]:
    if name not in models:
        model = Model(CASES[name], tmp_path_factory.mktemp("case"))
        with model.engine("cpu") as llm:
            models[name] = model, model.generate(llm)
    return models[name]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_delays_change_nothing(
    name: str, seed: int, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, tokens = model_of(name, models, tmp_path_factory)
    with (
        emulated_gpu.delays(seed, copies=3000, kernels=100, host_tasks=3000, events=300),
        model.engine("cuda") as llm,
        emulated_gpu.default_stream_watched() as on_default,
    ):
        assert model.generate(llm) == tokens
    assert not on_default, on_default[0]
