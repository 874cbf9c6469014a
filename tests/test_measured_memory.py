"""How much memory a step needs: counted on tensors without memory, or measured by a device that knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import greedy, random_prompt, token_ids

from nanovllm import LLM, build
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.wrapper import DeviceWrapper

MIB = 1 << 20


class Measures(DeviceWrapper):
    """A device of 1 GiB that says that a step takes 100 MiB, and loads 50 MiB of kernels with its first one."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.runs: list[str] = []
        self.used = 200 * MIB

    def peak_memory(self, work: Callable[[], object]) -> int:
        assert not self.runs
        work()
        self.runs.append("a step")
        self.used += 50 * MIB
        return 100 * MIB

    def total_memory(self) -> int:
        return 1024 * MIB

    def free_memory(self) -> int:
        return 1024 * MIB - self.used

    def free_host_memory(self) -> int:
        return 2048 * MIB


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, hidden=32, intermediate=32)
    return tmp_path


def test_a_device_that_measures_is_asked_before_its_free_memory_is(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Measures()
    monkeypatch.setattr(build, "create_device", lambda name: device)
    with LLM(model_dir, dtype="float32", max_num_batched_tokens=96) as llm:
        assert len(token_ids(llm, [random_prompt(100, 97, 1)], greedy(2))[0]) == 2
        facts = llm.plan().sizing.memory
    assert facts.activation_peak == 100 * MIB
    assert (facts.device_total, facts.device_free) == (1024 * MIB, (1024 - 200 - 50) * MIB)
    assert device.runs == ["a step"]
