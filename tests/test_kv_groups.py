"""KV groups without a model: which layers form one, what a sequence holds of each, and what the prefix cache finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from block_helpers import BLOCK, check_blocks, compute, new_tokens, sequence
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.data.batch import Tier
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE, KVGroup, kv_groups
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.request import Sequence as TokenSequence

WINDOWS = st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=40).map(tuple)


# ---- layers and groups


@given(
    windows=WINDOWS,
    size=st.integers(1, 9),
    chunk=st.integers(1, 20),
    tokens=st.integers(0, 150),
    blocks=st.integers(0, 90),
)
def test_what_a_sequence_holds_at_most(
    windows: tuple[int | None, ...], size: int, chunk: int, tokens: int, blocks: int
) -> None:
    groups = kv_groups(windows, size)

    def held(group: KVGroup, begin: int) -> int:
        return group.num_blocks(min(tokens, begin + chunk)) - group.first_visible(begin)

    for group in groups:
        most = max((held(group, begin) for begin in range(max(tokens, 1))), default=0)
        assert most <= group.most_blocks(tokens, chunk) <= most + 1
    longest = groups.longest_sequence(blocks, chunk)
    assert groups.most_blocks(longest, chunk) <= blocks
    assert longest == ANY_LENGTH or groups.most_blocks(longest + 1, chunk) > blocks


# ---- prefixes


def asked(manager: BlockManager, tokens: Sequence[int]) -> TokenSequence:
    """A sequence that is admitted, computed chunk by chunk and freed; `cached`: what it found in the cache."""
    seq, chunk = sequence(tokens), manager.capacity.chunk or len(tokens)
    assert manager.can_allocate(seq) is AllocStatus.OK
    manager.allocate(seq)
    while seq.num_computed < len(seq):
        compute(manager, seq, min(len(seq), seq.num_computed + chunk))
        manager.release_hidden(seq)
        manager.grow([seq])
    return seq


@pytest.mark.parametrize("window", [1, 3, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_hit_ends_where_every_group_has_what_it_needs(window: int, fresh: Iterator[int]) -> None:
    manager = BlockManager(100, 0, kv_groups((window, None), BLOCK), chunk=2 * BLOCK, hash_block_size=1)
    document = new_tokens(fresh, 8)
    manager.free(asked(manager, document))
    for shared in (1, BLOCK, BLOCK + 1, 5 * BLOCK + 2, len(document)):
        waiting = sequence([*document[:shared], *new_tokens(fresh, 1)])
        hit = manager.prefix_cache.find(waiting)
        assert hit.num_tokens == shared, "released blocks stay cached"
        manager.allocate(waiting)
        table = waiting.block_tables[1]
        first = max(0, shared - window + 1) // BLOCK
        assert table[:first] == [HOLE] * first and HOLE not in table[first:]
        manager.free(waiting)
    check_blocks(manager)


def test_a_hit_without_the_window_ends_before_it(fresh: Iterator[int]) -> None:
    """The window's blocks are evicted one by one, those that were released first before the others."""
    manager = BlockManager(40, 0, kv_groups((2 * BLOCK, None), BLOCK), chunk=BLOCK, hash_block_size=BLOCK)
    document = new_tokens(fresh, 8)
    seq = asked(manager, document)
    evictor = manager._evictors[Tier.DEVICE]
    assert len(evictor) == 6 and all(manager._blocks[each].group == 1 for each in evictor)
    # Of the 4 blocks that are asked for, the first, then the second is lost, ...: 2 * BLOCK tokens of window need 2.
    for expected in (4, 4, 4, 0, 0, 0):
        assert manager.prefix_cache.find(sequence([*document[: 4 * BLOCK], 0])).num_tokens == expected * BLOCK
        manager._evict(evictor.oldest()[1])
        check_blocks(manager)
    whole = sequence([*document, 0])
    assert manager.prefix_cache.find(whole).num_tokens == 8 * BLOCK, "the last window is in use"
    manager.free(seq)
    check_blocks(manager)
