"""What offload moves and what it touches: counted copies and bytes, sentinels in the host pool, block moves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MIXES, checkpoint_fixture, make_checkpoint
from cpu_attention_helpers import force_share, kv_cache, most_cpu_attention_tokens
from engines import (
    PREFILL_WAYS,
    for_groups,
    greedy,
    offloaded,
    random_prompt,
    recorded_batches,
    run_random_requests,
    set_prefill,
    token_ids,
    watch_layerwise,
)
from fast import fast_only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.transfers import CpuAttentionUse, predict_request, predict_transfers
from nanovllm import LLM
from nanovllm.data.batch import Batch
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE
from nanovllm.kvcache import step_plan
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.states import MOVE_KINDS
from nanovllm.kvcache.step_plan import BlockRead
from nanovllm.memory.budget import TransferCount, blocks_of_share
from nanovllm.memory.layerwise import NO_LAYERWISE, prefill_steps
from nanovllm.memory.layout import KVLayout

BLOCK = 16
VOCAB = 97
LAYERS = 3


model_dir = checkpoint_fixture(vocab=VOCAB, layers=LAYERS)


def decode_loads(layout: KVLayout, resident: int, prompt_len: int, max_tokens: int) -> int:
    """Bytes that decoding loads: for each token all earlier KV on the host."""
    lengths = range(prompt_len, prompt_len + max_tokens - 1)
    return sum(max(0, length - resident * BLOCK) for length in lengths) * layout.token_bytes


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    prompt_len=st.one_of(
        st.integers(1, 200), st.builds(lambda k, d: max(1, BLOCK * k + d), st.integers(0, 12), st.integers(-1, 1))
    ),
    max_tokens=st.integers(1, 20),
    num_gpu_blocks=st.integers(4, 9),
    chunk=st.integers(5, 100),
    share=st.one_of(st.none(), st.floats(0, 1), st.just(1.0)),
    way=st.sampled_from(PREFILL_WAYS),
)
def test_one_request_moves_what_the_formula_says(
    model_dir: Path,
    prompt_len: int,
    max_tokens: int,
    num_gpu_blocks: int,
    chunk: int,
    share: float | None,
    way: str,
) -> None:
    arguments = offloaded(BLOCK, num_gpu_blocks, 40, max_num_batched_tokens=chunk, cpu_attention=share is not None)
    with LLM(model_dir, **arguments) as llm:
        set_prefill(llm, way)
        cpu_attention = None
        if share is not None:
            force_share(llm, share)
            cpu_attention = CpuAttentionUse(share, most_cpu_attention_tokens(llm))
        batches = recorded_batches(llm)
        (output,) = llm.generate(random_prompt(prompt_len, VOCAB, 1), greedy(max_tokens), use_tqdm=False)
        stats = llm.kv_stats()
        layout = kv_cache(llm).layout
    resident = stats.resident_blocks
    for batch, result, moved in batches:
        (seq,) = batch.sequences
        if seq.layerwise is None:
            assert moved == predict_transfers(
                layout, resident, seq.context_len, len(seq.token_ids), cpu_attention=cpu_attention
            )
        assert (moved.h2d_bytes, moved.d2h_bytes) == (result.h2d_bytes[0], result.d2h_bytes[0])
    layerwise_memory = stats.layerwise_memory if way == "layer-major" else NO_LAYERWISE
    steps = prefill_steps(layout.block_size, resident, prompt_len, chunk, layerwise_memory)
    assert stats.transfers == predict_request(layout, resident, prompt_len, max_tokens, chunk, cpu_attention, steps)
    if layerwise_memory.max_tokens and cpu_attention is None:
        assert stats.transfers.h2d_bytes == decode_loads(layout, resident, prompt_len, max_tokens), "no prompt byte"
    assert (output.metrics.h2d_bytes, output.metrics.d2h_bytes) == (
        stats.transfers.h2d_bytes,
        stats.transfers.d2h_bytes,
    )
    assert stats.device_bytes <= num_gpu_blocks * stats.bytes_per_block


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_batch_moves_the_sum_and_shared_blocks_once(model_dir: Path, share: float) -> None:
    document = random_prompt(6 * BLOCK, VOCAB, 5)
    with LLM(model_dir, **offloaded(BLOCK, 4, 60)) as llm:
        force_share(llm, share)
        token_ids(llm, document, greedy(1))  # its blocks are cached: some resident, the others on the host
        batches = recorded_batches(llm)
        outputs = llm.generate([[*document, i] for i in range(5)], greedy(1), use_tqdm=False)
        layout = kv_cache(llm).layout
        resident = llm.kv_stats().resident_blocks
    ((batch, result, moved),) = batches
    assert [output.num_cached_tokens for output in outputs] == [6 * BLOCK] * 5
    tables = [seq.block_tables[0] for seq in batch.sequences]
    shared = {physical_id for table in tables for physical_id in table[:6] if physical_id >= resident}
    tails = [physical_id for table in tables for physical_id in table[6:] if physical_id >= resident]
    assert 0 < len(shared) <= 6
    moved_blocks = len(batch.moves)
    promoted = sum(move.src >= resident for move in batch.moves)
    on_host = blocks_of_share(len(shared), share)
    loaded = len(shared) - on_host
    assert moved == TransferCount(
        h2d_copies=LAYERS * loaded + promoted,
        h2d_bytes=loaded * layout.block_bytes + promoted * layout.block_bytes,
        d2h_copies=LAYERS * len(tails) + moved_blocks - promoted,
        d2h_bytes=len(tails) * layout.token_bytes + (moved_blocks - promoted) * layout.block_bytes,
        cpu_attention_blocks=LAYERS * on_host,
        cpu_attention_bytes=on_host * layout.block_bytes,
    )
    assert sum(result.h2d_bytes) == loaded * layout.block_bytes
    assert sum(result.d2h_bytes) == len(tails) * layout.token_bytes


def by_block_tables(cache: OffloadedKVCache, batch: Batch) -> TransferCount:
    """What a step without CPU attention copies: the held host blocks of each layer, once, and what moves."""
    layout = cache.layout
    resident = cache.pools.split.resident_blocks
    states = cache.pools.states
    copies = Counter[str]()
    num_bytes = Counter[str]()

    def copied(kind: str, number: int, tokens_bytes: int) -> None:
        copies[kind] += number
        num_bytes[kind] += tokens_bytes

    for index, (group, of_group) in enumerate(zip(layout.groups, layout.of_groups, strict=True)):
        size = group.block_size
        token_bytes = of_group.token_layer_bytes
        reads = dict[int, tuple[int, int]]()
        for seq in batch.sequences:
            end = seq.context_len + len(seq.token_ids)
            for first, block in zip(range(0, end, size), seq.block_tables[index], strict=True):
                assert block == HOLE or first + size > seq.context_len + 1 - (group.window or ANY_LENGTH)
                if block >= resident:
                    stored = min(size, max(0, seq.context_len - first))
                    reads[block] = (stored, min(size, end - first) - stored)
        for stored, new in reads.values():
            readers = layout.groups.num_readers[index]
            owners = len(group.layers)
            copied("h2d", readers * bool(stored), readers * stored * token_bytes)
            copied("d2h", owners * bool(new), owners * new * token_bytes)
    for move in batch.moves:
        of_group = layout.of_groups[move.group]
        moved = layout.planes * of_group.token_layer_bytes * (move.num_tokens or of_group.block_size)
        copied(MOVE_KINDS[move.src >= resident][move.dst >= resident], 1, moved)
    for state in batch.state_moves:
        assert states is not None
        if state.src is not None and not state.num_replayed:
            kind = MOVE_KINDS[state.src >= states.num_device_slots][state.dst >= states.num_device_slots]
            copied(kind, 1, sum(part.nbytes for part in states.parts(state.src)))
    return TransferCount(copies["h2d"], num_bytes["h2d"], copies["d2h"], num_bytes["d2h"])


@pytest.mark.parametrize("mix", fast_only(["full attention and states"], MIXES))
def test_every_step_of_many_requests_moves_what_its_block_tables_say(tmp_path: Path, mix: str) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, hidden=32, intermediate=32, **MIXES[mix])
    few = {"max_num_seqs": 6} if "states" in mix else {}  # and as few state slots
    arguments = offloaded(BLOCK, 4, 14, max_num_batched_tokens=45, cpu_attention=False, max_model_len=120, **few)
    with LLM(tmp_path, **for_groups(tmp_path, arguments)) as llm:
        set_prefill(llm, "chunk-major")
        batches = recorded_batches(llm)
        run_random_requests(llm, VOCAB, 20)
        cache = kv_cache(llm)
        for batch, _, moved in batches:
            assert moved == by_block_tables(cache, batch)
        num_device_slots, _ = llm.kv_stats().state_slots
    assert any(batch.moves for batch, _, _ in batches)
    snapshots = [move for batch, _, _ in batches for move in batch.state_moves if move.dst >= num_device_slots]
    assert bool(snapshots) == ("states" in mix), "on the host"


def test_a_step_announces_its_host_blocks_once_for_all_layers(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens have 4,000 blocks: made anew for each layer, they took as long as their copies."""
    reads: list[BlockRead] = []

    def counted(*arguments: Any) -> BlockRead:
        reads.append(BlockRead(*arguments))
        return reads[-1]

    with LLM(model_dir, **offloaded(BLOCK, 4, 40, cpu_attention=False)) as llm:
        batches = recorded_batches(llm)
        stream = llm.stream([random_prompt(12 * BLOCK + 1, VOCAB, 5)], greedy(3))
        next(stream)
        monkeypatch.setattr(step_plan, "BlockRead", counted)
        batches.clear()
        next(stream)
        stream.close()
        resident = llm.kv_stats().resident_blocks
    ((batch, _, moved),) = batches
    on_host = sum(physical_id >= resident for physical_id in batch.sequences[0].block_tables[0])
    assert len(reads) == len(batch.sequences[0].block_tables[0]) and moved.h2d_copies == LAYERS * on_host > 8


@pytest.mark.parametrize("way", PREFILL_WAYS)
@pytest.mark.parametrize("prompt_len", [5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 9 * BLOCK + 7])
def test_host_memory_outside_the_written_tokens_is_untouched(model_dir: Path, prompt_len: int, way: str) -> None:
    """Every byte of the host pool starts as a sentinel; afterwards exactly the tokens that belong there are written."""
    sentinel = -1234.5
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 30, max_num_batched_tokens=37)) as llm:
        set_prefill(llm, way)
        layerwise_memory = watch_layerwise(llm)
        host = kv_cache(llm).engine.host  # [blocks, layers, 2, kv_heads, block_size, head_dim]
        host.fill_(sentinel)
        batches = recorded_batches(llm)
        token_ids(llm, random_prompt(prompt_len, VOCAB, 2), greedy(BLOCK + 2))
        kv_cache(llm).engine.synchronize()
        resident = llm.kv_stats().resident_blocks
        written = torch.zeros(host.shape[0], BLOCK, dtype=torch.bool)
        (last,) = batches[-1][0].sequences
        assert not any(batch.moves for batch, _, _ in batches)
        for position in range(last.context_len + len(last.token_ids)):
            physical_id = last.block_tables[0][position // BLOCK]
            if physical_id >= resident:
                written[physical_id - resident, position % BLOCK] = True
        touched = host != sentinel
    assert bool(layerwise_memory) == (way == "layer-major")
    assert written.any() and not written.all()
    assert torch.equal(touched.any(dim=(1, 2, 3, 5)), written)
    assert torch.equal(touched.all(dim=(1, 2, 3, 5)), written)


def test_blocks_move_to_freed_device_places_and_the_answer_stays(model_dir: Path) -> None:
    """While others run, a long sequence streams; when they leave, its blocks move in and it streams no more."""
    long_prompt = random_prompt(4 * BLOCK, VOCAB, 3)
    short_prompts = [random_prompt(BLOCK, VOCAB, s) for s in range(4)]
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 12, 30)) as llm:
        expected = token_ids(llm, long_prompt, greedy(40))
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 12, 30, enable_prefix_caching=False)) as llm:
        batches = recorded_batches(llm)
        outputs = llm.generate([*short_prompts, long_prompt], [greedy(4)] * 4 + [greedy(40)], use_tqdm=False)
    assert outputs[-1].outputs[0].token_ids == expected[0]
    promoted = sum(len(batch.moves) for batch, _, _ in batches)
    assert promoted > 0
    loaded = [sum(result.h2d_bytes) for _, result, _ in batches]
    assert max(loaded) > 0 and loaded[-1] < max(loaded)


@pytest.mark.parametrize("way", PREFILL_WAYS)
def test_a_failing_copy_ends_the_running_requests_and_not_the_engine(
    model_dir: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.device import cpu
    from nanovllm.errors import EngineError

    prompt = random_prompt(100, VOCAB, 8)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 30, max_num_batched_tokens=40)) as llm:
        set_prefill(llm, way)
        expected = token_ids(llm, prompt, greedy(5))
        llm.engine.scheduler.block_manager.reset_prefix_cache()

        def broken(*_: object, **__: object) -> None:
            raise OSError("the link is down")

        with monkeypatch.context() as patch:
            patch.setattr(cpu, "copy_pitched", broken)
            with pytest.raises(EngineError, match="the link is down"):
                llm.generate(prompt, greedy(5), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.pool.num_used == 0
        assert token_ids(llm, prompt, greedy(5)) == expected
