"""What all endpoints share: the engine, settings, admission and metrics, how a request is read, run and answered."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from nanovllm import AsyncLLM
from nanovllm.apps.server.admission import Admission, check_model, read_body
from nanovllm.apps.server.async_llm import RequestStream
from nanovllm.apps.server.kv_events import KVCacheEvents
from nanovllm.apps.server.metrics import ServerMetrics
from nanovllm.apps.server.protocol import Body, SamplingFields
from nanovllm.apps.server.responses import (
    DONE,
    LONGEST,
    ApiError,
    EventStream,
    event,
    invalid,
    to_json,
    unless_disconnected,
)
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.apps.tool_calls.reading import Formats
from nanovllm.errors import RequestError, one_line, quoted, unknown_name_message
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptParts

logger = logging.getLogger(__name__)

LONGEST_ID = 128
MOST_ERRORS = 1000  # of a body that are looked at
AnyBody = TypeVar("AnyBody", bound=Body)
T = TypeVar("T")


class Answer(Protocol):
    """Turns outputs into the answer of one endpoint."""

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The fields of the parts that an output of prompt `number` makes in a stream."""

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The fields of the answer in one piece, from the last outputs of all prompts."""


@dataclass(frozen=True)
class Serving:
    """One server's engine with everything around it."""

    engine: AsyncLLM
    settings: ServerSettings
    admission: Admission
    metrics: ServerMetrics
    kv_events: KVCacheEvents
    defaults: SamplingParams  # those that the checkpoint recommends; max_tokens is None if it recommends none
    formats: Formats  # of tool calls
    started: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """The checked body. Raises ApiError that names the field."""
        raw = await read_body(request, self.settings.max_body_bytes)
        try:
            body = kind.read(raw)
        except ValidationError as error:
            raise _refusal(error, kind) from None
        check_model(getattr(body, "model", None), self.settings.names)
        return body

    async def in_text_thread(self, body: Body, function: Callable[[], T]) -> T:
        """The result of `function()`, which tokenizes or renders what is in the body, while the event loop goes on."""
        return await self.engine.in_text_thread(function, body.num_bytes)

    async def respond(
        self,
        request: Request,
        body: SamplingFields,
        params: SamplingParams,
        envelope: Envelope,
        answer: Answer,
        read_prompts: Callable[[], list[PromptParts]],
        num_prompts: int = 1,
    ) -> Response:
        """The answer of the engine to a request, whole or as events. `read_prompts` is called in the text thread.

        Raises ClientDisconnect if the client goes away before it begins.
        """

        async def work() -> Response:
            with ExitStack() as held:  # the prompts' places in the queue, and the requests until they have ended
                held.enter_context(self.admission.admitted(num_prompts))
                prompts = await self.in_text_thread(body, read_prompts)
                others = {"priority": body.priority, "lora_request": self.settings.adapter(body.model)}
                numbered = {f"{envelope.request_id}-{i}": prompt for i, prompt in enumerate(prompts)}
                streams = await self.engine.add_all(numbered, params, **others)
                for stream in streams:
                    held.callback(stream.close)
                if body.stream:
                    return EventStream(_events(streams, envelope, answer), held.pop_all())
                outputs = [_checked([output async for output in stream][-1]) for stream in streams]
            for number, output in enumerate(outputs):
                envelope.count(number, output)
            return Response(to_json(envelope.complete(answer.complete(outputs))), media_type="application/json")

        response: Response | None = await unless_disconnected(request.receive, work())
        if response is None:
            raise ClientDisconnect
        return response


async def _events(streams: Sequence[RequestStream], envelope: Envelope, answer: Answer) -> AsyncGenerator[bytes, None]:
    for number, stream in enumerate(streams):  # the later ones collect their outputs meanwhile
        async for output in stream:
            envelope.count(number, _checked(output))
            for chunk in answer.chunks(number, output):
                yield event(envelope.chunk(chunk))
    if envelope.sends_usage:
        yield event(envelope.complete({"choices": []}))
    yield DONE


def _checked(output: RequestOutput) -> RequestOutput:
    """The output. Raises ApiError for a request that has failed.

    A failed step is the engine's own, and the request may be sent again. Every other error is the request's: it would
    fail again, and clients repeat what is answered 500.
    """
    if output.step_failed:
        message = "the engine failed while it computed this answer, and goes on: send the request again"
        raise ApiError(500, message, code="engine_error")
    if output.error is not None:
        logger.warning("request %s failed: %s", quoted(output.request_id), one_line(output.error, LONGEST))
        raise invalid(f"the request failed: {output.error}", code="request_failed")
    return output


class Envelope:
    """What every part of an answer repeats, and the tokens: of the prompts, found in the prefix cache, generated."""

    def __init__(self, request_id: str, kind: str, model: str, request: SamplingFields) -> None:
        self.request_id = request_id
        self._latest: dict[int, RequestOutput] = {}  # by the number of the prompt
        self._completion_tokens = 0
        self._fields = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        options = request.stream_options
        self.sends_usage = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats

    def count(self, number: int, output: RequestOutput) -> None:
        """Count an output of prompt `number` that is final, or holds only what is new."""
        self._latest[number] = output
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def chunk(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A part of a streamed answer. With include_usage, all but the last one have a usage of null, as OpenAI's."""
        part = {**self._fields, **fields}
        if self.sends_usage:
            part["usage"] = self._usage() if self._always else None
        return part

    def complete(self, fields: dict[str, Any]) -> dict[str, Any]:
        """An answer in one piece, or the last part of a stream."""
        return {**self._fields, **fields, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        outputs = self._latest.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }
        drafted = sum(output.metrics.drafted_tokens for output in outputs)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        if drafted:  # by speculative decoding
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            usage["completion_tokens_details"] = details
        return usage


def new_id(prefix: str, given: str | None) -> str:
    """An identifier of an answer, with the one that the request brought, if any. Raises RequestError."""
    if given is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not given or len(given) > LONGEST_ID or not given.isprintable():
        raise RequestError(f"request_id={quoted(given)}: must be 1 to {LONGEST_ID} printable characters")
    return f"{prefix}-{given}"


def _refusal(error: ValidationError, kind: type[Body]) -> ApiError:
    """The first error of a body, as a sentence with the name of the field."""
    if error.error_count() > MOST_ERRORS:
        return invalid(f"the body has {error.error_count():,} wrong or unknown fields: send those of the schema only")
    errors = error.errors(include_url=False, include_context=False)
    # A misspelt field before the one that it leaves out.
    first = min(errors, key=lambda wrong: wrong["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    where = ".".join(path) or "the body"
    if first["type"] in ("json_invalid", "missing"):  # whose input is the whole body
        return invalid(f"{where}: {first['msg']}", ".".join(path) or None)
    if first["type"] == "extra_forbidden":
        known = [field.alias or own for own, field in kind.model_fields.items()]
        message = unknown_name_message("field", where, known) if len(path) == 1 else f"unknown field {where!r}"
        return invalid(f"{message}; a field that is not supported has to be left out", where)
    reasons = dict.fromkeys(wrong["msg"] for wrong in errors if wrong["loc"][:1] == first["loc"][:1])
    if len(reasons) > 1:  # the field may be of several types
        return invalid(f"{path[0]}: {' or: '.join(list(reasons)[:4])}", path[0])
    return invalid(f"{where}: {first['msg']}; got {quoted(first['input'])}", ".".join(path) or None)
