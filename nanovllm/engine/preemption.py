"""Preemption: a running request gives up its blocks, by recomputation or by swapping them to extra host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from nanovllm.config import PreemptionMode
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.metrics import PreemptionStats
from nanovllm.engine.request import Request, RequestStatus
from nanovllm.engine.scheduling_budget import SchedulingBudget

logger = logging.getLogger(__name__)


class Preemption:
    """Preempts requests. By default those with several running sequences are swapped, others are recomputed.

    Recomputing one sequence costs little, as the prefix cache often holds its prompt.
    """

    def __init__(self, manager: BlockManager, mode: PreemptionMode | None = None) -> None:
        """mode: for all requests; None for the default."""
        self.stats = PreemptionStats()
        self.manager = manager
        self._mode = mode
        self._has_swapped_out = False  # in the step that is being scheduled

    def preempt(self, request: Request) -> None:
        """Free or swap out the request's blocks. Its status becomes WAITING or SWAPPED."""
        mode = self._mode or ("swap" if len(request.computing) > 1 else "recompute")
        if mode == "recompute" or not self._swap_out(request):
            self._recompute(request)
        request.metrics.preemptions += 1

    def resume(self, swapped: Seq[Request], budget: SchedulingBudget) -> Request | None:
        """Swap in the first of the `swapped` requests, if it can run in this step."""
        if self._has_swapped_out:  # else the blocks would go back and forth
            self._has_swapped_out = False
            return None
        if not swapped or not self._can_resume(swapped[0], budget):
            return None
        request = swapped[0]
        self.stats.blocks_swapped_in += len(self.manager.swap_in(request.live))
        request.status = RequestStatus.RUNNING
        return request

    def restart(self, request: Request) -> None:
        """Free all blocks, and let the request wait to be computed from its first token."""
        for seq in request.live:
            self.manager.free(seq)
        request.rewind()
        request.status = RequestStatus.WAITING

    def _recompute(self, request: Request) -> None:
        """Free all blocks. The request will compute its prompt and its generated tokens again."""
        lost = _computed_tokens(request)
        blocks = len({block_id for seq in request.live for block_id in seq.blocks})
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

    def _swap_out(self, request: Request) -> bool:
        moved = self.manager.swap_out(request.live)
        if moved is None:
            logger.warning("the swap space is too full for request %r: it is recomputed", request.request_id)
            return False
        self._has_swapped_out = True
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

    def _can_resume(self, request: Request, budget: SchedulingBudget) -> bool:
        manager = self.manager
        if request.num_seqs > budget.free_seqs or not all(hook.may_start(request) for hook in manager.hooks):
            return False
        needed = manager.num_swapped_blocks(request.live) + manager.num_to_grow(request.computing)
        fits = manager.pool.num_allocatable - needed >= manager.watermark
        return fits and bool(budget.chunks_of(request))


def _computed_tokens(request: Request) -> int:
    """Tokens of the request in the KV cache; a shared prompt counts once."""
    first, *others = request.live
    return first.num_computed + sum(max(0, seq.num_computed - seq.prompt_len) for seq in others)
