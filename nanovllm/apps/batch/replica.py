"""One engine that answers rows, wherever it runs: in the command's process, in an actor of Ray, in Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from nanovllm import EngineClient
from nanovllm.apps.batch.rows import Row, RowFormat, RowRequest, RowResult, chat_template, failed_result, row_result
from nanovllm.apps.tool_calls.formats import PARSERS
from nanovllm.apps.tool_calls.reading import Formats, Reading, check_shown
from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError, as_request_error, one_line, quoted
from nanovllm.outputs import RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams, derived_seed
from nanovllm.text.prompts import CONTENT_FORMATS, PromptParts

LONGEST = 2000  # characters of an error
WINDOW = 2  # most rows in an engine, as a multiple of max_num_seqs, so that one is always ready to run

SeedOf = Callable[[Row, RowRequest], int]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What every replica of a job is made from: plain data.

    sampling: parameters of rows that do not give their own. chat_template: the text of one, instead of the tokenizer's.
    chat_template_content_format: see `ChatTemplate`. tool_call_parser: how calls are read, see `Formats`.
    """

    model: str
    engine_arguments: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    tool_call_parser: str = "auto"

    def __post_init__(self) -> None:
        if self.engine_arguments.get("enable_lora"):
            raise ConfigError("enable_lora=True: rows of a batch cannot name adapters yet; leave it out")
        if self.engine_arguments.get("distributed_executor_backend") == "external_launcher":
            raise ConfigError(
                "distributed_executor_backend='external_launcher': a replica starts its ranks; leave it out"
            )
        for name, known in (("chat_template_content_format", CONTENT_FORMATS), ("tool_call_parser", PARSERS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={quoted(value)}: must be one of {', '.join(map(repr, known))}")


class Replica:
    """An engine that answers rows. An error of a row is its result.

    A row without a seed gets the one that `LLM.generate` gives to the prompt of its number. So its answer depends on
    neither the replica nor the other rows.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        from nanovllm import LLM  # imports torch, which takes seconds

        self.llm = LLM(settings.model, **settings.engine_arguments)
        defaults = self.llm.get_default_sampling_params()
        self._params = replace(defaults, **settings.sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        self._client = EngineClient(self.llm.engine)
        self._template_text = settings.chat_template
        self._content_format = settings.chat_template_content_format
        self._formats = Formats(self.llm.engine.tokenizer, settings.tool_call_parser)
        self._readers: dict[int, Reading] = {}  # of conversations that run, by the index of the row

    def answers(
        self, rows: Iterable[Row], row_format: RowFormat, seed_of: SeedOf | None = None
    ) -> Iterator[list[tuple[Row, RowResult]]]:
        """Answer rows; after each step, yields those that have ended, with their results.

        seed_of: the seed of a row that has none; by default it follows from the engine's seed and the row's index.
        Raises EngineError if no step can run any more, as when a tensor-parallel rank has died. Then the rows that run
        have no results: another engine can run them.
        """
        rows = iter(rows)
        running: dict[int, Row] = {}
        try:
            while True:
                ended = []
                for row in islice(rows, WINDOW * self.llm.config.max_num_seqs - len(running)):
                    error = self._add(row, row_format, seed_of)
                    if error is None:
                        running[row.index] = row
                    else:
                        ended.append((row, failed_result(row.index, error)))
                if running:
                    ended += [(running.pop(result.index), result) for result in self._step()]
                elif not ended:
                    return
                for row, result in ended:
                    if result.error is not None:
                        result.columns["error"] = f"{row.source}: {result.error}"
                yield ended
        finally:
            self._drop_rows()

    def _add(self, row: Row, row_format: RowFormat, seed_of: SeedOf | None) -> str | None:
        """Start a row. Returns why it cannot be served."""
        try:
            with as_request_error("the row cannot be read"):
                request = row_format.request(row)
                params = replace(self._params, **request.params)
                if params.seed is None:
                    engine_seed = self.llm.config.seed
                    seed = derived_seed(engine_seed, "prompt", row.index) if seed_of is None else seed_of(row, request)
                    params = replace(params, seed=seed)
                self._start(request, params)
        except (RequestError, ConfigError, ModelError) as error:  # not of the engine itself
            return one_line(str(error), LONGEST)
        return None

    def _start(self, request: RowRequest, params: SamplingParams) -> None:
        text = request.prompt
        token_ids = request.prompt_token_ids
        reader = None
        adds = request.add_special_tokens
        if request.messages is not None:
            template = chat_template(request, self.llm.engine.tokenizer, self._template_text, self._content_format)
            (rendered,) = template.prompts(request.messages)
            text, token_ids = (rendered.text, None) if adds else (None, rendered.token_ids)
            reader = self._reader(request, params)
            if reader is not None and reader.shows_special:
                params = replace(params, skip_special_tokens=False)
        tokenizer = self.llm.engine.tokenizer
        if text is not None and adds is False and tokenizer is not None:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        prompt = PromptParts(text, token_ids, request.cache_salt)
        self._client.add(self.llm.engine.make_request(str(request.index), prompt, params))
        if reader is not None:
            self._readers[request.index] = reader

    def _step(self) -> list[RowResult]:
        """Run one step. Returns the results of the rows that have ended; a step that fails ends its rows."""
        try:
            outputs = self._client.step()
        except EngineError as error:
            self.llm.engine.check_health()
            if not error.outputs:
                raise
            outputs = [output for output in error.outputs if isinstance(output, RequestOutput)]
        finished = [output for output in outputs if output.finished]
        return [row_result(int(out.request_id), out, self._readers.pop(int(out.request_id), None)) for out in finished]

    def _drop_rows(self) -> None:
        """End all rows that still run, without results."""
        self._readers.clear()
        self._client.close()
        self._client = EngineClient(self.llm.engine)

    def close(self) -> None:
        """Release the engine."""
        self._client.close()
        self.llm.close()

    def _reader(self, request: RowRequest, params: SamplingParams) -> Reading | None:
        """What reads the answers to a conversation, if they may have more than content."""
        tools = request.template_options.get("tools") or []
        shown = self._formats.shown(self._template_text)
        choice = request.tool_choice
        skips_special = params.skip_special_tokens
        if tools and choice != "none":
            check_shown(shown, choice)
        parallel = request.parallel_tool_calls
        reading = self._formats.reading(shown.form, tools, choice, parallel, skips_special=skips_special)
        return reading if reading.finds_parts else None
