"""Adapters found in several threads, and on the device: after interrupted loads, and the stream of their tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from lora_helpers import ALL, make_adapter

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter
from nanovllm.features.lora.adapter_files import AdapterRegistry
from nanovllm.features.lora.manager import LoRAManager
from nanovllm.features.lora.weights import PackedAdapter, read_packed
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

NUM_ADAPTERS = 3


class Setup:
    """A model and adapters."""

    def __init__(self, folder: Path) -> None:
        reference = make_checkpoint(folder / "model", layers=1)
        self.config = EngineConfig(model=str(folder / "model"), enable_lora=True)
        network = load_network_config(self.config.model)
        self.model = load_model(self.config.model, network, torch.float32, torch.device("cpu"))
        registry = AdapterRegistry(self.model.network, 16)
        made = [make_adapter(folder / f"a{number}", reference, number, ALL) for number in range(1, NUM_ADAPTERS + 1)]
        self.adapters: list[Adapter] = [registry.find(request) for request in made]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("lora"))


def test_an_interrupted_load_leaves_its_slot_free(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=setup.config.model, enable_lora=True, max_loras=2)
    manager = LoRAManager(setup.model, config)
    manager.begin_step(setup.adapters[:1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("nanovllm.features.lora.weights.PackedAdapter.weights_in", interrupt)
            manager.begin_step(setup.adapters[1:2])
    assert manager.begin_step(setup.adapters[1:3]) == {}
    assert sorted(manager.on_device) == [2, 3]


def test_adapters_found_in_several_threads_have_numbers_of_their_own(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Barrier(NUM_ADAPTERS)

    def made(*fields: Any) -> Adapter:
        with suppress(BrokenBarrierError):
            together.wait(0.2)
        return Adapter(*fields)

    monkeypatch.setattr("nanovllm.features.lora.adapter_files.Adapter", made)
    registry = AdapterRegistry(setup.model.network, 16)
    with ThreadPoolExecutor(NUM_ADAPTERS) as pool:
        found = list(pool.map(registry.find, [adapter.request for adapter in setup.adapters]))
    assert {adapter.number for adapter in found} == {1, 2, 3}


def test_files_that_change_while_they_are_read_are_not_used(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be of two adapters, and are not the content that the number stands for."""
    manager = LoRAManager(setup.model, setup.config)
    adapter = setup.adapters[0]
    config = adapter.directory / "adapter_config.json"

    def read(*arguments: Any) -> PackedAdapter:
        config.write_text(config.read_text() + " ")
        return read_packed(*arguments)

    monkeypatch.setattr("nanovllm.features.lora.manager.read_packed", read)
    (error,) = manager.begin_step([adapter]).values()
    assert "have changed since the request was added: send it again" in error
    assert not manager.on_host and not manager.on_device
