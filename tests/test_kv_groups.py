"""KV groups without a model: which layers form one, what a sequence holds of each, and what the prefix cache finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from block_helpers import BLOCK, check_blocks, compute, new_tokens, sequence
from checkpoints import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import engine_config
from nanovllm.data.batch import Tier
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE, KVGroup, kv_groups
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.memory.layout import KVLayout, layout_of
from nanovllm.models.hf_config import load_network_config

WINDOWS = st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=40).map(tuple)


# ---- layers and groups

GEMMA4 = {  # KV heads and their sizes in layers with a window and in the others
    **{"E2B": ((1, 256), (1, 512)), "E4B": ((2, 256), (2, 512)), "12B": ((8, 256), (1, 512))},
    **{"26B-A4B": ((8, 256), (2, 512)), "31B": ((16, 256), (4, 512)), "odd": ((3, 80), (7, 48))},
}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_hash_blocks_are_long_enough(kv_cache_dtype: str) -> None:
    """Whatever the sizes of heads and blocks: at least 64 tokens, or a whole block. Little memory is left unused."""
    models = {name: ((small,) * 5 + (large,)) for name, (small, large) in GEMMA4.items()}
    for name, heads in {**models, "alike": ((8, 128),) * 6}.items():
        layout = KVLayout.of("auto", 6, *heads[0], 1, 2).with_heads(heads).stored_as(kv_cache_dtype)
        for tokens in (16, 48, 64, 100, 256, 257, 512, 520, 1000, 4093, 4096):
            found = layout.with_block_size(tokens)
            sizes = [group.block_size for group in found.groups]
            cache = PrefixCache(found.groups, enabled=True)
            assert min(sizes) == tokens and cache.hash_block_size >= min(64, tokens), (name, sizes)
            assert all(size % cache.hash_block_size == 0 for size in sizes)
            used = [of_group.block_layer_bytes for of_group in found.of_groups]
            assert max(used) == found.block_layer_bytes
            assert min(used) > 0.9 * found.block_layer_bytes or name == "odd" or tokens < 256, (name, tokens, used)


@pytest.mark.parametrize("family", FAMILIES)
def test_hash_blocks_of_every_family(family: str, tmp_path: Path) -> None:
    """With the sizes that Transformers takes where a config names none, and in 8 bits."""
    tested = FAMILIES[family]
    size = {"head_dim": 128} if family == "glm4_moe" else {}  # of which Transformers names none
    tested.config(architectures=[tested.model.__name__], **size).save_pretrained(tmp_path)
    network = load_network_config(tmp_path).network
    for kv_cache_dtype in ("auto", "int8"):
        for block_size in (None, 16, 257, 520):
            config = engine_config(tmp_path, {"kv_cache_dtype": kv_cache_dtype, "kvcache_block_size": block_size})
            groups = layout_of(config, network).groups
            cache = PrefixCache(groups, enabled=True)
            assert cache.hash_block_size >= min(64, groups.block_size)


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
    seq = sequence(tokens)
    chunk = manager.capacity.chunk or len(tokens)
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
    evictor = manager.pool._evictors[Tier.DEVICE]
    assert len(evictor) == 6 and all(manager.pool.blocks[each].group == 1 for each in evictor)
    # Of the 4 blocks that are asked for, the first, then the second is lost, ...: 2 * BLOCK tokens of window need 2.
    for expected in (4, 4, 4, 0, 0, 0):
        assert manager.prefix_cache.find(sequence([*document[: 4 * BLOCK], 0])).num_tokens == expected * BLOCK
        manager.pool._evict(evictor.oldest()[1])
        check_blocks(manager)
    whole = sequence([*document, 0])
    assert manager.prefix_cache.find(whole).num_tokens == 8 * BLOCK, "the last window is in use"
    manager.free(seq)
    check_blocks(manager)


def test_blocks_that_are_computed_again_count_as_used_now(fresh: Iterator[int]) -> None:
    """Where a window is lost, a prompt computes again what other groups have cached; their old blocks stay for it."""
    manager = BlockManager(100, 0, kv_groups((2 * BLOCK, None), BLOCK), chunk=BLOCK)
    evictor = manager.pool._evictors[Tier.DEVICE]
    document = new_tokens(fresh, 15, extra=1)
    manager.free(asked(manager, document))
    while evictor.oldest()[0][0] is False:
        manager.pool._evict(evictor.oldest()[1])
    other = new_tokens(fresh, 15)
    manager.free(asked(manager, other))
    branch = [*document[: 8 * BLOCK], *new_tokens(fresh, 4)]
    seq = sequence(branch)
    assert manager.prefix_cache.find(seq).num_tokens == 0
    manager.free(asked(manager, branch))
    while manager.num_cached_tokens(sequence([*other, 0])):
        manager.pool._evict(evictor.oldest()[1])
    assert manager.num_cached_tokens(sequence([*branch, 0])) == 12 * BLOCK


@pytest.mark.parametrize("prompt_len", [8 * BLOCK + 2, 7 * BLOCK])
def test_what_is_cached_of_a_window_that_is_computed_again_is_kept(fresh: Iterator[int], prompt_len: int) -> None:
    """Of the two blocks before the place where prompts part, or an answer ends, the cache has the second one, spare."""
    manager = BlockManager(100, 0, kv_groups((2 * BLOCK, None), BLOCK), chunk=BLOCK)
    evictor = manager.pool._evictors[Tier.DEVICE]
    document = new_tokens(fresh, 15, extra=1)
    manager.free(asked(manager, document))
    for _ in range(7):
        manager.pool._evict(evictor.oldest()[1])
    shared = document[: 8 * BLOCK]
    assert manager.num_cached_tokens(sequence([*shared, 0])) == 0
    ended = [*shared, *new_tokens(fresh, 0, extra=2)]
    seq = asked(manager, ended[:prompt_len])
    for token in ended[prompt_len:]:
        seq.token_ids.append(token)
        manager.grow([seq])
        compute(manager, seq)
        manager.release_hidden(seq)
    manager.free(seq)
    while evictor.oldest()[0][0] is False:
        manager.pool._evict(evictor.oldest()[1])
    assert manager.num_cached_tokens(sequence([*shared, 0])) == 8 * BLOCK
