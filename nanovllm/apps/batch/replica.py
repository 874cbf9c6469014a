"""One engine that answers rows, wherever it runs: in the command's process, in an actor of Ray, in Ray Data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm import EngineClient
from nanovllm.apps.batch.rows import RowRequest, RowResult, failed_result, row_result
from nanovllm.apps.tool_calls.answers import AnswerReader
from nanovllm.apps.tool_calls.detection import check_shown
from nanovllm.apps.tool_calls.formats import PARSERS
from nanovllm.apps.tool_calls.reading import Formats
from nanovllm.errors import ConfigError, EngineError, ModelError, RequestError, as_request_error, one_line, quoted
from nanovllm.outputs import RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams, derived_seed
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import CONTENT_FORMATS, PromptParts

LONGEST = 2000  # characters of an error


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
        if "output_kind" in self.sampling:
            raise ConfigError("output_kind: a row has one result, when it has ended; leave it out")


class Replica:
    """An engine and the rows that it runs. Errors of a row become its result.

    A row without a seed gets one from the engine's seed and its index, so its answer depends on neither the replica nor
    the other rows. It is the seed that `LLM.generate` gives to the prompt of that number.
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
        self._readers: dict[int, AnswerReader] = {}  # of conversations that run, by the index of the row

    @property
    def has_work(self) -> bool:
        return bool(self._client.pending)

    def add(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        """Start rows. Returns the results of those that cannot be served."""
        failed = []
        for request in requests:
            try:
                with as_request_error("unexpected error"):
                    self._add(request)
            except (RequestError, ConfigError, ModelError) as error:  # not of the engine itself
                failed.append(failed_result(request.index, one_line(str(error), LONGEST)))
        return failed

    def step(self) -> list[RowResult]:
        """Run one step. Returns the results of the rows that ended; a step that fails ends its rows.

        Raises EngineError if no step can run any more, as when a tensor-parallel rank has died. Then the rows have no
        results: another engine can run them.
        """
        try:
            outputs = self._client.step()
        except EngineError as error:
            self.llm.engine.check_health()
            if not error.outputs:
                raise
            outputs = [output for output in error.outputs if isinstance(output, RequestOutput)]
        return [self._result(int(output.request_id), output) for output in outputs if output.finished]

    def _result(self, index: int, output: RequestOutput) -> RowResult:
        return row_result(index, output, self._readers.pop(index, None))

    def drop_rows(self) -> None:
        """End all rows without results."""
        self._readers.clear()
        self._client.close()
        self._client = EngineClient(self.llm.engine)

    def close(self) -> None:
        """Release the engine."""
        self._client.close()
        self.llm.close()

    def _add(self, request: RowRequest) -> None:
        params = replace(self._params, **request.params)
        if params.seed is None:
            params = replace(params, seed=derived_seed(self.llm.config.seed, "prompt", request.index))
        text = request.prompt
        token_ids = request.prompt_token_ids
        reader = None
        adds = request.add_special_tokens
        if request.messages is not None:
            (rendered,) = self._template(request).prompts(request.messages)
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

    def _template(self, request: RowRequest) -> ChatTemplate:
        options = dict(request.template_options)
        options["template_kwargs"] = options.pop("chat_template_kwargs", None)
        if options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", False)
        options["content_format"] = self._content_format
        return ChatTemplate(self.llm.engine.tokenizer, self._template_text, **options)

    def _reader(self, request: RowRequest, params: SamplingParams) -> AnswerReader | None:
        """What reads the answers to a conversation, if they may have more than content."""
        tools = request.template_options.get("tools") or []
        shown = self._formats.shown(self._template_text)
        choice = request.tool_choice
        skips_special = params.skip_special_tokens
        if tools:
            check_shown(shown, choice)
        reading = self._formats.reading(shown.form, tools, choice, skips_special=skips_special)
        return AnswerReader(reading, choice, request.parallel_tool_calls) if reading.finds_parts else None
