"""`nanovllm chat`: a conversation in the terminal, about a document if one is given.

The document is computed once, before the first question. After that, the prefix cache holds it and the earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm import EngineClient
from nanovllm.apps.cli.arguments import (
    add_chat_flags,
    add_command,
    add_engine_flags,
    add_progress_flag,
    add_sampling_flags,
    checked_config,
    read_text,
    sampling_arguments,
)
from nanovllm.apps.cli.boundary import Boundary, Interrupt, say
from nanovllm.apps.cli.engine import ChosenAdapters, add_lora_flags, check_chosen, kv_line, load_llm, progress_bar
from nanovllm.errors import ConfigError
from nanovllm.features.progress_bar import MakeBar, Meter, ProgressBar, again, drafts
from nanovllm.outputs import RequestMetrics, RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import PromptParts

if TYPE_CHECKING:
    from nanovllm import LLM, LoRARequest

# These options make no sense for a single answer of which only the text is shown.
NO_FLAGS = ("n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs")
MAX_TOKENS = 1024  # of an answer, where neither the flag nor the checkpoint says
QUIT = "/quit"
RESET = "/reset"
QUOTES = '"""'
COMMANDS = (
    f"{RESET} forgets the conversation and keeps the document, {QUIT} or end of input ends, {QUOTES} begins and ends a "
    "question of several lines"
)


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = add_command(
        subparsers,
        "chat",
        summary,
        f"A conversation: each line of input is a question. {COMMANDS}; Ctrl-C ends an answer, a second one the "
        "program. After each turn, standard error shows the numbers of cached and computed tokens, and whether the "
        "answer was cut; at the end, where the KV was.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--document", metavar="FILE", help="a text that the conversation is about")
    add_chat_flags(parser, prompts=False)
    add_lora_flags(parser)
    add_progress_flag(parser)
    add_sampling_flags(parser, leave_out=NO_FLAGS, max_tokens=MAX_TOKENS)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if an answer failed."""
    sampling = sampling_arguments(args)
    SamplingParams(**sampling)  # refuses wrong values before the model is loaded
    document = read_text("--document", args.document)
    template = read_text("--chat-template", args.chat_template)
    if document is not None and not document.strip():
        raise ConfigError(f"--document {args.document!r} is empty: give a text to talk about")
    check_chosen(args, checked_config(args))

    answer_tokens = sampling.get("max_tokens", MAX_TOKENS)
    texts = [] if document is None else [document]
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        llm = stack.enter_context(load_llm(args, interrupt, lambda: texts, answer_tokens))
        # The flags, else what the checkpoint recommends, else the defaults; an answer is always bounded by default.
        params = SamplingParams(**{"max_tokens": MAX_TOKENS} | llm.engine.sampling_defaults | sampling)
        answers = Answers(llm, params, progress_bar(args), interrupt, ChosenAdapters(llm, args).default)
        content_format = args.chat_template_content_format
        chat = Conversation(
            ChatTemplate(llm.engine.tokenizer, template, content_format=content_format), args.system, document
        )
        if document is not None and (prefix := chat.prefix()):
            computed = answers.compute(prefix).prefill
            if not args.quiet:
                say(f"[document: {computed}]")
        exit_status = _converse(answers, chat, interrupt, Boundary(args.verbose), args.quiet)
        if answers.num_tokens and not args.quiet:
            say(kv_line(llm.kv_stats(), answers.num_tokens))
        return exit_status


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
    max_tokens: int | None  # its bound
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        """Such as `1,024 tokens cached, 56 computed in 0.2 s, 31 generated at 12.3 tok/s, stop`."""
        cut = "the answer was cut where max_model_len ends"
        if self.num_tokens == self.max_tokens:
            cut = f"the answer was cut at {self.max_tokens:,} tokens: raise --max-tokens, or ask it to go on"
        parts = [self.prefill, f"{self.num_tokens:,} generated", str(self.finish_reason)]
        if self.metrics.tpot:
            parts[1] += f" at {1 / self.metrics.tpot:,.1f} tok/s"
        if self.metrics.drafted_tokens:
            parts.insert(2, drafts(self.metrics.drafted_tokens, self.metrics.accepted_tokens))
        return ", ".join(parts) + (f": {cut}" if self.finish_reason == "length" else "")

    @property
    def prefill(self) -> str:
        """Such as `1,024 tokens cached, 56 computed (32 of them again) in 0.2 s`."""
        metrics = self.metrics
        computed = f"{metrics.prefill_tokens:,} computed{again(metrics.recomputed_tokens)}"
        counts = f"{metrics.cached_tokens:,} tokens cached, {computed}"
        return counts if metrics.ttft is None else f"{counts} in {metrics.ttft:,.1f} s"


class Answers:
    """Runs one request at a time and shows its text as it comes."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        make_bar: MakeBar | None,
        interrupt: Interrupt,
        adapter: LoRARequest | None,
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._make_bar = make_bar
        self._interrupt = interrupt
        self._params = replace(params, output_kind=RequestOutputKind.DELTA)
        self._ids = map(str, itertools.count())
        self.num_tokens = 0  # computed and generated so far

    def compute(self, token_ids: Sequence[int]) -> Answer:
        """Compute a prompt, so that the prefix cache holds it."""
        params = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
        answer = self._run(token_ids, params, is_shown=False)
        if answer.finish_reason == "abort":
            raise KeyboardInterrupt
        return answer

    def answer(self, chat: Conversation, question: str) -> Answer:
        """Write the answer to standard output as it comes; Ctrl-C ends it. Raises RequestError and EngineError."""
        return self._run(chat.prompt(question), self._params, is_shown=True)

    def _run(self, token_ids: Sequence[int], params: SamplingParams, is_shown: bool) -> Answer:
        llm = self._llm
        client = EngineClient(self._llm.engine)
        prompt = PromptParts(None, token_ids)
        request = llm.engine.make_request(next(self._ids), prompt, params, lora_request=self._adapter)
        client.add(request)
        answer = Answer(request.metrics, params.max_tokens)
        with closing(client), ProgressBar(self._make_bar, 1, Meter(), llm) as bar:
            while client.pending:
                outputs = client.step()
                # Only between steps: an interrupted step would drop the prefix cache.
                if client.pending and self._interrupt.take():
                    outputs += client.abort()
                for output in outputs:
                    answer.error = output.error
                    for new in output.outputs:
                        answer.text += new.text
                        answer.num_tokens += len(new.token_ids)
                        answer.finish_reason = new.finish_reason
                        if is_shown and new.text:
                            bar.hold()
                            print(new.text, end="", flush=True)
                bar.refresh()
        if is_shown and answer.text:
            print(flush=True)
        self.num_tokens += answer.metrics.prefill_tokens + answer.num_tokens
        return answer


# ---- the terminal


def _converse(answers: Answers, chat: Conversation, interrupt: Interrupt, boundary: Boundary, is_quiet: bool) -> int:
    failed = False
    for question in _questions(interrupt):
        if question == RESET:
            chat.reset()
        elif question.startswith("/") and " " not in question:
            say(f"{question} is not a command: {COMMANDS}")
        else:
            # An OSError comes from the terminal, not from the question.
            answer, error = boundary.attempt(partial(answers.answer, chat, question), passing=(OSError,))
            if answer is None:
                say(f"nanovllm chat: error: {error}")
                failed = True
                continue
            failed = failed or answer.finish_reason == "error"
            if answer.text or answer.finish_reason != "abort":
                chat.add(question, answer.text)
            if not is_quiet:
                say(f"[{answer}]")
            if answer.error is not None:
                say(f"nanovllm chat: error: {answer.error}")
    return 1 if failed else 0


def _questions(interrupt: Interrupt) -> Iterator[str]:
    """Questions of a line, or of several between quotes, until /quit or the end of input."""
    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    if is_person:
        with suppress(ImportError):
            import readline  # noqa: F401  lets lines be edited
        say(COMMANDS)
    while True:
        try:
            with interrupt.allowed():
                question = _question(is_person)
        except EOFError:
            return
        except UnicodeError:
            say("nanovllm chat: error: the question is not UTF-8")
            continue
        if question == QUIT:
            return
        if question:
            yield question


def _question(is_person: bool) -> str:
    """The next line; if it begins with QUOTES, all lines up to the next QUOTES at the end of one, or to the end."""
    line = _next_line(is_person, "> ").strip()
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(_next_line(is_person, "... ").rstrip("\r\n"))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()


def _next_line(is_person: bool, prompt: str) -> str:
    if is_person:
        line = input(prompt)
        line.encode()  # in some locales, invalid bytes arrive as surrogates
        return line
    read = sys.stdin.buffer.readline()
    if not read:
        raise EOFError
    return read.decode()
