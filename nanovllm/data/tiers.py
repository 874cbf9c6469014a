"""The tiers of KV memory, and the copies of blocks between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """The kinds of KV memory. SWAP holds the blocks of preempted requests until they run again."""

    DEVICE = "device"
    HOST = "host"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A copy of all layers of a block between two physical block ids. Moves of a step are carried out in order.

    `keeps_source`: the block at `src` stays in use, as in copy-on-write. It changes bookkeeping only, not the copy.
    `num_tokens`: copy only the first tokens of the block; None copies it whole.
    """

    src: int
    dst: int
    keeps_source: bool = False
    num_tokens: int | None = None
