"""`kv_cache_memory_bytes` as people think of it: a share of the KV cache, and sizes as text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import GREEDY, set_stdin
from engines import greedy

from nanovllm import LLM
from nanovllm.apps.cli.main import main
from nanovllm.config import EngineConfig, engine_config
from nanovllm.memory.layout import layout_of
from nanovllm.memory.shares import with_device_bytes
from nanovllm.models.hf_config import read_network_config
from nanovllm.rules import Share, num_bytes, share, with_unit
from nanovllm.text.tokenizer import load_tokenizer

PROMPT = "All that is known of it. " * 30  # 720 tokens of the tiny checkpoint
SHARES = ["--kv-cache-memory-bytes", "10%", *GREEDY]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10%", Share(0.1, None)),
        ("12.5 %", Share(0.125, None)),
        ("10% of 32K", Share(0.1, 32_768)),
        ("150% of 1000", Share(1.5, 1000)),
        *((text, None) for text in ("0%", "10", "%", "10% of", "10% of 0", "-5%", "10% of x", "10%x", "", 10, None)),
    ],
)
def test_what_a_share_is(text: Any, found: Share | None) -> None:
    assert share(text) == found


def test_sizes_with_units() -> None:
    assert [with_unit(text) for text in ("7M", "7MiB", "7Mi", "1.5k", "20g")] == [
        7 << 20,
        7 << 20,
        7 << 20,
        1500,
        20 * 10**9,
    ]
    assert [num_bytes(value, 2**30) for value in ("7M", 2, 0.5, "4", "x", None)] == [
        7 << 20,
        2 << 30,
        1 << 29,
        None,
        None,
        None,
    ]


def sized(model: str | Path, **arguments: Any) -> tuple[EngineConfig, int]:
    """The configuration for the tiny checkpoint, and the bytes of a block."""
    config = engine_config(model, arguments)
    network = read_network_config(model).network
    sized_config = with_device_bytes(config, network)
    return sized_config, layout_of(sized_config, network).block_bytes


def test_a_share_is_of_the_longest_sequence_or_of_so_many_tokens(model: str) -> None:
    token = layout_of(engine_config(model, {}), read_network_config(model).network).token_bytes
    for arguments, tokens in (
        ({"kv_cache_memory_bytes": "25%"}, 1024 // 4),
        ({"kv_cache_memory_bytes": "25%", "max_model_len": 800}, 800 // 4),
        ({"kv_cache_memory_bytes": "50% of 600", "max_model_len": 800}, 600 // 2),
    ):
        config, block = sized(model, **arguments)
        assert config.enable_cpu_offload and config.num_bytes("kv_cache_memory_bytes") == tokens * token
        assert 10 <= tokens * token // block < 20, "blocks are small enough for the ring and several others"
    config, _ = sized(model, kv_cache_memory_bytes="25%", kvcache_block_size=64)
    assert config.kvcache_block_size == 64
    resident, _ = sized(model, kv_cache_memory_bytes="7M")
    assert not resident.enable_cpu_offload and resident.kvcache_block_size == 256
    resident, block = sized(model, kv_cache_memory_bytes="200Ki")
    assert resident.kvcache_block_size == 32 and 12 * block <= 200 << 10


def test_a_share_below_the_ring_gets_the_ring(model: str, caplog: pytest.LogCaptureFixture) -> None:
    config, block = sized(model, kv_cache_memory_bytes="0.5%")
    assert config.kvcache_block_size == 16 and config.num_bytes("kv_cache_memory_bytes") in (block, 2 * block)
    (said,) = caplog.messages
    assert said.startswith("kv_cache_memory_bytes=0.5%: 1,024 tokens take ") and "more than the share" in said


def test_a_share_of_the_device_gives_the_same_tokens(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model, kvcache_block_size=16) as llm:
        (resident,) = llm.generate(PROMPT, greedy(4), use_tqdm=False)
    with caplog.at_level(logging.INFO), LLM(model, kv_cache_memory_bytes="25%", max_num_batched_tokens=128) as llm:
        (offloaded,) = llm.generate(PROMPT, greedy(4), use_tqdm=False)
        stats = llm.kv_stats()
    assert offloaded.outputs[0].token_ids == resident.outputs[0].token_ids
    kv_bytes = 1024 * stats.bytes_per_block // stats.block_size
    assert stats.device_bytes + stats.layer_buffer_bytes <= kv_bytes / 4 and stats.transfers.d2h_bytes > 0
    assert stats.host_bytes <= 5 * kv_bytes and stats.swap_bytes <= 2 * kv_bytes, "not as much as the machine has"
    ring = stats.num_gpu_blocks - stats.resident_blocks
    assert f"{ring} more as a ring of {stats.ring_slots} slots of one layer each" in caplog.text


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_take_a_share_of_what_the_prompt_needs(
    command: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "book.txt").write_text(PROMPT)
    set_stdin(monkeypatch, b"What?\n")
    source = {"generate": "--file", "chat": "--document"}[command]
    with caplog.at_level(logging.INFO):
        weights = ["--weights-memory-bytes", "25%", "--host-weights-bytes", "1%", "--weights-dir", str(tmp_path)]
        assert main([command, model, source, str(tmp_path / "book.txt"), *SHARES, *weights]) == 0
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    tokens = len(tokenizer.encode(PROMPT)) + 6
    assert f"kv_cache_memory_bytes=10% of {tokens}: {tokens} tokens take" in caplog.text
    said = capsys.readouterr().err
    assert " MB copied out to the host, " in said and " MB of weights copied in, " in said
    assert " MB of weights read from disk" in said


def test_a_share_is_refused_without_offload(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "x", "--kv-cache-memory-bytes", "10%", "--no-enable-cpu-offload"]) == 2
    assert "--kv-cache-memory-bytes 10% offloads the rest: leave one out" in capsys.readouterr().err
