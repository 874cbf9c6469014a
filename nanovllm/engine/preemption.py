"""How a running request gives its blocks up, and what that costs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nanovllm.config import PreemptionMode
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PreemptionStats:
    """Since the engine was made. A shared token counts once."""

    recomputed: int = 0  # preemptions
    swapped: int = 0
    tokens_lost: int = 0  # computed tokens that were given up; some are found in the prefix cache again
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0

    @property
    def total(self) -> int:
        return self.recomputed + self.swapped


class Preemption:
    """Recompute or swap: several sequences have more to lose than their prompt, and are swapped."""

    def __init__(self, manager: BlockManager, mode: PreemptionMode | None) -> None:
        self.stats = PreemptionStats()
        self._manager = manager
        self._mode = mode

    def preempt(self, request: Request) -> None:
        """Take the request's blocks. Its status says what became of it: WAITING or SWAPPED."""
        mode = self._mode or ("swap" if len(request.computing) > 1 else "recompute")
        if mode == "recompute" or not self._swap_out(request):
            self._recompute(request)
        request.metrics.preemptions += 1

    def resume(self, request: Request) -> None:
        """Bring a swapped request's blocks back; the caller has checked that there is room."""
        self.stats.blocks_swapped_in += len(self._manager.swap_in(request.live))
        request.status = RequestStatus.RUNNING

    def _swap_out(self, request: Request) -> bool:
        moved = self._manager.swap_out(request.live)
        if moved is None:
            logger.warning("the swap space has no room for request %r: it is recomputed", request.request_id)
            return False
        self.stats.swapped += 1
        self.stats.blocks_swapped_out += len(moved)
        request.metrics.swaps += 1
        request.status = RequestStatus.SWAPPED
        logger.warning(
            "preempted request %r: its %d KV blocks are swapped out, 0 computed tokens are lost (preemption %d)",
            request.request_id,
            len(moved),
            self.stats.total,
        )
        return True

    def _recompute(self, request: Request) -> None:
        """The request begins again with its prompt, and computes anew what it has generated."""
        lost = _computed_tokens(request)
        blocks = len({block_id for seq in request.live for block_id in seq.block_table})
        for seq in request.live:
            self._manager.free(seq)
        request.rewind()
        request.status = RequestStatus.WAITING
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


def _computed_tokens(request: Request) -> int:
    """Tokens in the cache, the prompt of several sequences once."""
    first, *others = request.live
    return first.num_computed + sum(max(0, seq.num_computed - seq.prompt_len) for seq in others)
