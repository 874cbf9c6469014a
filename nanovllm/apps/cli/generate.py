"""`nanovllm generate`: answers prompts, and writes the results in the order of the prompts as they finish.

The engine holds a limited number of prompts at a time, so that files of any length take the same memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from nanovllm import EngineClient
from nanovllm.apps.cli.arguments import (
    PROGRESS,
    add_engine_flags,
    add_sampling_flags,
    checked_config,
    engine_arguments,
    sampling_arguments,
    text_argument,
)
from nanovllm.apps.cli.boundary import Boundary, Interrupt, say
from nanovllm.apps.cli.closing import cut_hints, kv_line
from nanovllm.apps.cli.lora import ChosenAdapters, add_lora_flags, check_chosen
from nanovllm.apps.cli.main import INTERRUPTED
from nanovllm.apps.cli.prompts import (
    FILE,
    JSONL,
    LINES,
    OF_FLAGS,
    STDIN,
    TEXT,
    Feed,
    PromptItem,
    Source,
    check_sources,
    count_prompts,
)
from nanovllm.apps.cli.results import InOrder, check_output, json_result, open_output, text_result
from nanovllm.apps.cli.templates import Messages, read_template
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.features.progress_bar import Meter, ProgressDisplay, StatusLine, of
from nanovllm.outputs import RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptParts

if TYPE_CHECKING:
    from nanovllm import LLM

WINDOW = 2  # most requests in the engine, as a multiple of max_num_seqs; enough to always have one to admit
HELD = 8  # most requests and results held back for an earlier one, as a multiple of max_num_seqs
WINDOW_TOKENS = 1 << 22  # prompt tokens in the engine; each takes about 50 bytes besides its KV cache


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help=summary,
        description="Answers prompts. Results come in the order of the prompts, as they finish. One line end at the "
        "end of a text file is ignored. - is standard input, which is also read if no prompt is given.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_source = {"action": "append", "dest": "sources", "metavar": "FILE"}
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="DIR PROMPT",
        help="the model, unless --model is given, and prompts; -: standard input",
    )
    parser.add_argument("--prompt", type=_prompt, help="a prompt", **add_source | {"metavar": "TEXT"})  # type: ignore[arg-type]
    parser.add_argument("--file", type=_source(FILE), help="a file that is one prompt", **add_source)  # type: ignore[arg-type]
    parser.add_argument("--lines", type=_source(LINES), help="a file with a prompt in each line", **add_source)  # type: ignore[arg-type]
    parser.add_argument(
        "--jsonl",
        type=_source(JSONL),
        help="a file with a JSON object in each line: prompt, prompt_token_ids or messages, and optionally "
        "sampling parameters that override the flags, a cache_salt, an id and lora, the name of an adapter",
        **add_source,  # type: ignore[arg-type]
    )
    parser.add_argument("--json", action="store_true", help="results as JSON lines with all outputs and metrics")
    parser.add_argument("--output", metavar="FILE", help="where results go; by default standard output")
    parser.add_argument("--stream", action="store_true", help="show text as it is generated, one prompt at a time")
    add_chat_options(parser)
    add_lora_flags(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help=PROGRESS)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """How prompts become messages, and messages a prompt."""
    add = parser.add_argument
    add("--chat", action="store_true", help="each prompt is a user's message: put it into the model's chat template")
    add("--system", type=text_argument, metavar="TEXT", help="with --chat, a system message before each prompt")
    add("--chat-template", metavar="FILE", help="a Jinja template for messages, used instead of the tokenizer's own")


def _source(kind: str) -> Any:
    return lambda path: Source(kind, path)


def _prompt(text: str) -> Source:
    return Source(TEXT, text)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a prompt failed."""
    sources = _sources(args)
    check_sources(sources)
    check_output(args.output, [source.value for source in sources if source.kind != TEXT])
    if args.stream and args.json:
        raise ConfigError("--stream shows text as it comes and --json complete results: leave one of them out")
    if args.system is not None and not args.chat:
        raise ConfigError("--system is a message of a conversation: add --chat, which makes each prompt one")
    given = SamplingParams(**sampling_arguments(args))  # refuses wrong values before the model is loaded
    if args.stream:
        check_streamed(given)
    template = read_template(args.chat_template)
    check_chosen(args, checked_config(args), may_choose=any(source.kind == JSONL for source in sources))

    with Interrupt() as interrupt, StatusLine(args.progress) as status:
        with interrupt.allowed(), status.during(f"loading {args.model}"):
            from nanovllm import LLM  # imports torch, which takes seconds

            llm = LLM(args.model, **engine_arguments(args))
        with llm, open_output(args.output) as file:
            _check_tokenizer(llm, args, sources)
            params = replace(llm.get_default_sampling_params(), **sampling_arguments(args))
            messages = Messages(llm, template, args.chat, args.system)
            requests = Requests(llm, params, messages, args.stream, ChosenAdapters(llm, args))
            requests.is_bounded = "max_tokens" in llm.engine.sampling_defaults | sampling_arguments(args)
            boundary = Boundary(args.verbose)
            feed, meter = Feed(sources, boundary), Meter(count_prompts(sources))
            return Generation(requests, feed, file, args.json, args.stream, status, meter, interrupt, boundary).run()


def _sources(args: argparse.Namespace) -> list[Source]:
    """Prompts from the arguments, then the files in the order of the flags."""
    sources = [Source(FILE, STDIN) if text == STDIN else Source(TEXT, text) for text in args.prompts]
    sources += args.sources or []
    if sources:
        return sources
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            f"there is no prompt for the model {args.model!r:.200}: give one as an argument, or name a --file, "
            "--lines, --jsonl or -"
        )
    return [Source(FILE, STDIN)]


def _check_tokenizer(llm: LLM, args: argparse.Namespace, sources: Iterable[Source]) -> None:
    if llm.engine.tokenizer is None and not (args.json and all(source.kind == JSONL for source in sources)):
        raise ConfigError(
            f"{args.model} has no tokenizer files, so it takes token ids and gives token ids: use --jsonl and --json, "
            "or add the files"
        )


def check_streamed(params: SamplingParams) -> None:
    """Raise RequestError for parameters that --stream cannot show."""
    if params.n > 1:
        raise RequestError(f"n={params.n}: --stream shows one sequence; leave it out to get all")


class Requests:
    """The prompts that are in the engine, by request id."""

    def __init__(
        self, llm: LLM, params: SamplingParams, messages: Messages, stream: bool, adapters: ChosenAdapters
    ) -> None:
        self.llm = llm
        self._adapters = adapters
        self._client = EngineClient(llm.engine)
        self._params = replace(params, output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY)
        self._stream = stream
        self._messages = messages
        self.is_chat = messages.is_chat
        self.running: dict[str, tuple[int, PromptItem]] = {}  # index and prompt of the unfinished ones
        self.num_tokens = 0  # of their prompts
        self.is_bounded = False  # whether the flags or the checkpoint give max_tokens

    def add(self, index: int, item: PromptItem) -> None:
        """Add a prompt. Raises RequestError if it cannot be served."""
        params = replace(self._params, **item.params)
        if self._stream:
            check_streamed(params)
        adapter = self._adapters.default if item.lora is OF_FLAGS else self._adapters.named(item.lora)
        prompt = PromptParts(item.prompt, self._messages.token_ids(item), item.cache_salt)
        request = self.llm.engine.make_request(str(index), prompt, params, lora_request=adapter)
        self._client.add(request)
        self.running[str(index)] = (index, item)
        self.num_tokens += request.prompt_len

    def remove(self, output: RequestOutput) -> tuple[int, PromptItem]:
        """Remove a finished request. Returns its index and prompt."""
        self.num_tokens -= len(output.prompt_token_ids)
        return self.running.pop(output.request_id)

    def step(self) -> list[RequestOutput]:
        """The outputs of one step. A failed step ends its requests, with outputs that give the error."""
        try:
            return self._client.step()
        except EngineError as error:
            if not error.outputs:
                raise
            say(f"nanovllm generate: {error}")
            return [output for output in error.outputs if isinstance(output, RequestOutput)]


@dataclass
class Generation:
    """Runs all prompts and writes their results, until none is left or Ctrl-C is pressed."""

    requests: Requests
    feed: Feed
    file: TextIO
    json: bool
    stream: bool
    status: StatusLine
    meter: Meter
    interrupt: Interrupt
    boundary: Boundary
    _num_taken: int = 0
    _order: InOrder = field(default_factory=InOrder)
    _in_line: bool = False  # whether a streamed text has begun and not ended
    _num_cut: int = 0  # prompts with an output that ended at max_tokens or max_model_len
    _num_default_cut: int = 0  # at max_tokens, which nothing but its default gave
    _num_plain_cut: int = 0  # without a chat template
    _first_error: str = ""

    def run(self) -> int:
        """Run all prompts. Returns the exit status."""
        llm = self.requests.llm
        try:
            with ProgressDisplay(self.status, self.meter, llm.engine.progress, llm.watch_steps) as display:
                while self._top_up() or self.requests.running:
                    with self.interrupt.allowed():
                        outputs = self.requests.step()
                    for output in outputs:
                        self._take(output)
                    self.file.flush()
                    display.is_held = self._in_line  # the status line would overwrite streamed text
                    display.refresh()
        except KeyboardInterrupt:
            return self._interrupted()
        return self._ended()

    # ---- prompts

    def _top_up(self) -> bool:
        """Add prompts until the window is full. Returns whether more may follow."""
        while not self.feed.ended and not self._is_full():
            with self.interrupt.allowed():
                item = self.feed.take(wait=not self.requests.running)
            if item is None:
                break
            self._add(item)
        return not self.feed.ended

    def _is_full(self) -> bool:
        """Whether no prompt can be added now. --stream runs one prompt at a time."""
        requests, seqs = self.requests, self.requests.llm.config.max_num_seqs
        num_running = len(requests.running)
        if self.stream or not num_running:
            return num_running > 0
        many_held = num_running + self._order.num_held >= HELD * seqs
        return num_running >= WINDOW * seqs or requests.num_tokens >= WINDOW_TOKENS or many_held

    def _add(self, item: PromptItem) -> None:
        index = self._num_taken
        self._num_taken += 1
        error = item.error
        if error is None:
            _, error = self.boundary.attempt(lambda: self.requests.add(index, item))
        if error is not None:
            self._fail(index, item, error, None)

    # ---- results

    def _take(self, output: RequestOutput) -> None:
        if output.request_id not in self.requests.running:
            return
        self.meter.count(output)
        if self.stream:
            self._write(completion.text for completion in output.outputs)
            self._in_line = self._in_line or bool(output.outputs)
        if not output.finished:
            return
        index, item = self.requests.remove(output)
        failed = [o.finish_reason for o in output.outputs if o.finish_reason in ("error", "abort")]
        if failed:
            self._fail(index, item, output.error or "the request was ended by a failure of the engine", output)
            return
        line, error = self.boundary.attempt(lambda: self._line(index, item, output, None))
        if line is None or error is not None:
            self._fail(index, item, error or "", None)
            return
        self.meter.finished += 1
        if any(completion.finish_reason == "length" for completion in output.outputs):
            self._num_cut += 1
            self._num_default_cut += not self.requests.is_bounded and "max_tokens" not in item.params
            self._num_plain_cut += item.prompt is not None and not self.requests.is_chat
        if self.stream:
            self._write(["\n"])
            self._in_line = False
        self._put(index, line)

    def _line(self, index: int, item: PromptItem, output: RequestOutput | None, error: str | None) -> str:
        if self.json:
            return json_result(index, item, output, error)
        return "" if output is None else text_result(output)

    def _fail(self, index: int, item: PromptItem, error: str, output: RequestOutput | None) -> None:
        """Write the error as the result of this prompt; the other prompts go on."""
        self.meter.failed += 1
        sentence = f"{item.source}: {error}"
        self._first_error = self._first_error or sentence
        is_one_of_many = self.meter.total != 1
        if not self.json and is_one_of_many:
            self.status.clear()
            say(f"nanovllm generate: {sentence}")
        self._put(index, self._line(index, item, output, error) if self.json else "\n" * is_one_of_many)

    def _put(self, index: int, line: str) -> None:
        self._write(self._order.put(index, "" if self.stream else line))

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line:
                self.status.clear()
                self.file.write(line)

    # ---- display

    def _ended(self) -> int:
        meter = self.meter
        self.file.flush()
        if self.status.shown:
            cut = f"; {of(self._num_cut, meter.finished)} cut at --max-tokens or max_model_len" if self._num_cut else ""
            say(meter.summary() + cut)
            if not self.json:
                llm = self.requests.llm
                say(kv_line(llm.kv_stats(), meter.num_tokens))
                for hint in cut_hints(llm, meter.finished, self._num_default_cut, self._num_plain_cut):
                    say(hint)
        if not meter.failed:
            return 0
        total = meter.finished + meter.failed
        lead = f"{meter.failed:,} of {total:,} prompts failed; the first: " if total > 1 else ""
        say(f"nanovllm generate: error: {lead}{self._first_error}")
        return 1

    def _interrupted(self) -> int:
        """Write all finished results, also those after unfinished ones."""
        self.status.clear()
        self._write(self._order.rest())
        if self._in_line:
            self._write(["\n"])
        with suppress(BrokenPipeError):
            self.file.flush()
        finished = of(self.meter.finished, self.meter.total)
        known = "" if self.meter.total is not None else f" of at least {self._num_taken:,}"
        say(f"nanovllm generate: interrupted: {finished}{known} prompts were finished")
        return INTERRUPTED
