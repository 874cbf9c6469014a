"""The plan of one layer: every block is read once, every sequence reads its blocks in order, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import EngineError
from nanovllm.features.cpu_attention.host_blocks import cpu_attention_candidates
from nanovllm.kvcache.offload_engine import BlockTokens, OffloadEngine
from nanovllm.kvcache.step_plan import (
    BlockGroup,
    group_block_reads,
    plan_block_reads,
)
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops.attention import SequenceMetadata

BLOCK, RESIDENT, GROUP = 4, 10, 3


def decodes(*tables: list[int]) -> list[SequenceMetadata]:
    """Sequences whose last block is half full with one new token."""
    return [SequenceMetadata.full(index, 1, len(table) * BLOCK - 3, table) for index, table in enumerate(tables)]


def parts_of_sequence(items: Sequence[BlockGroup], seq: SequenceMetadata) -> list[tuple[int, int]]:
    """(index of the first block, number of blocks) of a sequence in each group."""
    parts = [s for item in items for s in item.table.sequences if s.query_start == seq.query_start]
    return [(s.first_position // BLOCK, len(s.block_table)) for s in parts]


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_every_block_is_read_once_and_in_order(concurrent: bool, window: int | None) -> None:
    for seed in range(200):
        random = Random(seed)
        physical_ids = list(range(40))
        random.shuffle(physical_ids)
        common = [physical_ids.pop() for _ in range(random.randrange(3))]
        tables = [
            common + [physical_ids.pop() for _ in range(random.randrange(1, 6))] for _ in range(random.randrange(1, 6))
        ]
        sequences = decodes(*tables)
        reads = plan_block_reads(sequences, BLOCK, window)
        candidates = cpu_attention_candidates(reads, RESIDENT, len(sequences))
        cpu_attention = set(random.sample(candidates, random.randint(0, len(candidates))))
        plan = group_block_reads(reads, sequences, BLOCK, RESIDENT, GROUP, cpu_attention, concurrent)
        items = [*plan.items, *plan.concurrent]
        done = [read for item in items for read in item.reads]
        assert all(len(item.reads) <= GROUP for item in plan.ring)
        assert sorted(map(id, done)) == sorted(map(id, reads))
        for reader, seq in enumerate(sequences):
            in_order = parts_of_sequence(plan.items, seq)
            assert in_order == sorted(in_order)
            covered = [p for first, count in parts_of_sequence(items, seq) for p in range(first, first + count)]
            assert sorted(covered) == [v.first_position // BLOCK for v in reads if reader in v.readers]


def test_a_group_attended_out_of_turn_is_refused() -> None:
    device = CpuDevice()
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=BLOCK, itemsize=4)
    engine = OffloadEngine(device, layout, torch.float32, DeviceSplit(4, 0), num_host_blocks=6)
    engine.begin([(layer, [BlockTokens(block, BLOCK, 0) for block in (4, 5)]) for layer in range(2)])
    with pytest.raises(EngineError, match=r"layer 1 of block 4, but announced layer 0 of block 4 next"):
        engine.acquire(1, 4)
    for layer in range(2):
        assert engine.acquire(layer, 4).shape == (2, 2, 1, BLOCK, 16)
        engine.release()
    with pytest.raises(EngineError, match="but announced no further group next"):
        engine.acquire(1, 4)
    device.close()
