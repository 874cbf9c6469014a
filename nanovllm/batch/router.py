"""Which row goes to which replica: rows that begin with the same text go where its KV is, unless others would idle.

A prefix is known by hashes of its first 256, 512, 1,024, ... bytes, so that a row costs a dozen look-ups however long
it is. What two rows share is known to a factor of two, which is enough to tell a document from a system prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from nanovllm.batch.rows import Row, RowRequest

SHORTEST = 256  # bytes of a prefix that is looked up
KNOWN_PREFIXES = 1 << 14  # hashes that are kept for a replica
MOST_CANDIDATES = 1024  # waiting rows among which the next one is chosen


def prefix_hashes(parts: Iterable[bytes]) -> tuple[int, ...]:
    """Hashes of the first SHORTEST * 2 ** i bytes of the parts together, for all such prefixes that they have."""
    hasher, length, mark, found = xxhash.xxh3_64(), 0, SHORTEST, []
    for part in parts:
        rest = memoryview(part)
        while length + len(rest) >= mark:
            hasher.update(rest[: mark - length])
            rest, length, mark = rest[mark - length :], mark, 2 * mark
            found.append(hasher.intdigest())
        hasher.update(rest)
        length += len(rest)
    return tuple(found)


@dataclass(slots=True, eq=False)
class WaitingRow:
    """A row with its request, until its result is written. losses: how many workers were lost while they had it."""

    row: Row
    request: RowRequest
    hashes: tuple[int, ...]
    num_characters: int
    losses: int = 0


@dataclass(slots=True)
class Router:
    """The rows that wait for a replica, in input order. by_prefix: False takes them as they come."""

    by_prefix: bool = True
    num_characters: int = 0  # of the waiting rows
    _waiting: OrderedDict[int, WaitingRow] = field(default_factory=OrderedDict)  # by index
    _known: dict[int, OrderedDict[int, None]] = field(default_factory=dict)  # replica: hashes, latest last

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: WaitingRow) -> None:
        """Add a row behind the others."""
        self._waiting[waiting.row.index] = waiting
        self.num_characters += waiting.num_characters

    def add_first(self, rows: Iterable[WaitingRow]) -> None:
        """Add the rows of a lost worker, in their order, in front of the others."""
        for waiting in reversed(list(rows)):
            self.add(waiting)
            self._waiting.move_to_end(waiting.row.index, last=False)

    def take(self, replica: int, is_idle: bool) -> WaitingRow | None:
        """The next row for a replica; None if it should leave the waiting rows to the others.

        The row that shares most with what the replica has, unless another replica has more of it. is_idle: the replica
        has too little to do, so it also gets rows that others have more of, those first of which least is lost.
        """
        known = self._known.setdefault(replica, OrderedDict())
        best, best_rank = None, (-1, 0)
        for waiting in self._candidates():
            here = _num_known(waiting.hashes, known)
            elsewhere = self._known_elsewhere(waiting, replica)
            rank = (1, here) if here >= elsewhere else (0, -elsewhere)
            if rank > best_rank and (is_idle or rank[0]):
                best, best_rank = waiting, rank
        if best is not None:
            self._assign(best, known)
        return best

    def forget(self, replica: int) -> None:
        """The replica's KV cache is lost."""
        self._known.pop(replica, None)

    def _candidates(self) -> Iterator[WaitingRow]:
        return islice(self._waiting.values(), MOST_CANDIDATES if self.by_prefix else 1)

    def _known_elsewhere(self, waiting: WaitingRow, replica: int) -> int:
        others = [known for other, known in self._known.items() if other != replica]
        return max((_num_known(waiting.hashes, known) for known in others), default=0)

    def _assign(self, waiting: WaitingRow, known: OrderedDict[int, None]) -> None:
        del self._waiting[waiting.row.index]
        self.num_characters -= waiting.num_characters
        if not self.by_prefix:
            return
        for prefix in reversed(waiting.hashes):  # the shortest, which most rows share, last: it is forgotten last
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > KNOWN_PREFIXES:
            known.popitem(last=False)


def _num_known(hashes: tuple[int, ...], known: OrderedDict[int, None]) -> int:
    """How many of a row's prefixes are known: they are from short to long."""
    count = 0
    for prefix in hashes:
        if prefix not in known:
            break
        count += 1
    return count
