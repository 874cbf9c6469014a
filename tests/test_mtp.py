"""Speculative decoding by the model's head for multi-token prediction: its logits, and outputs without and with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GATED_DELTA, make_checkpoint, refusal
from engines import greedy, offloaded, random_prompt
from fast import fast_only
from mtp_heads import add_mtp_head, head_logits, head_weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.device import Device
from nanovllm.engine.request import Sequence as Running
from nanovllm.errors import ConfigError
from nanovllm.features.speculation import draft_model
from nanovllm.features.speculation.mtp import MTPDrafter
from nanovllm.models.mtp import MTPHead

BLOCK = 16
VOCAB = 199
MTP = {"method": "mtp", "num_speculative_tokens": 4}
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 90, "max_num_batched_tokens": 40}
FEW = {**RESIDENT, "num_gpu_blocks": 14}
WAYS: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "offloaded": offloaded(BLOCK, 4, 90, max_num_batched_tokens=40),
    "recomputed": {**FEW, "preemption_mode": "recompute"},
    "swapped": {**FEW, "preemption_mode": "swap", "swap_space": 0.01},
}
SHARED = random_prompt(5 * BLOCK + 3, VOCAB, seed=1)
PROMPTS = [SHARED, [*SHARED, 7, 8], SHARED[:BLOCK] + random_prompt(30, VOCAB, seed=2), random_prompt(1, VOCAB, seed=3)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.6, seed=5, max_tokens=28, ignore_eos=True, repetition_penalty=1.05),
    SamplingParams(temperature=0.8, seed=6, max_tokens=14, ignore_eos=True, n=2),
]


@pytest.fixture(autouse=True)
def drafts_do_not_follow_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "draft_length", lambda acceptance, most, *costs: most)


def outputs(llm: LLM) -> list[Any]:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    found = llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False)
    assert llm.metrics().blocks.used == 0
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in found]


@pytest.mark.parametrize("family", fast_only(["qwen3_5", "qwen3_next"], GATED_DELTA))
def test_logits_of_the_head_are_those_of_plain_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every draft, with a prompt in chunks, drafts after drafts, and from the head's own prefix cache."""
    model = make_checkpoint(tmp_path, family)
    add_mtp_head(tmp_path)
    computed: list[Tensor] = []
    drafted: list[tuple[list[int], list[int]]] = []
    compute_logits = MTPHead.compute_logits
    draft = MTPDrafter.draft

    def logits(head: MTPHead, hidden: Tensor) -> Tensor:
        computed.append(compute_logits(head, hidden))
        return computed[-1].clone()

    def drafts(drafter: MTPDrafter, seq: Running, most: int, rows: int, tokens: int) -> Sequence[int]:
        drafted.append((list(seq.token_ids), list(draft(drafter, seq, most, rows, tokens))))
        return drafted[-1][1]

    monkeypatch.setattr(MTPHead, "compute_logits", logits)
    monkeypatch.setattr(MTPDrafter, "draft", drafts)
    with LLM(tmp_path, dtype="float32", **RESIDENT, speculative_config={**MTP, "num_speculative_tokens": 3}) as llm:
        for _ in range(2):
            llm.generate([SHARED], greedy(9), use_tqdm=False)
        assert llm.metrics().prefix_cache.hit_tokens > 0
    weights = head_weights(tmp_path)
    due = iter(computed)
    assert max(len(found) for _, found in drafted) == 3
    for tokens, found in drafted:
        for expected in head_logits(model, weights, tokens, found):
            torch.testing.assert_close(next(due)[0], expected, rtol=1e-3, atol=1e-3)
    assert next(due, None) is None


@pytest.mark.parametrize("way", fast_only(["recomputed"], WAYS))
def test_outputs_are_those_without_it(tmp_path: Path, way: str) -> None:
    make_checkpoint(tmp_path, "qwen3_5", hidden=128)
    add_mtp_head(tmp_path, predicts=True)
    with LLM(tmp_path, **WAYS[way]) as llm:
        expected = outputs(llm)
    with LLM(tmp_path, **WAYS[way], speculative_config={**MTP, "max_model_len": 160}) as llm:
        for _ in range(2):  # then from snapshots
            assert outputs(llm) == expected
        metrics = llm.metrics()
    assert metrics.prefix_cache.hit_tokens > 0
    assert metrics.drafts.drafted_tokens > metrics.drafts.accepted_tokens > metrics.drafts.drafted_tokens / 8
    assert metrics.preemptions.recomputed > 0 or way != "recomputed"
    assert metrics.preemptions.swapped > 0 or way != "swapped"


def test_what_is_kept_for_the_head_is_copied_on_the_compute_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a copy could run before the model has computed, on a device with streams."""
    within = list[str]()
    outside = set[str]()

    @contextmanager
    def compute(device: Device) -> Iterator[None]:
        within.append("a step")
        yield
        within.pop()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not within:
                outside.add(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(Device, "compute", compute)
    make_checkpoint(tmp_path, "qwen3_5", hidden=128)
    add_mtp_head(tmp_path, predicts=True)
    with LLM(tmp_path, **RESIDENT, speculative_config=MTP) as llm, Watch():
        llm.generate([SHARED], greedy(9), use_tqdm=False)
        assert llm.metrics().drafts.accepted_tokens > 0
    assert outside == {"aten.slice.Tensor"}, "what copies nothing"


def test_models_without_the_head_are_refused(tmp_path: Path) -> None:
    for name, family, words in (
        ("plain", "qwen3", "of a Qwen3ForCausalLM no head for multi-token prediction is read"),
        ("lacking", "qwen3_5", "has no weights of a head for multi-token prediction (mtp.*)"),
    ):
        make_checkpoint(tmp_path / name, family)
        model = tmp_path / name
        assert words in refusal(lambda model=model: LLM(model, speculative_config=MTP), ConfigError)
    ranks = refusal(lambda: LLM(model, speculative_config=MTP, tensor_parallel_size=2), ConfigError)
    assert "method='mtp' is not supported with tensor_parallel_size=2" in ranks
