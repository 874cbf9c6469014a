"""Preemption: a running request loses its blocks and is recomputed later."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, RequestStatus
from nanovllm.engine.scheduling_budget import SchedulingBudget

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PreemptionStats:
    """Totals since the engine was created; shared tokens and blocks count once."""

    recomputed: int = 0  # preemptions by recompute
    swapped: int = 0  # preemptions by swap
    tokens_lost: int = 0  # computed tokens whose blocks were freed; the prefix cache may still hold some of them
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0

    @property
    def total(self) -> int:
        return self.recomputed + self.swapped


class Preemption:
    """Preempts requests: their blocks are freed, and they are recomputed as far as they leave the prefix cache.

    `features.sequence_groups` extends this class by swapping.
    """

    def __init__(self, manager: BlockManager) -> None:
        self.stats = PreemptionStats()
        self.manager = manager

    def preempt(self, request: Request) -> None:
        """Free the request's blocks. Its status becomes WAITING, or SWAPPED if its blocks were swapped out."""
        self.recompute(request)
        request.metrics.preemptions += 1

    def resume(self, swapped: Seq[Request], budget: SchedulingBudget) -> Request | None:
        """Swap in the first of the `swapped` requests, if it can run in this step."""
        return None

    def recompute(self, request: Request) -> None:
        """Free all blocks. The request will compute its prompt and its generated tokens again."""
        lost = _computed_tokens(request)
        blocks = len({block_id for seq in request.live for block_id in seq.block_table})
        self.restart(request)
        self.stats.recomputed += 1
        self.stats.tokens_lost += lost
        logger.warning(
            "preempted request %r to free %d KV blocks: %d computed tokens are recomputed as far as they leave the "
            "prefix cache (preemption %d)",
            request.request_id,
            blocks,
            lost,
            self.stats.total,
        )

    def restart(self, request: Request) -> None:
        """Free all blocks, and let the request wait to be computed from its first token."""
        for seq in request.live:
            self.manager.free(seq)
        request.rewind()
        request.status = RequestStatus.WAITING


def _computed_tokens(request: Request) -> int:
    """Tokens of the request in the KV cache; a shared prompt counts once."""
    first, *others = request.live
    return first.num_computed + sum(max(0, seq.num_computed - seq.prompt_len) for seq in others)
