"""Which adapters are on the device and in host memory after any sequence of steps, and which rows each one gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_helpers import ALL, make_adapter

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter
from nanovllm.device.cpu import CpuDevice
from nanovllm.features.lora.adapter_files import AdapterRegistry, read_adapter
from nanovllm.features.lora.manager import LoRAManager
from nanovllm.features.lora.weights import AdapterWeights, batch_parts, read_packed
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.loader import load_model

NUM_ADAPTERS = 5


class Setup:
    """A model and adapters of different sizes."""

    def __init__(self, folder: Path) -> None:
        reference = make_checkpoint(folder / "model", layers=1)
        self.config = EngineConfig(model=str(folder / "model"), enable_lora=True)
        spec = load_decoder_spec(self.config.model, {})
        self.model: Decoder = load_model(self.config.model, spec, torch.float32, torch.device("cpu"))
        registry = AdapterRegistry(spec, 16)
        targets = [ALL, ALL[:1], ALL[3:], ALL[4:6], ALL[::2]]
        self.adapters: list[Adapter] = []
        for index in range(NUM_ADAPTERS):
            request = make_adapter(folder / f"a{index}", reference, index + 1, targets[index], rank=1 + 2 * index)
            self.adapters.append(registry.find(request))
        files = [read_adapter(folder / f"a{index}", spec, 16) for index in range(NUM_ADAPTERS)]
        self.packed = [read_packed(each, self.model) for each in files]

    def check_weights(self, number: int, weights: AdapterWeights) -> None:
        """The weights on the device are those of the adapter's files."""
        packed = self.packed[number - 1]
        expected = packed.weights_in(packed.elements)
        assert weights.keys() == expected.keys()
        for linear, mine in weights.items():
            assert torch.equal(mine.a, expected[linear].a)
            for (columns, ranks, b), (columns2, ranks2, b2) in zip(mine.parts, expected[linear].parts, strict=True):
                assert (columns, ranks) == (columns2, ranks2) and torch.equal(b, b2)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("lora"))


def used(recent: list[int], number: int, most: int, keep: Sequence[int]) -> bool:
    """Use `number` in a list of at most `most`, the least recently used first. Returns whether it was there."""
    found = number in recent
    if found:
        recent.remove(number)
    elif len(recent) == most:
        recent.remove(next(each for each in recent if each not in keep))
    recent.append(number)
    return found


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


STEPS = st.lists(st.lists(st.integers(1, NUM_ADAPTERS), max_size=3, unique=True), max_size=12)


@settings(max_examples=60)
@given(steps=STEPS, max_loras=st.integers(3, 4), more_on_host=st.integers(0, 2))
def test_the_least_recently_used_adapters_leave(
    setup: Setup, steps: list[list[int]], max_loras: int, more_on_host: int
) -> None:
    config = EngineConfig(
        model=setup.config.model, enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras + more_on_host
    )
    manager = LoRAManager(setup.model, config)
    device, host, loads, reads = list[int](), list[int](), 0, 0
    for step in steps:
        assert manager.begin_step([setup.adapters[number - 1] for number in step]) == {}
        missing = [number for number in step if number not in device]
        for number in sorted(step, key=lambda each: each in missing):  # those that are there count as used first
            if not used(device, number, max_loras, keep=step):
                loads += 1
                reads += not used(host, number, max_loras + more_on_host, keep=())
        assert (list(manager.on_device), list(manager.on_host)) == (device, host)
        assert (manager.num_loads, manager.num_reads) == (loads, reads)
        for number in device:
            setup.check_weights(number, manager.on_device[number][1])


@settings(max_examples=200)
@given(
    sequences=st.lists(st.tuples(st.sampled_from([None, 1, 2, 3]), st.integers(1, 9)), min_size=1, max_size=12),
    part_rows=st.integers(1, 20),
)
def test_every_row_gets_its_own_adapter_once(
    setup: Setup, sequences: list[tuple[int | None, int]], part_rows: int
) -> None:
    """Adapter 3 could not be loaded, so that its rows get none."""
    weights: dict[int, AdapterWeights] = {
        number: setup.packed[number - 1].weights_in(setup.packed[number - 1].elements) for number in (1, 2)
    }
    parts = batch_parts(sequences, weights, part_rows, torch.device("cpu"))
    expected = [number if number in weights else None for number, rows in sequences for _ in range(rows)]
    if not any(expected):
        assert parts == []
        return
    found: list[int | None] = []
    for index, part in enumerate(parts):
        rows: list[list[int]] = [[] for _ in expected[index * part_rows : (index + 1) * part_rows]]
        for where, adapter in part.groups if part is not None else ():
            number = next(number for number in weights if weights[number] is adapter)
            for row in torch.arange(len(rows))[where].tolist():
                rows[row].append(number)
        assert all(len(numbers) <= 1 for numbers in rows)
        found += [numbers[0] if numbers else None for numbers in rows]
    assert found == expected


def test_the_manager_is_made_on_the_compute_stream(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes tables that the kernels of the compute stream read, and no other stream is ordered before that one."""
    within: list[str] = []

    @contextmanager
    def compute(_: CpuDevice) -> Iterator[None]:
        within.append("compute")
        try:
            yield
        finally:
            within.pop()

    made: list[list[str]] = []
    make = LoRAManager.__init__

    def watched(manager: LoRAManager, model: Decoder, config: EngineConfig) -> None:
        made.append(list(within))
        make(manager, model, config)

    monkeypatch.setattr(CpuDevice, "compute", compute)
    monkeypatch.setattr(LoRAManager, "__init__", watched)
    LLM(setup.config.model, device="cpu", enable_lora=True, num_gpu_blocks=8, max_model_len=64).close()
    assert made == [["compute"]]
