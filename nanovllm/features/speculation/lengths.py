"""How many tokens to draft: what a pass costs by its rows, as measured, against the drafts that will be right."""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 1.02  # drafts must promise this much more than none
FORGET = 0.95  # weight of what was measured one pass earlier
FIRST_SHARE = 0.1  # as measured with networks of 100 million parameters and more
LEAST_SPREAD = 0.01  # of the numbers of rows: with less, the cost of a row is not known anew
STALE = 32  # passes of one number of rows, after which the cost of another row is not known any more


class PassCosts:
    """The cost of a pass of m rows as fixed + m * per_row, fitted to the latest passes.

    share: per_row / fixed, a guess until passes of several numbers of rows were measured, and again when the latest
    STALE had the same: one pass that was slow for another reason would otherwise end drafts for good. fixed: in
    seconds; 0 while `share` is a guess.
    """

    def __init__(self) -> None:
        self._latest_rows = 0  # of the latest pass
        self._num_same = 0  # consecutive passes, up to the latest, with this number of rows
        self._forget()

    def _forget(self) -> None:
        self.share = FIRST_SHARE
        self.fixed = 0.0
        self._sums: tuple[float, ...] = (0.0,) * 5  # weighted: passes, rows, seconds, rows * rows, rows * seconds

    def add(self, rows: int, seconds: float) -> None:
        """Count a pass."""
        self._num_same = self._num_same + 1 if rows == self._latest_rows else 1
        self._latest_rows = rows
        if self._num_same % STALE == 0:
            self._forget()
        new = (1, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(FORGET * old + more for old, more in zip(self._sums, new, strict=True))
        passes, sum_rows, sum_seconds, squares, products = self._sums
        spread = passes * squares - sum_rows * sum_rows
        if spread > LEAST_SPREAD * passes * squares and sum_seconds > 0:
            per_row = max(0.0, (passes * products - sum_rows * sum_seconds) / spread)
            fixed = (sum_seconds - per_row * sum_rows) / passes
            self.fixed = max(fixed, 1e-3 * sum_seconds / passes)
            self.share = per_row / self.fixed


def draft_length(acceptance: float, most: int, rows: int, tokens: int, share: float, draft_cost: float = 0.0) -> int:
    """How many tokens of a sequence to draft, from 0 to `most`: that which gives most tokens in a second.

    acceptance: the probability that a draft is right if those before it are. rows, tokens: what the pass computes and
    generates without them. share: `PassCosts.share`. draft_cost: what it costs to draft a token, as a share of
    `PassCosts.fixed`.
    """
    best = 0
    best_rate = MARGIN * tokens / (1 + share * rows)
    expected = float(tokens)
    probability = 1.0
    for length in range(1, most + 1):
        probability *= acceptance
        expected += probability
        rate = expected / (1 + share * (rows + length) + draft_cost * length)
        if rate > best_rate:
            best = length
            best_rate = rate
    return best


def shared_out(lengths: Sequence[int], most: int) -> list[int]:
    """These numbers of drafts, cut to `most` in all: the longest first, as late drafts are right least often."""
    longest = max(lengths, default=0)
    while sum(min(length, longest) for length in lengths) > most:
        longest -= 1
    left = most - sum(min(length, longest) for length in lengths)
    cut = list[int]()
    for length in lengths:
        cut.append(min(length, longest + (left > 0)))
        left -= cut[-1] > longest
    return cut
