"""Products with weights in host memory: the same bits wherever a product runs, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cpu_attention_helpers import DeviceOfItsOwn
from engines import offloaded
from fast import fast_only
from ordering_check import OrderingCheck
from streamed_engines import VOCAB, answers, stream_of

from nanovllm import LLM, build

BLOCK = 16
# Prompts of more rows than are multiplied on the host, and decode steps of few.
STEP = {"max_num_batched_tokens": 100}
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, **STEP}
OFFLOADED = offloaded(BLOCK, 8, 200, cpu_attention=False, **STEP)
KV: dict[str, dict[str, Any]] = {"resident": RESIDENT, "offloaded": OFFLOADED}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"sliding_window": 24, "experts": 16},
    "qwen3_5": {},
    "gemma3": {"sliding_window": 24},
    "glm4_moe": {"experts": 16},
    "qwen3_moe": {"experts": 16},
}


@pytest.fixture
def own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines created from now on have a device that does not share the host's memory."""
    monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(DeviceOfItsOwn()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def of_family(family: str) -> Path:
        if family not in found:
            found[family] = tmp_path_factory.mktemp(family)
            make_checkpoint(found[family], family, vocab=VOCAB, layers=6, **FAMILIES[family])
        return found[family]

    return of_family


CASES = [(family, kv) for family in FAMILIES for kv in KV]
FAST = [("qwen3", "offloaded"), ("gpt_oss", "resident"), ("glm4_moe", "resident")]


@pytest.mark.parametrize(("family", "kv"), fast_only(FAST, CASES))
def test_bits_are_those_of_resident_weights(made: Callable[[str], Path], family: str, kv: str) -> None:
    with LLM(made(family), dtype="float32", **KV[kv]) as llm:
        expected = answers(llm)
    for asked in ("1%", "60%"):
        with LLM(made(family), dtype="float32", weights_memory_bytes=asked, **KV[kv]) as llm:
            assert answers(llm) == expected
            assert answers(llm) == expected, "from the prefix cache"


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize(("family", "kv"), fast_only(FAST, CASES))
def test_a_device_of_its_own_and_its_host_give_the_same_bits(made: Callable[[str], Path], family: str, kv: str) -> None:
    """Where both have the same kernels, as here."""
    with LLM(made(family), dtype="float32", **KV[kv]) as llm:
        expected = answers(llm)
    for asked in ("1%", "60%"):
        with LLM(made(family), dtype="float32", weights_memory_bytes=asked, **KV[kv]) as llm:
            assert answers(llm) == expected
            assert answers(llm) == expected, "from the prefix cache"
            assert stream_of(llm).host_bytes > 0
