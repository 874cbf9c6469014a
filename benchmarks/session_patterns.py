"""Agents' sessions as lists of tokens, and how many old tokens an engine computes again while it plays them.

A *session* is a generator of prompts: each answer is sent back into it, and the next prompt is made of it in the way
that the pattern says. This needs no torch and no engine: who plays a session gives the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from random import Random

Tokens = list[int]
Session = Generator[Tokens, Tokens, None]
HALF = 2


@dataclass(frozen=True, slots=True)
class Talk:
    """Lengths in tokens of what is said, and how often."""

    system: int = 6000
    message: int = 150
    answer: int = 100
    reasoning: int = 60  # the first tokens of an answer
    opening: int = 3  # the last tokens of a prompt, which open the reasoning
    summary: int = 600
    result: int = 5000  # of a tool
    turns: int = 10
    vocab: int = 1000

    def words(self, length: int, name: str) -> Tokens:
        """Random tokens, the same for the same arguments."""
        random = Random(f"{name} {length}")
        return [random.randrange(self.vocab) for _ in range(length)]

    def instructions(self) -> Tokens:
        """The system prompt, which all sessions have."""
        return self.words(self.system, "system")

    def said(self, name: str, turn: int | str) -> Tokens:
        """The user's message of a turn."""
        return self.words(self.message, f"{name} {turn}")


@dataclass(slots=True)
class History:
    """A conversation as its client keeps it: the system prompt, then messages and answers in turns."""

    talk: Talk
    name: str
    parts: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = [self.talk.instructions()]

    @property
    def prompt(self) -> Tokens:
        return [token for part in self.parts for token in part]

    def ask(self, turn: int | str, message: Tokens | None = None) -> Session:
        """Add a message, give the prompt and add its answer."""
        self.parts.append(self.talk.said(self.name, turn) if message is None else message)
        answer = yield self.prompt
        self.parts.append(answer)

    def go_on(self, begin: int) -> Session:
        """The turns from `begin` on, one after the other."""
        for turn in range(begin, self.talk.turns):
            yield from self.ask(turn)


# ---- patterns


def append(talk: Talk, name: str) -> Session:
    """Each prompt goes on after the last answer."""
    yield from History(talk, name).go_on(0)


def stripped(talk: Talk, name: str) -> Session:
    """The client leaves the reasoning of each answer out: prompts part where the last prompt ended."""
    history = History(talk, name)
    for turn in range(talk.turns):
        yield from history.ask(turn)
        del history.parts[-1][: talk.reasoning]


def stripped_with_opening(talk: Talk, name: str) -> Session:
    """The tokens that open the reasoning are left out too: prompts part shortly before the last prompt's end."""
    history = History(talk, name)
    opening = talk.words(talk.opening, "opening")
    for turn in range(talk.turns):
        yield from history.ask(turn, talk.said(name, turn) + opening)
        del history.parts[-2][-talk.opening :]
        del history.parts[-1][: talk.reasoning]


def edited(talk: Talk, name: str) -> Session:
    """The second half of an early message changes; all that follows it stays."""
    history = History(talk, name)
    for turn in range(talk.turns):
        if turn == talk.turns - talk.turns // 3:
            middle = len(history.parts) // HALF | 1  # a message: they have the odd places
            kept = history.parts[middle][: talk.message // HALF]
            history.parts[middle] = kept + talk.words(talk.message - len(kept), f"{name} edit")
        yield from history.ask(turn)


def regenerated(talk: Talk, name: str) -> Session:
    """A prompt is answered anew, then its last message is another one."""
    history = History(talk, name)
    for turn in range(talk.turns):
        yield from history.ask(turn)
        if turn in (talk.turns // HALF, talk.turns - HALF):
            del history.parts[-1]
            history.parts.append((yield history.prompt))
            del history.parts[-2:]
            yield from history.ask(f"{turn} again")


def compacted(talk: Talk, name: str) -> Session:
    """Twice only the system prompt and a summary stay."""
    history = History(talk, name)
    for turn in range(talk.turns):
        if turn in (talk.turns // HALF, talk.turns - HALF):
            history.parts[1:] = [talk.words(talk.summary, f"{name} summary {turn}")]
        yield from history.ask(turn)


def two_in_turns(talk: Talk, name: str) -> Session:
    """Two sessions, of which each goes on when the other one has its answer."""
    histories = [History(talk, f"{name} {which}") for which in ("first", "second")]
    for turn in range(talk.turns):
        for history in histories:
            yield from history.ask(turn)


def tool_result(talk: Talk, name: str) -> Session:
    """A tool's long result and another turn, then another try from before the result."""
    history = History(talk, name)
    first = talk.turns // 4
    for turn in range(talk.turns):
        if turn == first + 2:
            del history.parts[2 * first + 1 :]
        yield from history.ask(turn, talk.words(talk.result, f"{name} result") if turn == first else None)


def cut_result(talk: Talk, name: str) -> Session:
    """A tool's long result is cut to its first half when the next message comes."""
    history = History(talk, name)
    first = talk.turns // 4
    for turn in range(talk.turns):
        if turn == first + 1:
            del history.parts[-2][talk.result // HALF :]
        yield from history.ask(turn, talk.words(talk.result, f"{name} result") if turn == first else None)


PATTERNS: Mapping[str, Callable[[Talk, str], Session]] = {
    "append": append,
    "reasoning stripped": stripped,
    "reasoning and its opening stripped": stripped_with_opening,
    "edited in the middle": edited,
    "regenerated, another last message": regenerated,
    "compaction": compacted,
    "two sessions in turns": two_in_turns,
    "tool result, then a branch": tool_result,
    "tool result cut in half": cut_result,
}


# ---- play


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine has read and written: a prompt and its answer."""

    tokens: Tokens
    prompt_len: int
    parted: int  # how much of it began like an earlier text


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. old: tokens that its prompt has in common with the beginning of an earlier text."""

    prompt_len: int
    old: int
    cached: int
    is_known: bool  # whether a prompt or an answer ended there before, or prompts parted there

    @property
    def recomputed(self) -> int:
        """Old tokens that were computed again."""
        return max(0, self.old - self.cached)


def common_length(first: Tokens, second: Tokens) -> int:
    """How many first tokens are the same."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // HALF
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Player:
    """Plays sessions and counts the old tokens of each request."""

    def __init__(self, ask: Callable[[Tokens], tuple[Tokens, int]]) -> None:
        """ask: gives the answer of a prompt, and how many of the prompt's tokens were cached."""
        self.ask = ask
        self._told: list[Told] = []

    def play(self, session: Session, before: Callable[[int], None] | None = None) -> list[Asked]:
        """All requests of a session. before: called with the number of each request."""
        asked = list[Asked]()
        prompt = next(session)
        while True:
            if before is not None:
                before(len(asked))
            answer, cached = self.ask(prompt)
            asked.append(self.note(prompt, answer, cached))
            try:
                prompt = session.send(answer)
            except StopIteration:
                return asked

    def note(self, prompt: Tokens, answer: Tokens, cached: int) -> Asked:
        """Count a request that has its answer."""
        shared = [(common_length(prompt, told.tokens), told) for told in self._told]
        old = max((length for length, _ in shared), default=0)
        places = (
            place
            for length, told in shared
            if length == old
            for place in (told.prompt_len, len(told.tokens), told.parted)
        )
        asked = Asked(len(prompt), old, cached, old in places)
        self._told.append(Told(prompt + answer, len(prompt), old))
        return asked


def num_requests(session: Session, answer: int) -> int:
    """Of a session whose answers have `answer` tokens."""
    return len(Player(lambda prompt: (prompt[:answer], 0)).play(session))


KNOWN_BOUND = 256  # old tokens computed again where a prompt or an answer ended before, or prompts parted
OTHER_BOUND = 2048  # anywhere else


def bound(asked: Asked, full_attention: bool = False) -> int:
    """The most old tokens that a request may compute again, if there is memory for all sessions."""
    return KNOWN_BOUND if asked.is_known or full_attention else OTHER_BOUND


def worst(asked: list[Asked], is_known: bool) -> int:
    """The most that one request computed again, of those that part from earlier ones where one did before, or not."""
    return max((each.recomputed for each in asked if each.is_known is is_known), default=0)


def cell(asked: list[Asked]) -> str:
    """The most that one request computed again. New places are told apart if they cost more."""
    known = worst(asked, True)
    other = worst(asked, False)
    return f"{known:,}" if other <= max(known, KNOWN_BOUND) else f"{other:,} the first time, then {known:,}"
