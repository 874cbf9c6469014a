"""The plan of one layer: every block is read once, every sequence reads its blocks in order, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from nanovllm.features.cpu_attention.host_blocks import cpu_attention_candidates
from nanovllm.kvcache.step_plan import (
    BlockGroup,
    group_block_reads,
    plan_block_reads,
)
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
