"""`nanovllm generate`: answers prompts, and writes the results in the order of the prompts as they finish.

The engine holds a limited number of prompts at a time, so that files of any length take the same memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from nanovllm import EngineClient
from nanovllm.apps.batch.rows import RowFormat, RowRequest, chat_template
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
    read_prompts,
)
from nanovllm.errors import ConfigError, EngineError, RequestError
from nanovllm.features.progress_bar import Meter, ProgressBar, of
from nanovllm.outputs import Logprob, RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptParts

if TYPE_CHECKING:
    from nanovllm import LLM

WINDOW = 8  # most prompts in the engine or with a result that waits for an earlier one, as a multiple of max_num_seqs
COMPLETION = ("index", "text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob")


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = add_command(
        subparsers,
        "generate",
        summary,
        "Answers prompts. Results come in the order of the prompts, as they finish. One line end at the end of a text "
        "file is ignored. - is standard input, which is also read if no prompt is given.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    text = "the model, unless --model is given, and prompts; -: standard input"
    add("prompts", nargs="*", metavar="DIR PROMPT", help=text)
    add_source = partial(parser.add_argument, action="append", dest="sources")
    add_source("--prompt", type=partial(Source, TEXT), metavar="TEXT", help="a prompt")
    add_source("--file", type=partial(Source, FILE), metavar="FILE", help="a file that is one prompt")
    add_source("--lines", type=partial(Source, LINES), metavar="FILE", help="a file with a prompt in each line")
    text = (
        "a file with a JSON object in each line: prompt, prompt_token_ids or messages, and optionally sampling "
        "parameters that override the flags, a cache_salt, an id and lora, the name of an adapter"
    )
    add_source("--jsonl", type=partial(Source, JSONL), metavar="FILE", help=text)
    add("--json", action="store_true", help="results as JSON lines with all outputs and metrics")
    add("--output", metavar="FILE", help="where results go; by default standard output")
    add("--stream", action="store_true", help="show text as it is generated, one prompt at a time")
    add_chat_flags(parser, prompts=True)
    add_lora_flags(parser)
    add_progress_flag(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a prompt failed."""
    sources = _sources(args)
    check_sources(sources)
    _check_output(args.output, [source.value for source in sources if source.kind != TEXT])
    if args.stream and args.json:
        raise ConfigError("--stream shows text as it comes and --json complete results: leave one of them out")
    if args.system is not None and not args.chat:
        raise ConfigError("--system is a message of a conversation: add --chat, which makes each prompt one")
    row_format = RowFormat(is_chat=args.chat, system=args.system)
    given = SamplingParams(**sampling_arguments(args))  # refuses wrong values before the model is loaded
    if args.stream:
        _check_streamed(given)
    template = read_text("--chat-template", args.chat_template)
    only_jsonl = all(source.kind == JSONL for source in sources)
    check_chosen(args, checked_config(args), may_choose=any(source.kind == JSONL for source in sources))

    with Interrupt() as interrupt:
        llm = load_llm(args, interrupt, partial(_known_texts, sources, row_format), given.max_tokens)
        path = args.output
        with llm, nullcontext(sys.stdout) if path is None else open(path, "w", encoding="utf-8", newline="") as file:
            if llm.engine.tokenizer is None and not (args.json and only_jsonl):
                raise ConfigError(
                    f"{args.model} has no tokenizer files, so it takes token ids and gives token ids: use --jsonl and "
                    "--json, or add the files"
                )
            return Generation(llm, args, template, sources, row_format, file, interrupt).run()


def _sources(args: argparse.Namespace) -> list[Source]:
    """Prompts from the arguments, then the files in the order of the flags."""
    sources = [Source(FILE, STDIN) if text == STDIN else Source(TEXT, text) for text in args.prompts]
    sources += args.sources or []
    if sources:
        return sources
    if sys.stdin.isatty():
        raise ConfigError(
            f"there is no prompt for the model {args.model!r:.200}: give one as an argument, or name a --file, "
            "--lines, --jsonl or -"
        )
    return [Source(FILE, STDIN)]


def _known_texts(sources: Sequence[Source], row_format: RowFormat) -> list[str]:
    """The prompts, if all of them are arguments and files that are one prompt each, and can be read again."""
    if any(source.kind not in (TEXT, FILE) or source.can_stall for source in sources):
        return []
    plain = replace(row_format, is_chat=False)
    requests = [item.request for item in read_prompts(sources, plain, Boundary())]
    return [request.prompt for request in requests if request is not None and request.prompt is not None]


def _check_output(path: str | None, inputs: list[str]) -> None:
    """Raise ConfigError if the file cannot be written, before a model is loaded. Its content is kept."""
    if path is None:
        return
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ConfigError(f"--output {path!r} cannot be written: {error.strerror}") from None
    for name in inputs:
        if os.path.exists(name) and Path(path).samefile(name):
            raise ConfigError(f"--output {path!r} is also read: give it another name")


def _check_streamed(params: SamplingParams) -> None:
    if params.n > 1:
        raise RequestError(f"n={params.n}: --stream shows one sequence; leave it out to get all")


@dataclass(slots=True)
class Task:
    """A prompt, and its result once there is one: a line, which waits for those of earlier prompts."""

    index: int
    item: PromptItem
    line: str | None = None


class Generation:
    """Runs all prompts and writes their results, until none is left or Ctrl-C is pressed."""

    def __init__(
        self,
        llm: LLM,
        args: argparse.Namespace,
        template: str | None,
        sources: Sequence[Source],
        row_format: RowFormat,
        file: TextIO,
        interrupt: Interrupt,
    ) -> None:
        self._llm = llm
        self._args = args
        self._template_text = template
        self._file = file
        self._is_above_bar = file.isatty() and not args.stream  # streamed text takes the bar off its line
        self._interrupt = interrupt
        self._client = EngineClient(llm.engine)
        self._adapters = ChosenAdapters(llm, args)
        given = llm.engine.sampling_defaults | sampling_arguments(args)
        kind = RequestOutputKind.DELTA if args.stream else RequestOutputKind.FINAL_ONLY
        self._params = SamplingParams(**given, output_kind=kind)
        self._boundary = Boundary(args.verbose)
        self._feed = Feed(sources, row_format, self._boundary)
        self._num_prompts = count_prompts(sources)  # None if it is not known
        self._meter = Meter()
        self._bar = ProgressBar(progress_bar(args), self._num_prompts, self._meter, llm)
        self._running: dict[str, Task] = {}  # by request_id
        self._unwritten: deque[Task] = deque()
        self._num_taken = 0  # prompts
        self._in_line = False  # whether a streamed text has begun and not ended
        self._num_cut = 0  # prompts with an answer that was cut
        self._first_error = ""

    def run(self) -> int:
        """Run all prompts. Returns the exit status."""
        try:
            with self._bar as bar:
                while self._top_up() or self._running:
                    with self._interrupt.allowed():
                        outputs = self._step()
                    for output in outputs:
                        self._take(output)
                    self._file.flush()
                    bar.refresh()
        except KeyboardInterrupt:
            return self._interrupted()
        return self._ended()

    # ---- prompts

    def _top_up(self) -> bool:
        """Add prompts until the window is full. Returns whether more may follow."""
        while not self._feed.ended and not self._is_full():
            with self._interrupt.allowed():
                item = self._feed.take(wait=not self._running)
            if item is None:
                break
            task = Task(self._num_taken, item)
            self._num_taken += 1
            self._unwritten.append(task)
            error = item.error
            if item.request is not None:
                _, error = self._boundary.attempt(partial(self._add, task, item.request))
            if error is not None:
                self._fail(task, error, None)
        return not self._feed.ended

    def _is_full(self) -> bool:
        """Whether no prompt can be added now. --stream runs one prompt at a time."""
        if self._args.stream or not self._running:
            return bool(self._running)
        return len(self._unwritten) >= WINDOW * self._llm.config.max_num_seqs

    def _add(self, task: Task, given: RowRequest) -> None:
        """Add a prompt to the engine. Raises RequestError if it cannot be served."""
        params = replace(self._params, **given.params)
        if self._args.stream:
            _check_streamed(params)
        lora = task.item.lora
        adapter = self._adapters.default if lora is OF_FLAGS else self._adapters.named(lora)
        token_ids = given.prompt_token_ids if given.messages is None else self._template_ids(given)
        prompt = PromptParts(given.prompt, token_ids, given.cache_salt)
        request = self._llm.engine.make_request(str(task.index), prompt, params, lora_request=adapter)
        self._client.add(request)
        self._running[request.request_id] = task

    def _template_ids(self, given: RowRequest) -> list[int]:
        content_format = self._args.chat_template_content_format
        template = chat_template(given, self._llm.engine.tokenizer, self._template_text, content_format)
        return template.token_ids(given.messages or [])

    # ---- results

    def _step(self) -> list[RequestOutput]:
        """The outputs of one step. A failed step ends its requests, with outputs that give the error."""
        try:
            return self._client.step()
        except EngineError as error:
            if not error.outputs:
                raise
            say(f"nanovllm generate: {error}")
            return [output for output in error.outputs if isinstance(output, RequestOutput)]

    def _take(self, output: RequestOutput) -> None:
        if output.request_id not in self._running:
            return
        self._meter.count(output)
        if self._args.stream:
            self._bar.hold()
            self._write("".join(completion.text for completion in output.outputs))
            self._in_line = self._in_line or bool(output.outputs)
        if not output.finished:
            return
        task = self._running.pop(output.request_id)
        if any(o.finish_reason in ("error", "abort") for o in output.outputs):
            self._fail(task, output.error or "the request was ended by a failure of the engine", output)
            return
        make = partial(_json_result, task, output) if self._args.json else partial(_text_result, output)
        line, error = self._boundary.attempt(make)
        if line is None:
            self._fail(task, error or "", None)
            return
        self._meter.finished += 1
        if any(completion.finish_reason == "length" for completion in output.outputs):
            self._num_cut += 1
        self._in_line = False
        self._put(task, "\n" if self._args.stream else line)

    def _fail(self, task: Task, error: str, output: RequestOutput | None) -> None:
        """Write the error as the result of this prompt; the other prompts go on."""
        self._meter.failed += 1
        sentence = f"{task.item.source}: {error}"
        self._first_error = self._first_error or sentence
        if self._args.json:
            self._put(task, _json_result(task, output, error))
            return
        is_one_of_many = self._num_prompts != 1
        if is_one_of_many:
            say(f"nanovllm generate: {sentence}")
        self._put(task, "\n" * (is_one_of_many or self._in_line))
        self._in_line = False

    def _put(self, task: Task, line: str) -> None:
        """Keep the line of a prompt, and write those before which nothing is missing."""
        task.line = line
        self._bar.hold(False)
        while self._unwritten and self._unwritten[0].line is not None:
            self._write(self._unwritten.popleft().line or "")

    def _write(self, text: str) -> None:
        if text:
            with tqdm.external_write_mode() if self._is_above_bar else nullcontext():
                self._file.write(text)

    # ---- the end

    def _ended(self) -> int:
        meter = self._meter
        self._file.flush()
        if meter.finished and not self._args.quiet:
            cut = f"; {of(self._num_cut, meter.finished)} cut at --max-tokens or max_model_len" if self._num_cut else ""
            say(meter.summary() + cut)
            say(kv_line(self._llm.kv_stats(), meter.num_tokens))
        if not meter.failed:
            return 0
        total = meter.finished + meter.failed
        lead = f"{meter.failed:,} of {total:,} prompts failed; the first: " if total > 1 else ""
        say(f"nanovllm generate: error: {lead}{self._first_error}")
        return 1

    def _interrupted(self) -> int:
        """Write all finished results, also those after unfinished ones."""
        self._write("\n" * self._in_line + "".join(task.line or "" for task in self._unwritten))
        with suppress(BrokenPipeError):
            self._file.flush()
        finished = of(self._meter.finished, self._num_prompts)
        known = "" if self._num_prompts is not None else f" of at least {self._num_taken:,}"
        say(f"nanovllm generate: interrupted: {finished}{known} prompts were finished")
        return INTERRUPTED


def _text_result(output: RequestOutput) -> str:
    """Each sequence's text, and a line end."""
    return "".join(f"{completion.text}\n" for completion in output.outputs)


def _json_result(task: Task, output: RequestOutput | None, error: str | None = None) -> str:
    """One line of strict JSON: the result of the request, or its error."""
    result: dict[str, Any] = {"index": task.index}
    if task.item.given_id is not None:
        result["id"] = task.item.given_id
    result["source"] = task.item.source
    if error is not None:
        result["error"] = error
    if output is not None:
        result |= {
            "outputs": [
                {name: getattr(completion, name) for name in COMPLETION} | {"logprobs": _logprobs(completion.logprobs)}
                for completion in output.outputs
            ],
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "prompt_logprobs": _logprobs(output.prompt_logprobs),
            "metrics": output.metrics.as_dict(),
        }
    return json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n"


def _logprobs(rows: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[int, Any] | None] | None:
    if rows is None:
        return None
    return [None if row is None else {token: asdict(logprob) for token, logprob in row.items()} for row in rows]
