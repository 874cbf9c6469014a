"""The memory that a step was said to need: counted on tensors without memory, or measured by a device that knows.

It is enough for steps that use everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, random_prompt, token_ids

from nanovllm import LLM, SamplingParams, build
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.wrapper import DeviceWrapper
from nanovllm.memory import profiling
from nanovllm.memory.profiling import activation_peak

MIB = 1 << 20
VOCAB = 5000
# The model's own operators take little compared with the logits here; the sampler must be counted.
SLACK = 200_000

USES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"min_p": 0.001},
    "sorted": {"top_p": 0.999},
    "logprobs": {"temperature": 0.0, "logprobs": 20},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 20},
    "everything": {
        "top_p": 0.9,
        "prompt_logprobs": 5,
        "logprobs": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.0},
        "min_tokens": 2,
    },
}


@pytest.mark.parametrize("name", USES)
def test_a_step_stays_within_the_predicted_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, eos_token_id=1)
    engine = {"max_num_batched_tokens": 300, "max_num_seqs": 70, "kvcache_block_size": 16, "num_gpu_blocks": 400}
    with LLM(tmp_path, **engine) as llm:
        runner = llm._runner
        peaks = []
        execute = runner.execute

        def measured(batch: Any) -> Any:
            with profiling._LiveBytes() as counter:
                result = execute(batch)
            peaks.append(counter.peak)
            return result

        monkeypatch.setattr(runner, "execute", measured)
        prompts = [random_prompt(250, VOCAB, 1) if name == "prompt logprobs" else [2, 3]] * 70
        params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1, **USES[name])
        llm.generate(prompts[:1] if name == "prompt logprobs" else prompts, params, use_tqdm=False)
        assert max(peaks) <= activation_peak(runner.model, llm.config) + SLACK
        assert max(peaks) > 4 * VOCAB * (240 if name == "prompt logprobs" else 70)


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


def test_a_device_that_measures_is_asked_before_its_free_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, hidden=32, intermediate=32)
    device = Measures()
    monkeypatch.setattr(build, "create_device", lambda name: device)
    with LLM(tmp_path, dtype="float32", max_num_batched_tokens=96) as llm:
        assert len(token_ids(llm, [random_prompt(100, 97, 1)], greedy(2))[0]) == 2
        facts = llm.plan().sizing.memory
    assert facts.activation_peak == 100 * MIB
    assert (facts.device_total, facts.device_free) == (1024 * MIB, (1024 - 200 - 50) * MIB)
    assert device.runs == ["a step"]
