"""Which row goes to which replica: rows that begin with the same text go where its KV is, unless others would idle.

A prefix is known by hashes of its first 256, 512, 1,024, ... bytes, so that a row costs a dozen look-ups however long
it is. What two rows share is known to a factor of two, which is enough to tell a document from a system prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from nanovllm.apps.batch.rows import Row, RowRequest

SHORTEST = 256  # bytes of a prefix that is looked up
KNOWN_PREFIXES = 1 << 14  # hashes that are kept for a replica


def prefix_hashes(parts: Iterable[bytes]) -> tuple[int, ...]:
    """Hashes of the first SHORTEST * 2 ** i bytes of the parts together, for all such prefixes that they have."""
    hasher = xxhash.xxh3_64()
    length = 0
    mark = SHORTEST
    found = []
    for part in parts:
        rest = memoryview(part)
        while length + len(rest) >= mark:
            hasher.update(rest[: mark - length])
            rest = rest[mark - length :]
            length = mark
            mark = 2 * mark
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
    losses: int = 0


class Router:
    """The rows that wait for a replica. Rows without hashes are given out in input order.

    Rows with the same hashes are one group, in input order, so that choosing costs what the groups are, not the rows.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._groups: OrderedDict[tuple[int, ...], deque[WaitingRow]] = OrderedDict()  # by hashes
        self._known: dict[int, OrderedDict[int, None]] = {}  # by replica: hashes of what it was given, latest last
        self._owners: dict[int, set[int]] = {}  # by hash: the replicas that know it

    def __len__(self) -> int:
        return self._num_rows

    def add(self, waiting: WaitingRow) -> None:
        """Add a row behind the others."""
        self._group(waiting).append(waiting)

    def add_first(self, rows: Iterable[WaitingRow]) -> None:
        """Add the rows of a lost worker, in their order, in front of the others."""
        for waiting in reversed(list(rows)):
            self._group(waiting).appendleft(waiting)
            self._groups.move_to_end(waiting.hashes, last=False)

    def take(self, replica: int, is_idle: bool) -> WaitingRow | None:
        """The next row for a replica; None if it should leave the waiting rows to the others.

        The row that shares most with what the replica has, unless another replica has more of it. is_idle: the replica
        has too little to do, so it also gets rows that others have more of, those first of which least is lost.
        """
        best = None
        best_rank = (-1, 0)
        for hashes in self._groups:
            here, elsewhere = self._shared(hashes, replica)
            rank = (1, here) if here >= elsewhere else (0, -elsewhere)
            if rank > best_rank and (is_idle or rank[0]):
                best = hashes
                best_rank = rank
        if best is None:
            return None
        group = self._groups[best]
        waiting = group.popleft()
        if not group:
            del self._groups[best]
        self._num_rows -= 1
        self._learn(replica, best)
        return waiting

    def forget(self, replica: int) -> None:
        """The replica's KV cache is lost."""
        for prefix in self._known.pop(replica, ()):
            self._disown(replica, prefix)

    def _group(self, waiting: WaitingRow) -> deque[WaitingRow]:
        self._num_rows += 1
        return self._groups.setdefault(waiting.hashes, deque())

    def _shared(self, hashes: tuple[int, ...], replica: int) -> tuple[int, int]:
        """How many of the prefixes, which are from short to long, the replica knows, and how many another one."""
        here = elsewhere = 0
        for count, prefix in enumerate(hashes, start=1):
            owners = self._owners.get(prefix)
            if owners is None:
                break
            is_here = replica in owners
            here = count if is_here else here
            elsewhere = count if len(owners) > is_here else elsewhere
        return here, elsewhere

    def _learn(self, replica: int, hashes: tuple[int, ...]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for prefix in reversed(hashes):  # the shortest, which most rows share, last: it is forgotten last
            known[prefix] = None
            known.move_to_end(prefix)
            self._owners.setdefault(prefix, set()).add(replica)
        while len(known) > KNOWN_PREFIXES:
            self._disown(replica, known.popitem(last=False)[0])

    def _disown(self, replica: int, prefix: int) -> None:
        owners = self._owners[prefix]
        owners.discard(replica)
        if not owners:
            del self._owners[prefix]
