"""Helpers of the block manager's tests. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.sampling_params import SamplingParams

BLOCK = 4


def request(prompt: list[int], request_id: str = "r", params: SamplingParams | None = None, **others: Any) -> Request:
    facts = {"number": 0, "seq_ids": count(), "seed": 0, "arrival_time": 0.0, **others}
    return Request(request_id, prompt, params or SamplingParams(), **facts)


def sequence(tokens: Sequence[int], salt: bytes = b"") -> TokenSequence:
    return request(list(tokens), cache_salt=salt).sequences[0]


def compute(manager: BlockManager, seq: TokenSequence, upto: int | None = None) -> None:
    """Mark tokens up to `upto` as computed, as a step does."""
    before, seq.num_computed = seq.num_computed, len(seq) if upto is None else upto
    manager.register_computed(seq, before)
    manager.check()


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
    manager.check()


def found(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> int:
    """How many blocks the prefix cache finds for these tokens and one more."""
    return len(manager.prefix_cache.find(sequence([*tokens, 0], salt)))


def tiers(manager: BlockManager, seq: TokenSequence) -> str:
    """D or H for each of its blocks."""
    return "".join(manager.tiers.tier_of(block_id).value[0].upper() for block_id in seq.block_table)


def new_tokens(source: Iterator[int], blocks: int) -> list[int]:
    return list(islice(source, blocks * BLOCK))
