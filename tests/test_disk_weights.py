"""Weights that are read from disk: the same bits for every budget of the host, and what goes wrong."""

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
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, "max_num_batched_tokens": 100}
KV: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "offloaded": offloaded(BLOCK, 8, 200, max_num_batched_tokens=100),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"sliding_window": 24},
    "qwen3_5": {},
    "gemma3": {"sliding_window": 24},
    "glm4_moe": {},
    "qwen3_moe": {"experts": 16},
}


Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of a family."""
    found: dict[str, Path] = {}

    def of_family(family: str) -> Path:
        if family not in found:
            found[family] = tmp_path_factory.mktemp(family)
            make_checkpoint(found[family], family, vocab=VOCAB, layers=6, **FAMILIES[family])
        return found[family]

    return of_family


CASES = [
    (family, kv, products, device)
    for family in FAMILIES
    for kv in KV
    for products in (True, False)
    for device in (True, False)
]
FAST = [
    ("qwen3", "offloaded", True, True),
    ("gpt_oss", "resident", False, False),
    ("qwen3_moe", "resident", True, False),
]
FAST += [("glm4_moe", "offloaded", True, True), ("qwen3_5", "resident", True, False)]


@pytest.mark.parametrize(("family", "kv", "products", "shares"), fast_only(FAST, CASES))
def test_bits_are_those_of_resident_weights(
    made: Made,
    family: str,
    kv: str,
    products: bool,
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """shares: whether the device shares the host's memory."""
    if not shares:
        monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(DeviceOfItsOwn()))
    path = made(family)
    with LLM(path, dtype="float32", **KV[kv]) as llm:
        expected = answers(llm)
    for host in ("1%", "50%", "90%"):
        given = {"weights_memory_bytes": "30%", "host_weights_bytes": host, "weights_dir": tmp_path / "disk"}
        with LLM(path, dtype="float32", host_products=products, **given, **KV[kv]) as llm:
            stream = stream_of(llm)
            assert llm._runner.sizing.weights.on_disk
            assert answers(llm) == expected
            assert answers(llm) == expected, "from the prefix cache"
            assert stream.read_bytes > 0 and llm.kv_stats().read_weight_bytes > 0
        assert list((tmp_path / "disk").iterdir()) == []
