"""From a row of the input to a request, and from the engine's output to the columns that the row gains. No torch.

A row has one of `prompt`, `prompt_token_ids`, `messages` and `body`, the request of OpenAI's batch files. Sampling
parameters are columns under their own names, or together in the column `sampling_params`. All other columns are data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from nanovllm.apps.batch.openai_rows import body_columns
from nanovllm.apps.tool_calls.reading import Answer, Reading
from nanovllm.errors import RequestError, quoted, unknown_name_message
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import ChatTemplate

PROMPTS = ("prompt", "prompt_token_ids", "messages", "body")
TEMPLATE_OPTIONS = ("tools", "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message")
SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name not in ("output_kind", "logits_processors"))
OF_BODIES = ("body", "url", "method")  # the columns of a line of OpenAI's batch files
OTHERS = ("sampling_params", "cache_salt", "url", "method")
USED_COLUMNS = frozenset((*PROMPTS, *TEMPLATE_OPTIONS, *SAMPLING, *OTHERS))
OF_REQUESTS = USED_COLUMNS | {"add_special_tokens"}  # what a body may give
AS_JSON = (
    *("messages", "body", "sampling_params", "tools", "chat_template_kwargs", "documents", "structured_outputs"),
    "logit_bias",
)
RESULT_COLUMNS = ("row_index", "generated_text", "finish_reason", "outputs", "prompt_logprobs", "usage", "error")


@dataclass(slots=True)
class Row:
    """A row of the input."""

    index: int  # its number among all rows of the job, from 0
    source: str  # file and line, or row of a table, for messages
    columns: dict[str, Any]  # those that make the request
    data: Any  # the row with all its columns, as the writer of the same format takes it
    error: str | None = None  # why it cannot be read


@dataclass(slots=True)
class RowRequest:
    """The request of a row. Exactly one of prompt, prompt_token_ids and messages is given."""

    index: int
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = field(default_factory=dict)  # sampling parameters that the row gives
    template_options: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    cache_salt: str | None = None
    add_special_tokens: bool | None = None  # the tokenizer's; None adds them to texts, not to what a template makes
    # Of a body: how calls are read from the answer.
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


@dataclass(slots=True)
class RowResult:
    """The columns that a row gains, and what it took."""

    index: int
    columns: dict[str, Any]  # without row_index
    generated_tokens: int = 0
    metrics: RequestMetrics | None = None  # None if it made no request

    @property
    def error(self) -> str | None:
        error: str | None = self.columns["error"]
        return error


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row becomes a request."""

    prompt_column: str = "prompt"  # the column that is the prompt
    is_chat: bool = False  # whether a prompt is a user's message
    system: str | None = None  # a message before every conversation
    model_names: tuple[str, ...] = ()  # what `body.model` may name
    has_max_tokens: bool = False  # whether the job itself limits max_tokens

    @property
    def used_columns(self) -> frozenset[str]:
        return (USED_COLUMNS - {"prompt"}) | {self.prompt_column}

    def request(self, row: Row) -> RowRequest:
        """The request of a row. Raises RequestError, which says what is wrong with it."""
        if row.error is not None:
            raise RequestError(row.error)
        used = self.used_columns
        columns = {name: value for name, value in row.columns.items() if name in used}
        if self.prompt_column in columns:
            columns["prompt"] = columns.pop(self.prompt_column)
        given = {name: _read_json(name, value) for name, value in columns.items() if value is not None}
        prompts = [name for name in PROMPTS if name in given]
        if len(prompts) != 1:
            has = " and ".join(prompts) or "none"
            wanted = f"{self.prompt_column}, prompt_token_ids, messages (in batches also body)"
            raise RequestError(f"it needs exactly one of {wanted}, and has {has}")
        if "body" in given:
            beside = [name for name in given if name not in OF_BODIES]
            if beside:
                raise RequestError(f"{beside[0]} beside a body has no effect: give it in the body")
            body = given["body"]
            request = self._checked(row.index, body_columns(given, OF_REQUESTS, self.model_names, self.has_max_tokens))
            choice = body.get("tool_choice")
            parallel = body.get("parallel_tool_calls")
            return replace(request, tool_choice=choice, parallel_tool_calls=parallel)
        return self._checked(row.index, given)

    def _checked(self, index: int, given: dict[str, Any]) -> RowRequest:
        prompt = given.get("prompt")
        messages = given.get("messages")
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"{self.prompt_column} must be text, got {quoted(prompt)}")
        if "messages" in given and not (isinstance(messages, list) and messages and all(map(_is_object, messages))):
            raise RequestError(f"messages must be a list of objects with role and content, got {quoted(messages)}")
        if self.is_chat and messages is None:
            if prompt is None:
                raise RequestError("prompt_token_ids are no message, and --chat needs one: give a prompt or messages")
            prompt, messages = None, [{"role": "user", "content": prompt}]
        if messages is not None and self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        options = {name: given[name] for name in TEMPLATE_OPTIONS if name in given}
        if options and messages is None:
            raise RequestError(f"{next(iter(options))} is for a chat template: give messages")
        token_ids = given.get("prompt_token_ids")
        if token_ids is not None and not isinstance(token_ids, list):
            raise RequestError(f"prompt_token_ids must be a list of token ids, got {quoted(token_ids)}")
        adds = given.get("add_special_tokens")
        if not isinstance(adds, bool | None):
            raise RequestError(f"add_special_tokens={quoted(adds)}: must be true or false")
        salt = given.get("cache_salt")
        return RowRequest(index, prompt, token_ids, messages, _params(given), options, salt, adds)


def chat_template(request: RowRequest, tokenizer: Any, template: str | None, content_format: str) -> ChatTemplate:
    """What renders the messages of a row. template: the text of one, instead of the tokenizer's."""
    options = dict(request.template_options)
    options["template_kwargs"] = options.pop("chat_template_kwargs", None)
    if options.get("continue_final_message"):
        options.setdefault("add_generation_prompt", False)
    return ChatTemplate(tokenizer, template, content_format=content_format, **options)


def _read_json(name: str, value: Any) -> Any:
    """The value of a column, which may be JSON as text where a structure is needed, as tables often have it."""
    if name not in AS_JSON or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is text that is not JSON: {error}") from None


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    together = given.get("sampling_params", {})
    if not isinstance(together, Mapping):
        raise RequestError(f"sampling_params must be an object, got {quoted(together)}")
    for name in together:
        if name not in SAMPLING:
            raise RequestError(unknown_name_message("sampling parameter", name, SAMPLING))
    params = {name: given[name] for name in SAMPLING if name in given}
    # A table has null in every row that does not give a parameter.
    params |= {name: value for name, value in together.items() if value is not None}
    if isinstance(params.get("logit_bias"), Mapping):
        params["logit_bias"] = {
            int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 19 else token: bias
            for token, bias in params["logit_bias"].items()
            if bias is not None
        }
    return params


# ---- results


def failed_result(index: int, error: str) -> RowResult:
    """The result of a row that failed."""
    return RowResult(index, {name: None for name in RESULT_COLUMNS[1:]} | {"error": error})


def row_result(index: int, output: RequestOutput, reader: Reading | None = None) -> RowResult:
    """The result of a finished request. reader: of the messages that its answers are."""
    failed = any(completion.finish_reason in ("error", "abort") for completion in output.outputs)
    answers = [_completion(completion, output, reader) for completion in output.outputs]
    first = answers[0]
    prompt = len(output.prompt_token_ids)
    generated = sum(len(one.token_ids) for one in output.outputs)
    columns = {
        "generated_text": None if failed else first["text"],
        "finish_reason": first["finish_reason"],
        "outputs": answers,
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
        "error": (output.error or "the request was ended by a failure of the engine") if failed else None,
    }
    return RowResult(index, columns, generated, output.metrics)


def _completion(completion: CompletionOutput, output: RequestOutput, reader: Reading | None) -> dict[str, Any]:
    answer = Answer(completion.text, completion.finish_reason, None)
    if reader is not None:
        answer = reader.read(completion.text, completion.finish_reason, output.prompt_token_ids)
    return {
        "index": completion.index,
        "text": answer.text,
        "message": answer.message,
        "token_ids": list(completion.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": None if completion.stop_reason is None else str(completion.stop_reason),
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": _logprobs(completion.logprobs),
    }


def _logprobs(positions: Sequence[Mapping[int, Logprob] | None] | None) -> list[list[dict[str, Any]] | None] | None:
    """Log-probabilities as lists, since a table has no keys that differ from row to row."""
    if positions is None:
        return None
    return [
        None if tokens is None else [{"token_id": token, **asdict(logprob)} for token, logprob in tokens.items()]
        for tokens in positions
    ]
