"""Recomputed tokens: what a prompt has in common with an earlier one, and is computed again.

The engine that has forgotten blocks cannot say what they were worth. So the content hashes of what was computed are
remembered here for longer than the blocks: a few MB say which prompts the KV cache would have had to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile

from nanovllm.data.batch import Sample
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.step_hook import StepHook

MOST_HASH_BLOCKS = 32_768  # in about 5 MB; 2M tokens or more in blocks of at least 64


class PastPrompts:
    """The content hashes of the hash blocks that were used last, at most `most` of them.

    A hash covers everything before its hash block, so a prompt is known up to its first unknown hash. A prompt is known
    whole as long as it and all that was used since it began have at most `most` different hash blocks.
    """

    def __init__(self, most: int = MOST_HASH_BLOCKS) -> None:
        self._most = most
        self._hashes = OrderedDict[bytes, None]()  # the least recently used first

    def num_known(self, hashes: Iterable[bytes]) -> int:
        """How many of the first hash blocks of a prompt are known."""
        return sum(1 for _ in takewhile(self._hashes.__contains__, hashes))

    def use(self, hashes: Seq[bytes]) -> None:
        """Neighbouring hash blocks of one prompt are used. Of these the first will be forgotten last."""
        for content_hash in reversed(hashes):
            self._hashes[content_hash] = None
            self._hashes.move_to_end(content_hash)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


class RecomputedTokens(StepHook):
    """Counts the recomputed tokens of each request when it first runs. Of several sequences the prompt counts once.

    They are whole hash blocks that the request begins with, that were computed before, and that the prefix cache could
    have given it, but did not. Tokens that a request computes in any case are none: the last one of its prompt, and all
    of a prompt whose log-probabilities it asks for.
    """

    def __init__(self, manager: BlockManager, most: int = MOST_HASH_BLOCKS) -> None:
        """most: hash blocks that are remembered."""
        self._manager = manager
        self._past = PastPrompts(most)

    def first_run(self, request: Request) -> None:
        cache = self._manager.prefix_cache
        size = cache.hash_block_size
        seq = request.computing[0]
        ends = range(size, seq.num_cacheable + 1, size)
        known = self._past.num_known(cache.hash_before(seq, end) for end in ends)
        recomputed = max(0, known * size - seq.num_computed)
        request.metrics.recomputed_tokens = recomputed
        cache.stats.recomputed_tokens += recomputed
        self._use(seq, 0, seq.num_computed // size)  # what was read from disk may be new here

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        size = self._manager.prefix_cache.hash_block_size
        self._use(seq, begin // size, seq.num_computed // size)

    def _use(self, seq: Sequence, first: int, end: int) -> None:
        """Remember the hash blocks of a sequence from `first` up to `end`. Most decode steps complete none."""
        if first < end:
            cache = self._manager.prefix_cache
            cache.hash_before(seq, end * cache.hash_block_size)  # with all hashes before it
            self._past.use(seq.prefix.hashes[first:end])

    def forget(self) -> None:
        self._past.clear()
