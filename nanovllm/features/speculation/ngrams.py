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
        self._answered = 0  # the position of what the last call answered
        self._source: int | None = None  # the position after what the latest drafts were copied from
        self._is_source = False  # whether the last call answered what is there

    def follow(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the latest earlier occurrence of the sequence's end.

        The longest n-gram is looked up first, and shorter ones last: between them comes the text that the latest drafts
        were copied from, though its token differed where they were wrong, since a copy with a change goes on after it.
        token_ids: of the last call, and more. Takes time for the new tokens, however many there are in all.
        """
        self._read(token_ids)
        source = self._source
        self._source = None
        end = self._find(token_ids, self._sizes[:1])
        self._is_source = end is None and source is not None
        if self._is_source:
            end = source
        elif end is None:
            end = self._find(token_ids, self._sizes[1:])
        if end is None:
            return []
        self._answered = end
        return list(token_ids[end : end + count])

    def verified(self, accepted: int) -> None:
        """So many of the tokens that the last call answered were right, and one more follows them."""
        if accepted or not self._is_source:  # a text is left after a second wrong token
            self._source = self._answered + accepted + 1

    def _read(self, token_ids: Sequence[int]) -> None:
        length = len(token_ids)
        for size in self._sizes:
            ends = self._ends[size]
            for end in range(max(self._num_read + 1, size), length):  # not the sequence's end itself
                ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_read = max(self._num_read, length - 1)

    def _find(self, token_ids: Sequence[int], sizes: range) -> int | None:
        length = len(token_ids)
        for size in sizes:
            if size < length:
                last = token_ids[length - size :]
                end = self._ends[size].get(hash(tuple(last)))
                if end is not None and token_ids[end - size : end] == last:
                    return end
        return None
