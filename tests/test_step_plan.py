"""The plan of one layer: every block is read once, every sequence reads its blocks in order, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import EngineError
from nanovllm.features.cpu_attention.host_blocks import cpu_attention_candidates, leading_short
from nanovllm.kvcache.offload_engine import BlockTokens, OffloadEngine
from nanovllm.kvcache.step_plan import (
    BlockGroup,
    CpuAttentionGroup,
    ResidentGroup,
    RingGroup,
    group_block_reads,
    plan_block_reads,
)
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.layout import KVLayout
from nanovllm.ops.attention import SequenceMetadata

BLOCK, RESIDENT, GROUP = 4, 10, 3


def decodes(*tables: list[int], tokens: int = 1) -> list[SequenceMetadata]:
    """Sequences whose last block is half full with `tokens` new ones."""
    return [
        SequenceMetadata.full(index * tokens, tokens, len(table) * BLOCK - 2 - tokens, table)
        for index, table in enumerate(tables)
    ]


def parts_of(item: BlockGroup) -> list[tuple[int, int, list[int]]]:
    """(first query row, first position, blocks) of each sequence in the group."""
    return [(s.query_start, s.first_position, list(s.block_table)) for s in item.table.sequences]


def parts_of_sequence(items: Sequence[BlockGroup], seq: SequenceMetadata) -> list[tuple[int, int]]:
    """(index of the first block, number of blocks) of a sequence in each group."""
    parts = [s for item in items for s in item.table.sequences if s.query_start == seq.query_start]
    return [(s.first_position // BLOCK, len(s.block_table)) for s in parts]


def test_a_sequence_is_three_calls() -> None:
    (seq,) = sequences = decodes([0, 1, 12, 13, 14])
    reads = plan_block_reads(sequences, BLOCK, None)
    plan = group_block_reads(reads, sequences, BLOCK, RESIDENT, GROUP, cpu_attention={2, 3})
    assert [type(item) for item in plan.items] == [ResidentGroup, CpuAttentionGroup, RingGroup]
    assert [parts_of(item) for item in plan.items] == [[(0, 0, [0, 1])], [(0, 8, [2, 3])], [(0, 16, [0])]]
    assert plan.items[1].table.sequences[0].kv_end == 16 < seq.total_len
    assert (plan.concurrent, plan.concurrent_rows) == ([], 0)


def test_sequences_share_calls_whatever_tiers_they_are_on() -> None:
    sequences = decodes([0, 11, 12, 19], [1, 2, 3, 18], [13, 14, 4, 17])
    reads = plan_block_reads(sequences, BLOCK, None)
    cpu_attention = cpu_attention_candidates(reads, RESIDENT, len(sequences))
    plan = group_block_reads(reads, sequences, BLOCK, RESIDENT, GROUP, cpu_attention)
    kinds = [type(item) for item in plan.items]
    # The third sequence begins on the host, so its resident block comes after CPU attention; the others' do not.
    assert kinds == [ResidentGroup, CpuAttentionGroup, ResidentGroup, RingGroup]
    assert parts_of(plan.items[0]) == [(0, 0, [0]), (1, 0, [1, 2, 3])]
    assert parts_of(plan.items[1]) == [(2, 0, [3, 4]), (0, 4, [1, 2])]
    assert parts_of(plan.items[2]) == [(2, 8, [4])]
    assert parts_of(plan.items[3]) == [(0, 12, [0]), (1, 12, [1]), (2, 12, [2])]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("ring_slots", "slot_bytes", "group_slots"),
    [
        *[(0, MIB, 1), (1, MIB, 1), (3, MIB, 1), (7, 32 * MIB, 1)],
        *[(8, 64 * MIB, 2), (11, 64 * MIB, 2), (16, 16 * MIB, 4)],  # a quarter of the ring
        *[(16, 2 * MIB, 8), (28, 3 * MIB, 7)],  # 16 MiB, and the ring divided evenly
        *[(4, MIB, 2), (11, 1, 5)],  # half of the ring is less
    ],
)
def test_the_ring_holds_groups_of_at_least_16_mib_if_two_of_them_fit(
    ring_slots: int, slot_bytes: int, group_slots: int
) -> None:
    assert DeviceSplit(ring_slots, RESIDENT).group_slots(slot_bytes) == group_slots


def test_host_blocks_are_grouped_by_ring_slots() -> None:
    sequences = decodes([0, 11, 12, 13, 14, 15], [16])
    plan = group_block_reads(plan_block_reads(sequences, BLOCK, None), sequences, BLOCK, RESIDENT, GROUP)
    assert [[read.physical_id for read in group.reads] for group in plan.ring] == [[16, 11, 12], [13, 14, 15]]
    assert [parts_of(group) for group in plan.ring] == [[(1, 0, [0]), (0, 4, [1, 2])], [(0, 12, [0, 1, 2])]]


def test_concurrent_cpu_attention_has_its_own_groups() -> None:
    sequences = decodes([11, 0, 12, 13, 19], [1, 2, 18])
    reads = plan_block_reads(sequences, BLOCK, None)
    cpu_attention = cpu_attention_candidates(reads, RESIDENT, len(sequences))
    plan = group_block_reads(reads, sequences, BLOCK, RESIDENT, GROUP, cpu_attention, concurrent=True)
    assert [parts_of(group) for group in plan.concurrent] == [[(0, 0, [1])], [(0, 8, [2, 3])]]
    assert all(isinstance(item, ResidentGroup | RingGroup) for item in plan.items)
    assert plan.concurrent_rows == 1, "the CPU reads no block of the second sequence"


def test_the_cpu_takes_full_blocks_of_short_sequences() -> None:
    sequences = [*decodes([11, 12, 13], [14, 15]), SequenceMetadata.full(2, 40, 0, [11, *range(20, 30)])]
    reads = plan_block_reads(sequences, BLOCK, None)
    assert leading_short(sequences, max_query_len=8, max_rows=512) == 2
    found = [reads[i].physical_id for i in cpu_attention_candidates(reads, RESIDENT, 2)]
    assert found == [12, 14], "11 is read by the long chunk too; 13 and 15 are being written"
    reads = plan_block_reads(decodes([11, 12, 13, 19], [11, 12, 14, 18], [11, 15, 16, 17]), BLOCK, None)
    found = [reads[i].physical_id for i in cpu_attention_candidates(reads, RESIDENT, 3)]
    assert found == [16, 14, 13, 15, 12, 11], "blocks with few readers first, and of these the last"


def test_short_sequences_at_the_start_of_the_batch() -> None:
    starts = zip((0, 1, 2, 5, 7, 16), (1, 1, 3, 2, 9, 1), strict=True)
    sequences = [SequenceMetadata.full(start, length, 5, [0, 1, 2, 3]) for start, length in starts]
    for most_tokens, most_rows, number in ((1, 512, 2), (3, 512, 4), (3, 6, 3), (1, 1, 1)):
        assert leading_short(sequences, most_tokens, most_rows) == number


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
