"""Prefixes that end within a block, in engines: recall, bits, bytes. The ordering check is around every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_attention_helpers import force_share
from engines import (
    PREFILL_WAYS,
    greedy,
    offloaded,
    random_prompt,
    recorded_batches,
    set_prefill,
)
from fast import fast_pairs
from ordering_check import OrderingCheck

from nanovllm import LLM
from nanovllm.apps.recall import expected_answer, make_document, make_prompt, write_recall_checkpoint
from nanovllm.data.batch import BlockMove, Tier
from nanovllm.device.cpu import CpuDevice
from nanovllm.engine import prefix_cache
from nanovllm.engine.block_manager import BlockManager
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit, TransferCount
from nanovllm.memory.layout import KVLayout

BLOCK = 48
HASH = 16
ANSWER = 3
VOCAB = 400
EDGES = sorted({edge + d for edge in (HASH, 2 * HASH, BLOCK, BLOCK + HASH, 2 * BLOCK) for d in (-1, 0, 1)})


@pytest.fixture
def small_hash_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "hash_block_size_of", lambda _: HASH)


@pytest.fixture(scope="module")
def recall_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recall")
    write_recall_checkpoint(path, VOCAB, 8192, seed=1)
    return path


def manager_of(llm: LLM) -> BlockManager:
    return llm.engine.scheduler.block_manager


# ---- every length, on both tiers


@pytest.mark.usefixtures("small_hash_blocks")
@pytest.mark.parametrize(("num_gpu_blocks", "way"), fast_pairs([(4, PREFILL_WAYS[0])], (2, 4, 40), PREFILL_WAYS))
def test_documents_that_share_a_start(recall_dir: Path, num_gpu_blocks: int, way: str) -> None:
    """Each document starts as the first one and goes on with other words. Every edge of the copied part is asked for,
    while the first document is computed by a request that still runs, and when it is only cached."""
    first = make_document(VOCAB, 2 * BLOCK + 5, seed=2)
    others = make_document(VOCAB, VOCAB - 2, seed=3)
    others = [word for word in others if word not in first]
    arguments = offloaded(BLOCK, num_gpu_blocks, 60, max_model_len=400, max_num_batched_tokens=40)
    with LLM(recall_dir, **arguments) as llm:
        set_prefill(llm, way)
        if num_gpu_blocks == 2:
            assert manager_of(llm).pool.tiers.pools[Tier.DEVICE].num_free == 0
        stream = llm.stream([make_prompt(first, 1)], greedy(30))
        next(stream)
        for state in ("running", "cached"):
            for number, shared in enumerate(EDGES):
                begin = (number + len(EDGES) * (state == "cached")) * 7
                document = [*first[:shared], *others[begin : begin + 7]]
                asked = [position for position in (1, shared - 1, shared + 2) if position > 0]
                outputs = llm.generate([make_prompt(document, p) for p in asked], greedy(ANSWER), use_tqdm=False)
                answers = [output.outputs[0].token_ids for output in outputs]
                assert answers == [expected_answer(document, position, ANSWER) for position in asked]
                cached = [output.num_cached_tokens for output in outputs]  # the later ones may find the first one's too
                assert cached[0] == shared // HASH * HASH <= min(cached), shared
            stream.close()
        assert manager_of(llm).stats.copied_blocks > len(EDGES) and manager_of(llm).pool.num_used == 0


# ---- bytes


@pytest.fixture
def device() -> Iterator[OrderingCheck]:
    device = OrderingCheck(CpuDevice())
    yield device
    device.close()


LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, itemsize=4)
# Two blocks on each tier: resident, host, swap.
ENDS = {"device": (0, 1), "host": (2, 3), "swap": (4, 5)}


@pytest.mark.parametrize("num_tokens", [1, 7, 15])
@pytest.mark.parametrize("to", ENDS)
@pytest.mark.parametrize("source", ENDS)
def test_a_copied_part_is_copied_and_nothing_else(device: OrderingCheck, source: str, to: str, num_tokens: int) -> None:
    split = DeviceSplit(ring_slots=4, resident_blocks=2)
    engine = OffloadEngine(device, LAYOUT, torch.float32, split, num_host_blocks=2, num_swap_blocks=2)
    blocks = [*engine.resident.unbind(1), *engine.host, *engine.swap]  # [layers, 2, kv_heads, block_size, head_dim]
    for block in blocks:
        block.normal_()
    before = [block.clone() for block in blocks]
    src = ENDS[source][0]
    dst = ENDS[to][1]
    engine.move_blocks([BlockMove(src, dst, keeps_source=True, num_tokens=num_tokens)])
    engine.synchronize()
    before[dst][:, :, :, :num_tokens] = before[src][:, :, :, :num_tokens]
    assert all(torch.equal(block, expected) for block, expected in zip(blocks, before, strict=True))
    moved: dict[str, Any] = {}
    if (source == "device") != (to == "device"):
        kind = "d2h" if source == "device" else "h2d"
        moved = {f"{kind}_copies": 1, f"{kind}_bytes": num_tokens * LAYOUT.token_bytes}
    assert engine.transfers == TransferCount(**moved)


@pytest.mark.usefixtures("small_hash_blocks")
@pytest.mark.parametrize("share", [None, 0.5, 1.0], ids=["copied", "half on the CPU", "all on the CPU"])
@pytest.mark.parametrize("way", PREFILL_WAYS)
def test_hits_within_blocks_on_both_tiers_move_what_the_formula_says(
    recall_dir: Path, way: str, share: float | None
) -> None:
    """A host block's stored tokens are loaded, or attended to by the CPU, and its new ones are stored; a copied part
    crosses the link if its tiers differ. A prefill that goes layer by layer loads what was cached before it, once."""
    document = make_document(VOCAB, 4 * BLOCK + HASH + 3, seed=2)
    arguments = offloaded(BLOCK, 4, 30, max_model_len=400, max_num_batched_tokens=40, cpu_attention=share is not None)
    with LLM(recall_dir, **arguments) as llm:
        set_prefill(llm, way)
        if share is not None:
            force_share(llm, share)
        batches = recorded_batches(llm)
        resident = llm.kv_stats().resident_blocks
        token_bytes = llm._runner.sizing.layout.token_bytes
        block_size = BLOCK
        for number, shared in enumerate((HASH + 1, BLOCK - 1, BLOCK + HASH, 3 * BLOCK + 2 * HASH, len(document))):
            for start in (document, document[:shared]):
                batches.clear()
                prompt = [*start, *random_prompt(70, VOCAB, number)]
                (output,) = llm.generate(prompt, greedy(3), use_tqdm=False)
                expected = Counter[str]()
                found = Counter[str]()
                for batch, _, moved in batches:
                    (seq,) = batch.sequences
                    for move in batch.moves:
                        kind = f"{'h' if move.src >= resident else 'd'}2{'h' if move.dst >= resident else 'd'}"
                        expected[kind] += (move.num_tokens or block_size) * token_bytes
                    part = seq.layerwise
                    for index, physical_id in enumerate(seq.block_tables[0]):
                        if physical_id < resident or (part is not None and part.first_layer_chunk > 0):
                            continue
                        stored = min(max(seq.context_len - index * block_size, 0), block_size)
                        held = min(seq.context_len + len(seq.token_ids) - index * block_size, block_size)
                        expected["h2d"] += stored * token_bytes
                        expected["d2h"] += (held - stored) * token_bytes
                    found["h2d"] += moved.h2d_bytes + moved.cpu_attention_bytes
                    found["d2h"] += moved.d2h_bytes
                assert found["h2d"] == expected["h2d"] and found["d2h"] == expected["d2h"], (shared, output)
                assert output.num_cached_tokens > 0 or number == 0
        assert manager_of(llm).stats.copied_blocks >= 5
        assert (llm.kv_stats().transfers.cpu_attention_bytes > 0) == (share is not None)
