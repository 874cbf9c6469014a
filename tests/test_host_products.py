"""Products with weights in host memory: the same bits wherever a product runs, and what moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cpu_attention_helpers import DeviceOfItsOwn
from engines import greedy, offloaded, token_ids
from fast import fast_only
from ordering_check import OrderingCheck
from quantized_checkpoints import quantize
from streamed_engines import FAMILIES, PROMPTS, VOCAB, Made, answers, checkpoints, failing_copies, stream_of

from nanovllm import LLM, build
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights import stream
from nanovllm.features.streamed_weights.host_products import HostExchange
from nanovllm.features.streamed_weights.host_share import HostShare, StepCost
from nanovllm.ops import triton_support

BLOCK = 16
# Prompts of more rows than are multiplied on the host, and decode steps of few.
STEP = {"max_num_batched_tokens": 100}
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, **STEP}
OFFLOADED = offloaded(BLOCK, 8, 200, cpu_attention=False, **STEP)
KV: dict[str, dict[str, Any]] = {"resident": RESIDENT, "offloaded": OFFLOADED}


@pytest.fixture
def own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines created from now on have a device that does not share the host's memory."""
    monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(DeviceOfItsOwn()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return checkpoints(tmp_path_factory, layers=6)


CASES = [(family, kv) for family in FAMILIES for kv in KV]
FAST = [("qwen3", "offloaded"), ("gpt_oss", "resident"), ("glm4_moe", "resident")]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("family", "kv"), fast_only(FAST, CASES))
def test_bits_are_those_of_resident_weights(
    made: Made, family: str, kv: str, shares: bool, request: pytest.FixtureRequest
) -> None:
    """shares: whether the device shares the host's memory. Both have the same kernels here."""
    if not shares:
        request.getfixturevalue("own_device")
    with LLM(made(family), dtype="float32", **KV[kv]) as llm:
        expected = answers(llm)
    for asked in ("1%", "60%"):
        with LLM(made(family), dtype="float32", weights_memory_bytes=asked, **KV[kv]) as llm:
            assert answers(llm) == expected
            assert answers(llm) == expected, "from the prefix cache"
            assert stream_of(llm).host_bytes > 0


STORED = ["gptq-32-asymmetric", "awq-32", "fp8-channel", "pack-quantized-32"]


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize("family", fast_only(["qwen3_moe"], ["qwen3", "qwen3_moe"]))
@pytest.mark.parametrize("stored", fast_only(STORED[:1], STORED))
def test_packed_weights_are_multiplied_on_the_host(tmp_path: Path, family: str, stored: str) -> None:
    sizes = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4, "layers": 4, "experts": 8}
    make_checkpoint(tmp_path / "plain", family, vocab=VOCAB, **sizes)
    path = quantize(tmp_path / "plain", tmp_path / stored, stored)
    with LLM(path, dtype="bfloat16", **RESIDENT) as llm:
        expected = answers(llm)
    with LLM(path, dtype="bfloat16", weights_memory_bytes="1%", **RESIDENT) as llm:
        assert answers(llm) == expected
        assert stream_of(llm).host_bytes > 0


def test_few_rows_copy_nothing_where_the_host_is_the_device(made: Made) -> None:
    """And many copy every weight once."""
    with LLM(made("qwen3"), dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        weights = stream_of(llm)
        token_ids(llm, PROMPTS[0], greedy(1))
        copied = weights.loaded_bytes
        assert weights.streamed_bytes <= copied <= 2 * weights.streamed_bytes
        assert weights.host_bytes == 0
        token_ids(llm, PROMPTS[0], greedy(5))
        assert weights.loaded_bytes == copied, "the prefix is known, and steps have few rows"
        # One layer is still in a slot; the rows of a prompt that is known begin with its last block.
        assert 5 * weights.streamed_bytes // 2 < weights.host_bytes <= 5 * weights.streamed_bytes


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("fails_at", [1, 3, 12])
def test_a_failing_copy_ends_the_running_requests_and_not_the_engine(made: Made, family: str, fails_at: int) -> None:
    """Copies that nobody waits for fail too."""
    with LLM(made(family), dtype="float32", weights_memory_bytes="50%", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(9))
        with failing_copies(fails_at), pytest.raises(EngineError, match="the link is down"):
            llm.generate(PROMPTS * 3, greedy(9), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert token_ids(llm, PROMPTS, greedy(9)) == expected


@pytest.mark.usefixtures("own_device")
def test_a_result_is_overwritten_only_when_the_device_has_taken_it(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are read without a wait for the device are noticed."""
    given: dict[str, Any] = {**RESIDENT, "dtype": "float32", "weights_memory_bytes": "1%"}
    with LLM(made("qwen3"), **given) as llm:
        token_ids(llm, PROMPTS[2], greedy(3))
    monkeypatch.setattr(HostExchange, "read", lambda exchange, tensors: list(tensors))
    with (
        LLM(made("qwen3"), **given) as llm,
        pytest.raises(EngineError, match="'a result of the host' on stream host writes"),
    ):
        token_ids(llm, PROMPTS[2], greedy(3))


@pytest.mark.cuda
def test_without_triton_single_experts_of_a_gpu_are_computed_on_the_host(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(made("qwen3_moe"), dtype="float32", device="cpu", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(4))
    monkeypatch.setattr(triton_support, "triton_runs", lambda: False)
    with LLM(made("qwen3_moe"), dtype="float32", device="cuda", weights_memory_bytes="1%", **RESIDENT) as llm:
        assert token_ids(llm, PROMPTS, greedy(4)) == expected
        assert stream_of(llm).host_bytes > 0


@pytest.mark.usefixtures("own_device")
def test_the_share_of_the_host_is_told_what_each_step_took(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[StepCost] = []

    class Watched(HostShare):
        def layers(self, rows: int) -> tuple[int, ...]:
            return 1, 2, 4

        def observe(self, step: StepCost) -> None:
            costs.append(step)

    monkeypatch.setattr(stream, "HostShare", Watched)
    with LLM(made("qwen3"), dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        layer_bytes = stream_of(llm).streamed_bytes // 6
        token_ids(llm, PROMPTS[0], greedy(6))
    assert [cost.rows for cost in costs] == [1] * 4, "without the prompt, and the step that nothing follows"
    assert all(cost.host_bytes == 3 * layer_bytes for cost in costs)
    assert all(cost.seconds >= 0 for cost in costs)
