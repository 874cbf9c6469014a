"""Random sessions of several clients, which an engine plays; each answer is compared with one that shares nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

from hypothesis import strategies as st

from benchmarks.session_patterns import Asked, Player, Tokens
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

CLIENTS = 3
LONGEST_ANSWER = 12  # tokens
KINDS = ("append", "append", "strip", "edit", "branch", "compact", "again", "abort", "restart", "unrelated")


class Act(NamedTuple):
    """What a client does. where, size: random numbers below 100, of which its kind makes what it needs."""

    kind: str
    client: int
    where: int
    size: int


class Past(NamedTuple):
    """An earlier request of the same engine."""

    tokens: Tokens  # its prompt and, unless it was aborted, its answer
    ends: tuple[int, ...]  # where its prompt and its answer ended; nowhere if it was aborted
    longest: int  # so many tokens it may have had


Bound = Callable[[Asked, Tokens, Sequence[Past]], int]  # of a request, its prompt, and all earlier ones

NUMBERS = st.integers(0, 99)
ACTS = st.builds(Act, st.sampled_from(KINDS), st.integers(0, CLIENTS - 1), NUMBERS, NUMBERS)
ROUNDS = st.lists(
    st.lists(ACTS, min_size=1, max_size=CLIENTS, unique_by=lambda act: act.client), min_size=4, max_size=14
)


class Subject(Protocol):
    """What plays the sessions."""

    vocab: int
    system: int  # tokens of the system prompt
    message: int  # of the longest message
    longest: int  # of the longest prompt

    @property
    def engine(self) -> LLMEngine: ...

    def step(self) -> list[RequestOutput]: ...

    def restart(self) -> None:
        """Go on with an engine whose memory is empty."""
        ...

    def answer(self, output: RequestOutput) -> Any:
        """What is compared."""
        ...

    def expected(self, prompt: Tokens, params: SamplingParams) -> Any:
        """`answer` of an engine that has seen no other prompt."""
        ...


@dataclass
class Client:
    """Its history: a system prompt that all have, then messages, each with its answer if there is one."""

    system: Tokens
    turns: list[list[Tokens]] = field(default_factory=list)  # of a message, and its answer

    @property
    def prompt(self) -> Tokens:
        return [*self.system, *(token for turn in self.turns for part in turn for token in part)]


class Sessions:
    """Acts of clients on one engine. Those of a round run at once, or one after the other if `bound` is given."""

    def __init__(self, subject: Subject, seed: int, bound: Bound | None = None) -> None:
        """bound: of a request, the most old tokens that it may compute again."""
        self.subject = subject
        self.bound = bound
        self.counts = Counter[str]()
        self.asked: list[Asked] = []
        self._past: list[Past] = []
        self._random = Random(seed)
        self._player = self._new_player()
        system = self._words(subject.system)
        self._clients = [Client(system) for _ in range(CLIENTS)]

    def _new_player(self) -> Player:
        return Player(lambda prompt: (prompt, 0))

    def _words(self, length: int) -> Tokens:
        return [self._random.randrange(self.subject.vocab) for _ in range(length)]

    def play(self, rounds: Sequence[Sequence[Act]]) -> None:
        for acts in rounds:
            for at_once in [acts] if self.bound is None else [[act] for act in acts]:
                self._round(at_once)

    def _round(self, acts: Sequence[Act]) -> None:
        """Add the requests of these acts, step until they have ended, and compare their answers."""
        running: dict[str, tuple[Act, Tokens, SamplingParams]] = {}
        for act in acts:
            self.counts[act.kind] += 1
            if act.kind == "restart":
                continue
            prompt = self._prompt(act)
            name = str(self.counts.total() * CLIENTS + act.client)
            params = SamplingParams(
                temperature=1.0, seed=act.where, max_tokens=1 + act.size % LONGEST_ANSWER, ignore_eos=True
            )
            params.logprobs = 2
            self.subject.engine.add_request(name, None, params, prompt)
            running[name] = (act, prompt, params)
        self._step(running)
        if any(act.kind == "restart" for act in acts):
            self.subject.restart()
            self._player = self._new_player()  # the new engine has old tokens on disk at most
            self._past = []
        stats = self.subject.engine.scheduler.preemption.stats
        self.counts["swapped"] = stats.swapped
        self.counts["recomputed"] = stats.recomputed

    def _step(self, running: dict[str, tuple[Act, Tokens, SamplingParams]]) -> None:
        number = 0
        while running:
            for name, (act, prompt, params) in list(running.items()):
                if act.kind == "abort" and number == act.where % 5:
                    self.subject.engine.abort_request(name)
                    self._clients[act.client].turns.pop()
                    self._past.append(Past(prompt, (), len(prompt) + params.max_tokens))
                    del running[name]
            for output in self.subject.step() if running else ():
                if output.finished:
                    self._end(output, *running.pop(output.request_id))
            number += 1

    def _end(self, output: RequestOutput, act: Act, prompt: Tokens, params: SamplingParams) -> None:
        answer = self.subject.answer(output)
        assert answer == self.subject.expected(prompt, params), f"{act}: another answer than that of a fresh engine"
        tokens = output.outputs[0].token_ids
        if act.kind != "unrelated":
            self._clients[act.client].turns[-1].append(tokens)
        asked = self._player.note(prompt, tokens, output.num_cached_tokens)
        self.asked.append(asked)
        self.counts["cached tokens"] += asked.cached
        bound = None if self.bound is None else self.bound(asked, prompt, self._past)
        assert bound is None or asked.recomputed <= bound, f"{act}: {asked}, and the bound is {bound}"
        text = [*prompt, *tokens]
        self._past.append(Past(text, (len(prompt), len(text)), len(text)))

    def _prompt(self, act: Act) -> Tokens:
        """The prompt of an act, whose history is as the act leaves it."""
        client = self._clients[act.client]
        turns = client.turns
        length = 1 + act.size * self.subject.message // 100
        if act.kind == "unrelated":
            return self._words(length + self.subject.message)
        if act.kind == "compact" or len(client.prompt) + length > self.subject.longest:
            turns[:] = [[self._words(length // 2)]]
        elif turns and act.kind == "strip":
            turns[-1][-1] = turns[-1][-1][act.where * len(turns[-1][-1]) // 100 :]
        elif turns and act.kind == "edit":
            message = turns[act.where % len(turns)][0]
            kept = message[: act.size * len(message) // 100]
            turns[act.where % len(turns)][0] = kept + self._words(len(message) - len(kept))
        elif turns and act.kind == "branch":
            del turns[act.where % len(turns) :]
        elif turns and act.kind == "again":
            del turns[-1][1:]
            return client.prompt
        turns.append([self._words(length)])
        return client.prompt
