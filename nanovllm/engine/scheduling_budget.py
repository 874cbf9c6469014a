"""The tokens of one step, given out request by request within its budget."""

from __future__ import annotations

from nanovllm.engine.request import Request, Sequence


class SchedulingBudget:
    """`chunks`: (sequence, tokens to compute), in the order of the step.

    `left`: tokens that may still be given; `held`: kept for the long prefill, see `long_prefill.py`.
    `free_seqs`: sequences that may still join those that run.
    """

    def __init__(self, budget: int, free_seqs: int, max_prefill_chunk: int = 0) -> None:
        """max_prefill_chunk: the most tokens of one sequence that cannot sample yet; 0 for no such limit."""
        self.chunks: list[tuple[Sequence, int]] = []
        self.left = budget
        self.free_seqs = free_seqs
        self.held = 0
        self._max_prefill_chunk = max_prefill_chunk or budget

    def share_of(self, request: Request) -> list[tuple[Sequence, int]]:
        """What the request gets of the rest; nothing if it does not fit.

        Sequences of one request sample together. One of several that still has output tokens to recompute therefore
        stops before its last, and those that have come that far wait for it.
        """
        sequences = request.computing
        if len(sequences) == 1:
            chunk = self._chunk(sequences[0].num_remaining, self.left)
            return [(sequences[0], chunk)] if chunk else []
        if not is_prefill(request):
            return [(seq, 1) for seq in sequences] if len(sequences) <= self.left else []
        share, left = [], self.left
        for seq in sequences:
            chunk = self._chunk(seq.num_remaining - 1, left) if seq.num_remaining > 1 else 0
            if chunk:
                share.append((seq, chunk))
                left -= chunk
        return share

    def join(self, request: Request) -> None:
        """A request begins to run, or runs again, with a share of this step."""
        self.free_seqs -= request.num_seqs
        self.give(request)

    def hold_half(self) -> None:
        """From now on keep half of what is left."""
        self.held = self.left // 2
        self.left -= self.held

    def release(self) -> None:
        """What was kept may be given."""
        self.left, self.held = self.left + self.held, 0

    def give(self, request: Request) -> None:
        """Put the request's share into the step."""
        share = self.share_of(request)
        self.chunks += share
        self.left -= sum(chunk for _, chunk in share)

    def _chunk(self, remaining: int, left: int) -> int:
        return min(remaining, left, self._max_prefill_chunk)


def is_prefill(request: Request) -> bool:
    """Whether some of its sequences have more to compute than the token that they sample from."""
    return any(seq.num_remaining > 1 for seq in request.computing)
