"""`nanovllm generate`: prompts in, results out as they finish, in the order of the prompts.

The engine holds a window of the prompts, so a file of any length takes the same memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from nanovllm.cli.arguments import (
    add_engine_flags,
    add_sampling_flags,
    checked_config,
    engine_arguments,
    sampling_arguments,
)
from nanovllm.cli.boundary import Boundary, Interrupt, say
from nanovllm.cli.main import INTERRUPTED
from nanovllm.cli.prompts import FILE, JSONL, LINES, STDIN, TEXT, Feed, PromptItem, Source, check_sources, count_prompts
from nanovllm.cli.results import InOrder, check_output, json_result, open_output, text_result
from nanovllm.cli.status import Meter, StatusLine, of
from nanovllm.cli.templates import ChatTemplate, read_template
from nanovllm.engine.metrics import Progress
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.outputs import RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

WINDOW = 2  # times max_num_seqs: requests in the engine, so that it never lacks one to admit
HELD = 8  # times max_num_seqs: results that wait for one before them
WINDOW_TOKENS = 1 << 22  # of prompts in the engine, which take about 50 bytes each beside the KV cache


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help=summary,
        description="Answers prompts. Results come in the order of the prompts, as they finish. Of a text file's end "
        "one line end is left out. - is standard input, which is also read where no prompt is named.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_source = {"action": "append", "dest": "sources", "metavar": "FILE"}
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; -: standard input")
    parser.add_argument("--file", type=_source(FILE), help="a file that is one prompt", **add_source)  # type: ignore[arg-type]
    parser.add_argument("--lines", type=_source(LINES), help="a file with a prompt in each line", **add_source)  # type: ignore[arg-type]
    parser.add_argument(
        "--jsonl",
        type=_source(JSONL),
        help="a file with a JSON object in each line: prompt, prompt_token_ids or messages, sampling parameters that "
        "differ from the flags, a cache_salt and an id if you like",
        **add_source,  # type: ignore[arg-type]
    )
    parser.add_argument("--json", action="store_true", help="results as JSON lines with everything that is known")
    parser.add_argument("--output", metavar="FILE", help="where results go; else to standard output")
    parser.add_argument("--stream", action="store_true", help="show text as it comes, one prompt after the other")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template for messages")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def _source(kind: str) -> Any:
    return lambda path: Source(kind, path)


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 where a prompt failed."""
    sources = _sources(args)
    check_sources(sources)
    check_output(args.output, [source.value for source in sources if source.kind != TEXT])
    if args.stream and args.json:
        raise ConfigError("--stream shows text as it comes and --json whole results: leave one of them out")
    params = SamplingParams(**sampling_arguments(args))
    if args.stream:
        check_streamed(params)
    template = read_template(args.chat_template)
    checked_config(args)
    from nanovllm.llm import LLM  # with torch, which takes seconds to import

    with Interrupt() as interrupt:
        with interrupt.allowed():
            llm = LLM(args.model, **engine_arguments(args))
        with llm, open_output(args.output) as file:
            _check_tokenizer(llm, args, sources)
            requests = Requests(llm, params, template, args.stream)
            status, meter = StatusLine(args.progress), Meter(count_prompts(sources))
            boundary = Boundary(args.verbose)
            feed = Feed(sources, boundary)
            return Generation(args, requests, feed, file, status, meter, interrupt, boundary).run()


def _sources(args: argparse.Namespace) -> list[Source]:
    """Prompts from arguments first, then files as they were named."""
    sources = [Source(FILE, STDIN) if text == STDIN else Source(TEXT, text) for text in args.prompts]
    sources += args.sources or []
    if sources:
        return sources
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is no prompt: give one as an argument, or name a --file, --lines, --jsonl or -")
    return [Source(FILE, STDIN)]


def _check_tokenizer(llm: LLM, args: argparse.Namespace, sources: Iterable[Source]) -> None:
    if llm.engine.tokenizer is None and not (args.json and all(source.kind == JSONL for source in sources)):
        raise ConfigError(
            f"{args.model} has no tokenizer files, so it takes token ids and gives token ids: use --jsonl and --json, "
            "or add the files"
        )


def check_streamed(params: SamplingParams) -> None:
    """Raises RequestError for more than can be shown as it comes."""
    if params.n > 1:
        raise RequestError(f"n={params.n}: --stream shows one sequence; leave it out to get all")


class Requests:
    """The engine's requests, by the prompts' numbers."""

    def __init__(self, llm: LLM, params: SamplingParams, template: str | None, stream: bool) -> None:
        self._llm = llm
        self._params = replace(params, output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY)
        self._stream = stream
        self._template_text = template
        self._template: ChatTemplate | None = None
        self.running: dict[str, tuple[int, PromptItem]] = {}  # by request id
        self.num_tokens = 0  # of the running ones' prompts

    def add(self, index: int, item: PromptItem) -> None:
        """Raises RequestError for what cannot be served."""
        params = replace(self._params, **item.params)
        if self._stream:
            check_streamed(params)
        engine = self._llm.engine
        token_ids = engine.check_prompt(item.prompt, self._token_ids(item))
        request_id = str(index)
        engine.add_request(request_id, item.prompt, params, prompt_token_ids=token_ids, cache_salt=item.cache_salt)
        self.running[request_id] = (index, item)
        self.num_tokens += len(token_ids)

    def remove(self, output: RequestOutput) -> tuple[int, PromptItem]:
        """Forget a request that has finished; its number and prompt."""
        self.num_tokens -= len(output.prompt_token_ids)
        return self.running.pop(output.request_id)

    def _token_ids(self, item: PromptItem) -> Any:
        if item.messages is None:
            return item.prompt_token_ids
        if self._template is None:
            self._template = ChatTemplate(self._llm, self._template_text)
        return self._template.token_ids(item.messages)

    def watch(self, on_layer: Callable[[float], None]) -> None:
        self._llm.watch_steps(on_layer)

    def step(self) -> list[RequestOutput]:
        """One step of the engine. A failed one ends its requests, and their outputs say so."""
        try:
            return self._llm.engine.step()
        except EngineError as error:
            if not error.outputs:
                raise
            say(f"nanovllm generate: {error}")
            return [output for output in error.outputs if isinstance(output, RequestOutput)]

    def progress(self) -> Progress:
        return self._llm.engine.progress()

    def in_step(self, share: float) -> float:
        """Prompt tokens that a step has computed once so much of it is done."""
        running = self.progress()
        return share * min(running.prompt_tokens - running.prompt_tokens_done, self._llm.config.max_num_batched_tokens)

    @property
    def max_num_seqs(self) -> int:
        return self._llm.config.max_num_seqs


class Generation:
    """Takes prompts to the engine and results to the file until there are none, or until Ctrl-C."""

    def __init__(
        self,
        args: argparse.Namespace,
        requests: Requests,
        feed: Feed,
        file: TextIO,
        status: StatusLine,
        meter: Meter,
        interrupt: Interrupt,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self._json, self._stream = args.json, args.stream
        self._requests, self._feed, self._file = requests, feed, file
        self._status, self._meter, self._interrupt = status, meter, interrupt
        self._num_taken = 0
        self._order = InOrder()
        self._in_line = False  # of a text that is being streamed
        self._first_error = ""

    def run(self) -> int:
        """The exit status."""
        if self._status.shown:
            self._requests.watch(self._show_status)
        try:
            while self._top_up() or self._requests.running:
                with self._interrupt.allowed():
                    outputs = self._requests.step()
                for output in outputs:
                    self._take(output)
                self._file.flush()
                self._show_status()
        except KeyboardInterrupt:
            return self._interrupted()
        finally:
            self._status.clear()
        return self._ended()

    # ---- prompts

    def _top_up(self) -> bool:
        """Fill the window; whether prompts may follow."""
        while not self._feed.ended and self._has_room():
            with self._interrupt.allowed():
                item = self._feed.take(wait=not self._requests.running)
            if item is None:
                break
            self._add(item)
        return not self._feed.ended

    def _has_room(self) -> bool:
        requests, seqs = self._requests, self._requests.max_num_seqs
        if not requests.running:
            return True
        if self._stream:
            return False
        is_full = len(requests.running) >= WINDOW * seqs or requests.num_tokens >= WINDOW_TOKENS
        return not is_full and len(requests.running) + self._order.num_held < HELD * seqs

    def _add(self, item: PromptItem) -> None:
        index = self._num_taken
        self._num_taken += 1
        error = item.error
        if error is None:
            _, error = self._boundary.attempt(lambda: self._requests.add(index, item))
        if error is not None:
            self._fail(index, item, error, None)

    # ---- results

    def _take(self, output: RequestOutput) -> None:
        if output.request_id not in self._requests.running:
            return
        self._meter.count(output)
        if self._stream:
            self._write(completion.text for completion in output.outputs)
            self._in_line = self._in_line or bool(output.outputs)
        if not output.finished:
            return
        index, item = self._requests.remove(output)
        failed = [o.finish_reason for o in output.outputs if o.finish_reason in ("error", "abort")]
        if failed:
            self._fail(index, item, output.error or "the request was ended by a failure of the engine", output)
            return
        line, error = self._boundary.attempt(lambda: self._line(index, item, output, None))
        if line is None or error is not None:
            self._fail(index, item, error or "", None)
            return
        self._meter.finished += 1
        if self._stream:
            self._write(["\n"])
            self._in_line = False
        self._put(index, line)

    def _line(self, index: int, item: PromptItem, output: RequestOutput | None, error: str | None) -> str:
        if self._json:
            return json_result(index, item, output, error)
        return "" if output is None else text_result(output)

    def _fail(self, index: int, item: PromptItem, error: str, output: RequestOutput | None) -> None:
        """The result is the error; the others go on."""
        self._meter.failed += 1
        sentence = f"{item.source}: {error}"
        self._first_error = self._first_error or sentence
        is_one_of_many = self._meter.total != 1
        if not self._json and is_one_of_many:
            self._status.clear()
            say(f"nanovllm generate: {sentence}")
        self._put(index, self._line(index, item, output, error) if self._json else "\n" * is_one_of_many)

    def _put(self, index: int, line: str) -> None:
        self._write(self._order.put(index, "" if self._stream else line))

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line:
                self._status.clear()
                self._file.write(line)

    # ---- what a person sees

    def _show_status(self, step_share: float = 0.0) -> None:
        if self._status.is_due() and not self._in_line:  # text that is being written must not be drawn over
            requests = self._requests
            in_step = requests.in_step(step_share)
            self._status.show(self._meter.line(requests.progress(), in_step))

    def _ended(self) -> int:
        meter = self._meter
        self._file.flush()
        if self._status.shown:
            say(meter.summary())
        if not meter.failed:
            return 0
        total = meter.finished + meter.failed
        lead = f"{meter.failed:,} of {total:,} prompts failed; the first: " if total > 1 else ""
        say(f"nanovllm generate: error: {lead}{self._first_error}")
        return 1

    def _interrupted(self) -> int:
        """Write what is finished, also behind what is not."""
        self._status.clear()
        self._write(self._order.rest())
        if self._in_line:
            self._write(["\n"])
        with suppress(BrokenPipeError):
            self._file.flush()
        finished = of(self._meter.finished, self._meter.total)
        known = "" if self._meter.total is not None else f" of at least {self._num_taken:,}"
        say(f"nanovllm generate: interrupted: {finished}{known} prompts were finished")
        return INTERRUPTED
