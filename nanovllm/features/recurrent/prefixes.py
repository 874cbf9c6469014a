"""Which cached blocks a prompt can still begin with: without a snapshot behind them, they are of no use.

This is for groups without a window; `KeptWindows` says which blocks of windows are worth keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from nanovllm.engine.block_pool import BlockPool


class SnapshotPrefixes:
    """The hash blocks before all snapshots, as a tree: each has the one before it as its parent."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._uses = Counter[bytes]()  # of a hash block: by the snapshot at its end, and by each child

    def clear(self) -> None:
        self._uses.clear()

    def __contains__(self, content_hash: bytes) -> bool:
        """Whether there is a snapshot at the end of a hash block or behind it."""
        return content_hash in self._uses

    def goes_on(self, content_hash: bytes) -> bool:
        """Whether there is a snapshot behind a hash block at whose end there is one, too."""
        return self._uses[content_hash] > 1

    def add(self, hashes: Seq[bytes]) -> None:
        """There is a snapshot after these hash blocks, one or more."""
        for content_hash in reversed(hashes):
            self._uses[content_hash] += 1
            if self._uses[content_hash] > 1:
                return  # and so have those before it
            for block in self._pool.prefix_cache.full_blocks(content_hash):
                self._pool.set_usable(block, True)

    def remove(self, hashes: Seq[bytes]) -> None:
        """The snapshot after these hash blocks is forgotten."""
        for content_hash in reversed(hashes):
            self._uses[content_hash] -= 1
            if self._uses[content_hash]:
                return
            del self._uses[content_hash]
            for block in self._pool.prefix_cache.full_blocks(content_hash):
                if not any(map(self.__contains__, block.hashes)):
                    self._pool.set_usable(block, False)
