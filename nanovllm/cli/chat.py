"""`nanovllm chat`: a conversation in the terminal, about a document if one is given.

The document is computed once, before the first question. After that, the prefix cache holds it and the earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.arguments import (
    add_engine_flags,
    add_sampling_flags,
    checked_config,
    engine_arguments,
    sampling_arguments,
    text_argument,
)
from nanovllm.cli.boundary import Boundary, Interrupt, say
from nanovllm.cli.status import StatusLine
from nanovllm.cli.templates import chat_template, read_template
from nanovllm.engine.client import EngineClient
from nanovllm.errors import ConfigError
from nanovllm.outputs import RequestMetrics, RequestOutput, RequestOutputKind
from nanovllm.progress_bar import prefill_share
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.chat_template.template import ChatTemplate
    from nanovllm.llm import LLM

# These options make no sense for a single answer of which only the text is shown.
NO_FLAGS = ("n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs")
QUIT, RESET = "/quit", "/reset"
COMMANDS = f"{RESET} forgets the conversation and keeps the document, {QUIT} or end of input ends"


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat",
        help=summary,
        description=f"A conversation: each line of input is a question. {COMMANDS}; Ctrl-C ends an answer, a second "
        "one the program. After each turn, standard error shows the numbers of cached and computed tokens.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--document", metavar="FILE", help="a text that the conversation is about")
    parser.add_argument("--system", type=text_argument, metavar="TEXT", help="a system message, before the document")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template, used instead of the tokenizer's own")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")
    add_sampling_flags(parser, leave_out=NO_FLAGS)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if an answer failed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed, and questions are read from it: redirect it from a file")
    params = SamplingParams(**{"max_tokens": None} | sampling_arguments(args))
    document, template = _read_document(args.document), read_template(args.chat_template)
    checked_config(args)
    from nanovllm.llm import LLM  # imports torch, which takes seconds

    with Interrupt() as interrupt:
        with interrupt.allowed():
            llm = LLM(args.model, **engine_arguments(args))
        with llm:
            answers = Answers(llm, params, StatusLine(args.progress), interrupt)
            chat = Conversation(chat_template(llm, template), args.system, document)
            if document is not None:
                _read_ahead(answers, chat)
            return _converse(answers, chat, interrupt, Boundary(args.verbose))


def _read_document(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--document {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--document {path!r} is not UTF-8: {error.reason} at position {error.start}") from None
    if not text.strip():
        raise ConfigError(f"--document {path!r} is empty: give a text to talk about")
    return text


# ---- the conversation


class Conversation:
    """The messages so far. The document is part of the first question, which every chat template allows."""

    def __init__(self, template: ChatTemplate, system: str | None, document: str | None) -> None:
        self._template = template
        self._opening = "" if document is None else f"{document.rstrip()}\n\n"
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def prompt(self, question: str) -> list[int]:
        """Token ids of the messages so far and a question. Raises RequestError."""
        return self._template.token_ids([*self._system, *self._turns, self._asked(question)])

    def add(self, question: str, answer: str) -> None:
        """Add a turn to the messages."""
        self._turns += [self._asked(question), {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def prefix(self) -> list[int]:
        """The common prefix of all first questions: the document, and what the chat template puts before it."""
        pairs = zip(self.prompt("a"), self.prompt("1"), strict=False)
        return [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _asked(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": question if self._turns else self._opening + question}


@dataclass(slots=True)
class Answer:
    """An answer as far as it has been generated, and what it cost."""

    metrics: RequestMetrics
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        """Such as `1,024 tokens cached, 56 computed in 0.2 s, 31 generated at 12.3 tok/s, stop`."""
        metrics = self.metrics
        parts = [f"{metrics.cached_tokens:,} tokens cached, {metrics.prefill_tokens:,} computed"]
        if metrics.ttft is not None:
            parts[0] += f" in {metrics.ttft:,.1f} s"
            parts.append(f"{self.num_tokens:,} generated")
        if metrics.tpot:
            parts[-1] += f" at {1 / metrics.tpot:,.1f} tok/s"
        return ", ".join([*parts, str(self.finish_reason)])


class Answers:
    """Runs one request at a time and shows its text as it comes."""

    def __init__(self, llm: LLM, params: SamplingParams, status: StatusLine, interrupt: Interrupt) -> None:
        self._llm = llm
        self._params = replace(params, output_kind=RequestOutputKind.DELTA)
        self._status = status
        self._interrupt = interrupt
        self._ids = map(str, itertools.count())
        if status.shown:
            llm.watch_steps(self._show_progress)

    def answer(self, token_ids: Sequence[int]) -> Answer:
        """Write the answer to standard output as it comes; Ctrl-C ends it. Raises RequestError and EngineError."""
        answer = self._run(token_ids, self._params, is_shown=True)
        if answer.text:
            print(flush=True)
        return answer

    def compute(self, token_ids: Sequence[int]) -> Answer:
        """Compute a prompt, so that the prefix cache holds it."""
        params = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
        answer = self._run(token_ids, params, is_shown=False)
        if answer.finish_reason == "abort":
            raise KeyboardInterrupt
        return answer

    def _run(self, token_ids: Sequence[int], params: SamplingParams, is_shown: bool) -> Answer:
        answer = None
        for output in self._outputs(token_ids, params):
            answer = answer or Answer(output.metrics)
            answer.error = output.error
            for new in output.outputs:
                answer.text += new.text
                answer.num_tokens += len(new.token_ids)
                answer.finish_reason = new.finish_reason
                if is_shown and new.text:
                    self._status.clear()
                    print(new.text, end="", flush=True)
        assert answer is not None, "a request ends with an output"
        return answer

    def _outputs(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[RequestOutput]:
        client = EngineClient(self._llm.engine)
        client.add(next(self._ids), None, params, prompt_token_ids=token_ids)
        try:
            while client.pending:
                yield from client.step()
                # Only between steps: an interrupted step would drop the prefix cache.
                if client.pending and self._interrupt.take():
                    yield from client.abort()
        finally:
            self._status.clear()
            client.close()

    def _show_progress(self, step_share: float) -> None:
        if self._status.is_due():
            progress = self._llm.engine.progress()
            prefill = prefill_share(progress.within_step(step_share, self._llm.config.max_num_batched_tokens))
            if prefill is not None:
                self._status.show(prefill)


# ---- the terminal


def _read_ahead(answers: Answers, chat: Conversation) -> None:
    prefix = chat.prefix()
    if prefix:
        say(f"[document: {answers.compute(prefix)}]")


def _converse(answers: Answers, chat: Conversation, interrupt: Interrupt, boundary: Boundary) -> int:
    failed = False
    for question in _questions(interrupt):
        if question == RESET:
            chat.reset()
        elif question.startswith("/") and " " not in question:
            say(f"{question} is not a command: {COMMANDS}")
        else:
            # An OSError comes from the terminal, not from the question.
            ask = partial(_answer, answers, chat, question)
            answer, error = boundary.attempt(ask, passing=(OSError,))
            if answer is None:
                say(f"nanovllm chat: error: {error}")
                failed = True
                continue
            failed = failed or answer.finish_reason == "error"
            if answer.text or answer.finish_reason != "abort":
                chat.add(question, answer.text)
            say(f"[{answer}]")
            if answer.error is not None:
                say(f"nanovllm chat: error: {answer.error}")
    return 1 if failed else 0


def _answer(answers: Answers, chat: Conversation, question: str) -> Answer:
    return answers.answer(chat.prompt(question))


def _questions(interrupt: Interrupt) -> Iterator[str]:
    """Non-empty lines, until /quit or the end of input."""
    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    if is_person:
        with suppress(ImportError):
            import readline  # noqa: F401  lets lines be edited
        say(COMMANDS)
    while True:
        try:
            with interrupt.allowed():
                line = input("> ") if is_person else _next_line()
                line.encode()  # in some locales, invalid bytes arrive as surrogates
        except EOFError:
            return
        except UnicodeError:
            say("nanovllm chat: error: the question is not UTF-8")
            continue
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.strip()


def _next_line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode()
