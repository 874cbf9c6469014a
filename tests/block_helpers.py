"""Short words for what tests of the block manager do again and again. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.request import Request
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.sampling_params import SamplingParams

BLOCK = 4


def request(prompt: list[int], request_id: str = "r", **others: Any) -> Request:
    facts = {"number": 0, "seq_ids": count(), "seed": 0, "arrival_time": 0.0, **others}
    return Request(request_id, prompt, SamplingParams(), **facts)


def sequence(tokens: Sequence[int], salt: bytes = b"") -> TokenSequence:
    return request(list(tokens), cache_salt=salt).sequences[0]


def compute(manager: BlockManager, seq: TokenSequence, upto: int | None = None) -> None:
    """What a step does to the books: tokens up to `upto` are in the cache now."""
    before, seq.num_computed = seq.num_computed, len(seq) if upto is None else upto
    manager.register_computed(seq, before)
    manager.check()


def running(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> TokenSequence:
    """A sequence that is admitted and wholly computed."""
    seq = sequence(tokens, salt)
    assert manager.can_allocate(seq) is AllocStatus.OK
    manager.allocate(seq)
    compute(manager, seq)
    return seq


def cache(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> None:
    """Compute tokens and let go of them."""
    manager.free(running(manager, tokens, salt))
    manager.check()


def found(manager: BlockManager, tokens: Sequence[int], salt: bytes = b"") -> int:
    """How many blocks of a prompt are in the prefix cache, were one token to follow."""
    return len(manager.find_prefix(sequence([*tokens, 0], salt)))


def tiers(manager: BlockManager, seq: TokenSequence) -> str:
    """D or H for each of its blocks."""
    return "".join(manager.tiers.tier_of(block_id).value[0].upper() for block_id in seq.block_table)


def new_tokens(source: Iterator[int], blocks: int) -> list[int]:
    return list(islice(source, blocks * BLOCK))
