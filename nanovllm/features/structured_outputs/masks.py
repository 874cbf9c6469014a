"""The token masks of each sequence, made in threads beside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from nanovllm.data.batch import PackedMask
from nanovllm.errors import RequestError, one_line, told

MOST_SHOWN = 400  # characters of the library's reason


def bit_set(token_ids: Collection[int]) -> int:
    """A whole number with these bits."""
    return sum(1 << token for token in set(token_ids))


def library_error(matcher: Any) -> str:
    """Why a matcher of llguidance cannot go on."""
    return one_line(matcher.get_error().replace("<non-verbose/>", ""), MOST_SHOWN)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """matcher: llguidance's, before the first token. judge: says what is wrong with a finished output."""

    matcher: Any
    judge: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class MatchedGrammar:
    """A compiled grammar with the tokens that end an output. Sets of tokens are whole numbers, with a bit per token.

    eos: what llguidance takes for end tokens. ends: what ends an output. allowed: the tokens that may be used at all.
    """

    compiled: CompiledGrammar
    pool: ThreadPoolExecutor
    tokenizer: Any
    eos: int
    ends: int
    allowed: int | None

    def start(self) -> MatcherState:
        return MatcherState(self)

    def error(self, token_ids: Sequence[int]) -> str | None:
        """See `engine.resolved_sampling.Grammar`."""
        try:
            text = self.tokenizer.decode_bytes(list(token_ids)).decode()
        except UnicodeDecodeError:
            return "it is not UTF-8"
        return self.compiled.judge(text)


class MatcherState:
    """The state of one sequence's output, see `engine.resolved_sampling.GrammarState`.

    It outlives preemption, which loses K/V and no tokens.
    """

    def __init__(self, grammar: MatchedGrammar) -> None:
        self.num_read = 0
        self._grammar = grammar
        self._matcher = grammar.compiled.matcher.deep_copy()
        self._last: Future[list[PackedMask]] | None = None

    def mask(self, token_ids: Sequence[int], hold_end: bool) -> PendingMask:
        return self.masks(token_ids, (), (hold_end,))[0]

    def masks(self, token_ids: Sequence[int], drafts: Sequence[int], hold_ends: Sequence[bool]) -> list[PendingMask]:
        if self._last is not None:  # a step that failed, or that sampled nothing, has not waited for it
            wait([self._last])
        self.num_read += len(token_ids)
        self._last = self._grammar.pool.submit(self._make, list(token_ids), list(drafts), list(hold_ends))
        return [PendingMask(self._last, index) for index in range(len(hold_ends))]

    def _make(self, token_ids: Sequence[int], drafts: Sequence[int], hold_ends: Sequence[bool]) -> list[PackedMask]:
        """Runs in a thread of the pool; the library releases the interpreter's lock."""
        made = [self._after(self._matcher, token_ids, hold_ends[0])]
        ahead = self._matcher.deep_copy() if drafts and made[0].error is None else None
        for draft, hold_end in zip(drafts, hold_ends[1:], strict=True):
            if ahead is None or made[-1].error is not None or not made[-1].allows(draft):
                break
            made.append(self._after(ahead, [draft], hold_end))
        return made + made[-1:] * (len(hold_ends) - len(made))

    def _after(self, matcher: Any, token_ids: Sequence[int], hold_end: bool) -> PackedMask:
        """The mask once `matcher` has read these tokens."""
        grammar = self._grammar
        try:
            if token_ids:
                matcher.consume_tokens(token_ids)
            packed = matcher.compute_bitmask()
            if matcher.is_error():
                raise RequestError(library_error(matcher))
        except BaseException as error:  # a panic of the library is no Exception
            reason = str(error) if isinstance(error, RequestError) else told(error)
            return PackedMask(error=f"the structured output cannot go on: {reason}")
        bits = int.from_bytes(packed, "little") & ~grammar.eos
        if matcher.is_accepting():
            bits |= grammar.ends
        if grammar.allowed is not None:
            bits &= grammar.allowed
        if hold_end:
            bits = bits & ~grammar.ends or bits
        return PackedMask(bits.to_bytes(max(len(packed), -(-bits.bit_length() // 8)), "little"))


class PendingMask:
    """A mask that another thread makes, see `data.batch.TokenMask`. It is pickled as the finished mask."""

    def __init__(self, made: Future[list[PackedMask]], index: int) -> None:
        self._made = made
        self._index = index

    @property
    def bits(self) -> bytes:
        return self._made.result()[self._index].bits

    @property
    def error(self) -> str | None:
        return self._made.result()[self._index].error

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedMask, (self.bits, self.error)
