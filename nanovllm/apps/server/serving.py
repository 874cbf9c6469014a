"""What all endpoints share: the engine, settings, admission, metrics, and how a request is read and run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from nanovllm import AsyncLLM
from nanovllm.apps.server.generation import Generation
from nanovllm.apps.server.http_errors import ApiError, invalid
from nanovllm.apps.server.kv_events import KVCacheEvents
from nanovllm.apps.server.limits import Admission, check_model, read_body
from nanovllm.apps.server.metrics import ServerMetrics
from nanovllm.apps.server.protocol import Body, SamplingFields
from nanovllm.apps.server.settings import ServerSettings
from nanovllm.errors import quoted
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptParts
from nanovllm.vllm_names import unknown_name

AnyBody = TypeVar("AnyBody", bound=Body)
T = TypeVar("T")


@dataclass(frozen=True)
class Serving:
    """One server's engine with everything around it."""

    engine: AsyncLLM
    settings: ServerSettings
    admission: Admission
    metrics: ServerMetrics
    kv_events: KVCacheEvents
    defaults: SamplingParams  # those that the checkpoint recommends
    started: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """The checked body. Raises ApiError that names the field."""
        raw = await read_body(request, self.settings)
        try:
            body = kind.read(raw)
        except ValidationError as error:
            raise _refusal(error, kind) from None
        check_model(getattr(body, "model", None), self.settings.names)
        return body

    async def in_text_thread(self, body: Body, function: Callable[[], T]) -> T:
        """The result of `function()`, which tokenizes or renders what is in the body, while the event loop goes on."""
        return await self.engine.in_text_thread(function, body.num_bytes)

    async def start(
        self,
        held: ExitStack,
        prompts: Sequence[PromptParts],
        params: SamplingParams,
        request_id: str,
        body: SamplingFields,
    ) -> Generation:
        """Start the engine's requests. `held` is released when the generation is closed."""
        generation = Generation(held)
        adapter = self.settings.adapter(body.model)
        await generation.start(self.engine, prompts, params, request_id, body.priority, adapter)
        return generation


def _refusal(error: ValidationError, kind: type[Body]) -> ApiError:
    """The first error of a body, as a sentence with the name of the field."""
    errors = error.errors(include_url=False, include_context=False)
    errors.sort(
        key=lambda each: each["type"] != "extra_forbidden"
    )  # a misspelt field before the one that it leaves out
    first = errors[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    path = [str(part) for part in first["loc"]]
    name = path[0] if path else None
    if first["type"] == "extra_forbidden":
        known = [field.alias or own for own, field in kind.model_fields.items()]
        message = unknown_name("field", path[-1], known) if len(path) == 1 else f"unknown field {'.'.join(path)!r}"
        return invalid(f"{message}; a field that is not supported has to be left out", ".".join(path))
    if name is None:
        return invalid("the body must be a JSON object")
    if first["type"] == "missing":
        return invalid(f"the field {'.'.join(path)!r} is missing", ".".join(path))
    reasons = dict.fromkeys(each["msg"] for each in errors if each["loc"][:1] == first["loc"][:1])
    one_kind = len(reasons) == 1
    where = ".".join(path) if one_kind else name
    value = quoted(first["input"]) if one_kind else "another value"
    return invalid(f"{where}: {' or: '.join(list(reasons)[:4])}; got {value}", where)
