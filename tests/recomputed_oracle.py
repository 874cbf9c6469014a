"""Recomputed tokens by another way: a plain set of everything that was computed. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.data.batch import Sample
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, Sequence
from nanovllm.features.recomputed_tokens import RecomputedTokens


class CheckedRecomputedTokens(RecomputedTokens):
    """Compares each count with one that knows tokens instead of hashes, and forgets nothing."""

    def __init__(self, manager: BlockManager) -> None:
        super().__init__(manager)
        self._size = manager.prefix_cache.hash_block_size
        self._manager = manager
        self._starts = set[tuple[bytes, tuple[int, ...]]]()  # salt, and tokens of whole hash blocks
        self.counted: dict[str, int] = {}  # by request id

    def first_run(self, request: Request) -> None:
        seq = request.computing[0]
        known = 0
        while known + self._size <= seq.num_cacheable and self._start(seq, known + self._size) in self._starts:
            known += self._size
        self._add(seq, 0)
        super().first_run(request)
        assert request.request_id not in self.counted, "it is counted once"
        self.counted[request.request_id] = request.metrics.recomputed_tokens
        assert request.metrics.recomputed_tokens == max(0, known - seq.num_computed)
        assert sum(self.counted.values()) == self._manager.stats.recomputed_tokens

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        super().computed(seq, begin, samples)
        self._add(seq, begin)

    def forget(self) -> None:
        super().forget()
        self._starts.clear()

    def _add(self, seq: Sequence, begin: int) -> None:
        ends = range((begin // self._size + 1) * self._size, seq.num_computed + 1, self._size)
        self._starts.update(self._start(seq, end) for end in ends)

    def _start(self, seq: Sequence, end: int) -> tuple[bytes, tuple[int, ...]]:
        return seq.request.cache_salt, tuple(seq.token_ids[:end])
