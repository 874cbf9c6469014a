"""An index of the n-grams of one sequence, which grows with it."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where the n-grams of a sequence occurred last, for each n from `least` to `most`.

    Memory: about 100 bytes for each token and n.
    """

    def __init__(self, least: int, most: int) -> None:
        self._sizes = range(most, least - 1, -1)
        # By size and hash: the position after the latest n-gram. Others with the same hash are rare, and noticed.
        self._ends: dict[int, dict[int, int]] = {size: {} for size in self._sizes}
        self._num_read = 0  # n-grams that end at or before this position are in the index

    def follow(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the latest earlier occurrence of the sequence's end.

        The longest n-gram that has one is taken. token_ids: of the last call, and more. Takes time for the new tokens,
        however many there are in all.
        """
        length = len(token_ids)
        for size in self._sizes:
            ends = self._ends[size]
            for end in range(max(self._num_read + 1, size), length):  # not the sequence's end itself
                ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_read = max(self._num_read, length - 1)
        for size in self._sizes:
            if size < length:
                last = token_ids[length - size :]
                found = self._ends[size].get(hash(tuple(last)))
                if found is not None and token_ids[found - size : found] == last:
                    return list(token_ids[found : found + count])
        return []
