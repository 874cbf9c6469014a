"""Helpers of the block manager's tests. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from nanovllm.data.batch import Tier
from nanovllm.data.kv_groups import KVGroups, kv_groups
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.block_pool import KVBlockState
from nanovllm.engine.request import Request
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.features.recurrent.states import RecurrentStates
from nanovllm.sampling_params import SamplingParams

BLOCK = 4


def check_blocks(manager: BlockManager) -> None:
    """The bookkeeping of blocks and of the prefix cache is consistent."""
    cache = manager.prefix_cache
    size = manager.prefix_cache.hash_block_size
    assert manager.pool.num_free + manager.pool.num_cached + manager.pool.num_used == manager.pool.num_blocks
    states = manager.pool.block_states()
    counts = [states[: manager.pool.num_blocks].count(state) for state in list(KVBlockState)[:3]]
    assert counts == [manager.pool.num_free, manager.pool.num_cached, manager.pool.num_used]
    assert states[manager.pool.num_blocks :].count(KVBlockState.USED) == manager.pool.num_swapped
    assert manager.pool.tiers.physical_ids.keys() == manager.pool.blocks.keys()
    for tier, evictor in manager.pool._evictors.items():
        for block_id in evictor:
            block = manager.pool.blocks[block_id]
            assert block.ref_count == 0 and block.hashes
            assert manager.pool.tiers.tier_of(block_id) is tier
    for block_id, block in manager.pool.blocks.items():
        assert manager.pool.tiers.tier_of(block_id) is not Tier.SWAP or (block.ref_count > 0 and not block.hashes)
        assert block.num_cached_tokens % size == 0 and len(block.hashes) <= block.num_cached_tokens // size
    for group, by_hash in enumerate(cache._by_hash):
        blocks = [block for block in manager.pool.blocks.values() if block.group == group]
        assert {block_hash: block for block in blocks for block_hash in block.hashes} == by_hash


def one_group(block_size: int, num_layers: int = 1) -> KVGroups:
    """The groups of a model whose layers all keep every token."""
    return kv_groups((None,) * num_layers, block_size)


def states_of(manager: BlockManager) -> RecurrentStates | None:
    """The states of a model with recurrent layers; None for other models."""
    return next((hook for hook in manager.hooks if isinstance(hook, RecurrentStates)), None)


def check_states(manager: BlockManager, live: Iterable[TokenSequence]) -> None:
    """Every state slot is free, or holds a state that is held by these sequences or the prefix cache."""
    states = states_of(manager)
    if states is None:
        return
    slots = states.slots
    held_by = [states.of(seq) for seq in live]
    holders = Counter(own.state for own in held_by if own.state is not None)
    holders.update(state for own in held_by for state in own.begun.values())
    held = {*holders, *slots.snapshots.values()}
    for state in held:
        assert state.num_sequences == holders[state]
    assert {state.content_hash: state for state in held if state.content_hash is not None} == slots.snapshots
    check_usable(manager, {content_hash for state in slots.snapshots.values() for content_hash in state.hashes})
    used = [state.slot for state in held]
    assert len(set(used)) == len(used)
    on_device = sum(slot < slots.num_device_slots for slot in used)
    assert on_device == slots.num_device_slots - slots._device.num_free
    assert len(used) - on_device == slots.num_host_slots - slots._host.num_free


def check_usable(manager: BlockManager, before_snapshots: set[bytes]) -> None:
    """Blocks before a snapshot are usable; of groups without a window those are spare that are not."""
    states = states_of(manager)
    assert states is not None and set(states.slots.prefixes._uses) == before_snapshots
    for block in manager.pool.blocks.values():
        assert block.is_usable or before_snapshots.isdisjoint(block.hashes)
    for evictor in manager.pool._evictors.values():
        for block in map(manager.pool.blocks.__getitem__, evictor):
            assert evictor[block.block_id][0] is block.is_usable or manager.groups[block.group].window is not None


def request(prompt: list[int], request_id: str = "r", params: SamplingParams | None = None, **others: Any) -> Request:
    facts = {"number": 0, "seq_ids": count(), "seed": 0, "arrival_time": 0.0, **others}
    return Request(request_id, prompt, params or SamplingParams(), **facts)


def sequence(tokens: Sequence[int], salt: bytes = b"") -> TokenSequence:
    return request(list(tokens), cache_salt=salt).sequences[0]


def compute(manager: BlockManager, seq: TokenSequence, upto: int | None = None) -> None:
    """Mark tokens up to `upto` as computed, as a step does."""
    before = seq.num_computed
    seq.num_computed = len(seq) if upto is None else upto
    manager.register_computed(seq, before)
    check_blocks(manager)


def running(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> TokenSequence:
    """A sequence that is admitted and completely computed."""
    seq = sequence(tokens, salt)
    assert manager.can_allocate(seq) is AllocStatus.OK
    manager.allocate(seq)
    compute(manager, seq)
    return seq


def cache(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> None:
    """Compute tokens and free their blocks."""
    manager.free(running(manager, tokens, salt))
    check_blocks(manager)


def found(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> int:
    """How many blocks the prefix cache finds for these tokens and one more."""
    return len(manager.prefix_cache.find(sequence([*tokens, 0], salt)).tables[0])


def tiers(manager: BlockManager, seq: TokenSequence) -> str:
    """D or H for each of its blocks."""
    return "".join(manager.pool.tiers.tier_of(block_id).value[0].upper() for block_id in seq.block_tables[0])


def new_tokens(source: Iterator[int], blocks: int, extra: int = 0) -> list[int]:
    return list(islice(source, blocks * BLOCK + extra))
