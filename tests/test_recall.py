"""The recall network under offload: one wrong, stale or half-copied KV row and an answer is wrong."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from engines import PREFILL_WAYS, greedy, offloaded, set_prefill, set_ring, token_ids, watch_layerwise
from fast import fast_only, fast_pairs
from resident_memory import peak_rss_bytes, rss_bytes

from nanovllm import LLM, SamplingParams
from nanovllm.apps.recall import expected_answer, make_document, make_prompt, notable_positions, write_recall_checkpoint

ANSWER_TOKENS = 3


def positions_to_ask(length: int, block: int, chunk: int, seed: int) -> list[int]:
    """Position 1, the first and last token of every block and every chunk, and random positions."""
    edges = notable_positions(length, ANSWER_TOKENS, {"block": block, "chunk": chunk})
    random = Random(seed).sample(range(1, length - ANSWER_TOKENS), 200 if length < 10_000 else 50)
    return sorted({1, *edges, *random})


def ask_everything(path: Path, length: int, block: int, chunk: int, dtype: str, way: str, **arguments: object) -> int:
    """Returns by how many bytes the first prompt exceeded what is planned for it: its KV and the steps' own memory."""
    vocab = length + 2
    max_len = length + 1 + ANSWER_TOKENS
    write_recall_checkpoint(path, vocab, max_len, seed=1, dtype=dtype)
    document = make_document(vocab, length, seed=2)
    positions = positions_to_ask(length, block, chunk, seed=3)
    num_blocks = -(-max_len // block)
    engine = offloaded(block, num_gpu_blocks=max(4, num_blocks // 8), num_cpu_blocks=num_blocks + len(positions))
    with LLM(path, max_model_len=max_len, max_num_batched_tokens=chunk, **{**engine, **arguments}) as llm:
        set_prefill(llm, way)
        layerwise_memory = watch_layerwise(llm)
        assert llm.kv_stats().device_bytes * 4 <= num_blocks * llm.kv_stats().bytes_per_block
        # The first pays the prefill; the others find the document cached, most of it on the host.
        prompts = [make_prompt(document, position) for position in positions]
        before = reset_peak_rss()
        answers = token_ids(llm, prompts[:1], greedy(ANSWER_TOKENS))
        planned = num_blocks * llm.kv_stats().bytes_per_block + llm._runner.plan.working_bytes
        excess = peak_rss_bytes() - before - planned
        assert bool(layerwise_memory) == (way == "layer-major")
        answers += token_ids(llm, prompts[1:], greedy(ANSWER_TOKENS))
    wrong = [p for p, a in zip(positions, answers, strict=True) if a != expected_answer(document, p, ANSWER_TOKENS)]
    assert not wrong, f"{len(wrong)} of {len(positions)} wrong, at {wrong[:10]}"
    return excess


def reset_peak_rss() -> int:
    """From now on `peak_rss_bytes` is of what comes; returns the resident bytes of now. See proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")
    return rss_bytes()


SIZES = ((256, 1024, True, 4), (64, 700, False, 12))  # block, chunk, CPU attention, ring slots


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("sizes", "dtype", "way"),
    fast_pairs(
        [(SIZES[0], "bfloat16", PREFILL_WAYS[0])],
        SIZES,
        ("bfloat16", "float32"),
        PREFILL_WAYS,
    ),
)
def test_4k(
    tmp_path: Path, sizes: tuple[int, int, bool, int], dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, chunk, cpu_attention, ring_slots = sizes
    set_ring(monkeypatch, ring_slots)
    ask_everything(tmp_path, 4096, block, chunk, dtype, way, cpu_attention=cpu_attention)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "way"),
    fast_pairs([], ("int8", "fp8"), ("bfloat16", "float32"), PREFILL_WAYS),
)
def test_4k_in_8_bits(tmp_path: Path, kv_cache_dtype: str, dtype: str, way: str) -> None:
    ask_everything(tmp_path, 4096, 64, 700, dtype, way, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("way", fast_only(["chunk-major"], PREFILL_WAYS))
def test_several_documents_at_once_and_short_requests_between(tmp_path: Path, way: str) -> None:
    """Long prompts larger than the device in one batch with ones that fit, each with its own document."""
    vocab = 6000
    block = 64
    write_recall_checkpoint(tmp_path, vocab, 4096, seed=1)
    prompts = []
    expected = []
    for seed, length in enumerate((2047, 2048, 2049, 60, 1500, 64, 65, 700)):
        document = make_document(vocab, length, seed)
        for position in (1, length // 2, length - ANSWER_TOKENS):
            prompts.append(make_prompt(document, position))
            expected.append(expected_answer(document, position, ANSWER_TOKENS))
    with LLM(tmp_path, max_model_len=2100, max_num_batched_tokens=500, **offloaded(block, 6, 180)) as llm:
        set_prefill(llm, way)
        assert token_ids(llm, prompts, greedy(ANSWER_TOKENS)) == expected
        assert token_ids(llm, prompts[::-1], greedy(ANSWER_TOKENS)) == expected[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", "layer-major"), ("float32", "chunk-major")])
def test_32k(tmp_path: Path, dtype: str, way: str) -> None:
    ask_everything(tmp_path, 32768, 1024, 4096, dtype, way)


@pytest.mark.slow
def test_32k_from_disk_in_other_engines(tmp_path: Path) -> None:
    """An eighth of the KV on the device, with other blocks and chunks than it was written with, and resident."""
    length = 32768
    write_recall_checkpoint(tmp_path / "model", length + 2, length + 1 + ANSWER_TOKENS, seed=1)
    document = make_document(length + 2, length, seed=2)
    positions = positions_to_ask(length, 1024, 4096, seed=3)
    prompts = [{"prompt_token_ids": make_prompt(document, position)} for position in positions]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=2)
    engines = [
        offloaded(1024, 4, 40 + len(positions), max_num_batched_tokens=4096),
        offloaded(512, 8, 80 + len(positions), max_num_batched_tokens=3000),
        {"kvcache_block_size": 256, "num_gpu_blocks": 140 + len(positions)},
    ]
    expected = [expected_answer(document, position, ANSWER_TOKENS) for position in positions]
    logprobs = []
    for engine, from_disk in zip(engines, (0, length, length), strict=True):
        with LLM(tmp_path / "model", kv_cache_dir=tmp_path / "kv", **engine) as llm:
            found = llm.generate(prompts[:1], params, use_tqdm=False)
            found += llm.generate(prompts[1:], params, use_tqdm=False)
        assert found[0].metrics.cached_tokens_disk == from_disk
        assert [output.outputs[0].token_ids for output in found] == expected
        logprobs.append([output.outputs[0].logprobs for output in found])
    assert logprobs[0] == logprobs[1] == logprobs[2]


@pytest.mark.slow
def test_128k_within_the_planned_memory(tmp_path: Path) -> None:
    excess = ask_everything(tmp_path, 131072, 4096, 16384, "bfloat16", "layer-major")
    assert excess <= 0
