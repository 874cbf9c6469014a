"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.events import DONE, EventStream, answer, event, to_json
from nanovllm.apps.server.generation import Generation
from nanovllm.apps.server.http_errors import invalid
from nanovllm.apps.server.limits import check_count
from nanovllm.apps.server.logprobs import LegacyLogprobs, prompt_logprobs
from nanovllm.apps.server.protocol import CompletionRequest
from nanovllm.apps.server.request_prompts import completion_prompt, prompts_of
from nanovllm.apps.server.sampling import completion_params
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.server.usage import Envelope, new_id
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.text.tokenizer import Tokenizer


async def create_completion(serving: Serving, request: Request) -> Response:
    body = await serving.read(request, CompletionRequest)
    return await answer(request, _respond(serving, body))


async def _respond(serving: Serving, body: CompletionRequest) -> Response:
    params = completion_params(body, serving.defaults)
    request_id = new_id("cmpl", body.request_id)
    given, llm = prompts_of(body), serving.engine.llm
    check_count(len(given), serving.settings)
    if body.echo and llm.engine.tokenizer is None:
        raise invalid("echo needs a tokenizer, and the model has none: leave it out", "echo")
    with ExitStack() as held:
        held.enter_context(serving.admission.admitted(len(given)))
        prompts = await serving.in_text_thread(body, lambda: [completion_prompt(serving, p, body) for p in given])
        generation = await serving.start(held.pop_all(), prompts, params, request_id, body)
    envelope = Envelope(request_id, "text_completion", serving.settings.answer_name(body.model), body)
    completions = Completions(body, llm.engine.tokenizer)
    if body.stream:
        return EventStream(_events(generation, completions, envelope))
    try:
        choices = []
        for number, output in enumerate(await generation.final()):
            envelope.usage.count(number, output)
            choices += completions.choices(number, output)
    finally:
        generation.close()
    return Response(to_json(envelope.complete(choices)), media_type="application/json")


async def _events(generation: Generation, completions: Completions, envelope: Envelope) -> AsyncGenerator[bytes, None]:
    try:
        async for number, output in generation.outputs():
            envelope.usage.count(number, output)
            choices = completions.choices(number, output)
            if choices:
                yield event(envelope.chunk(choices))
        if envelope.sends_usage:
            yield event(envelope.usage_chunk())
        yield DONE
    finally:
        generation.close()


class Completions:
    """Turns outputs, complete ones or what is new, into choices."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by the index of the choice; these have begun
        self._scored: dict[int, Sequence[Mapping[int, Logprob] | None]] = {}  # log-probabilities of each prompt

    def choices(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of an output of prompt `number`."""
        self._scored.setdefault(number, output.prompt_logprobs or ())
        return [self._choice(number, output, completion) for completion in output.outputs]

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body = self._body
        index = number * (body.n or 1) + completion.index
        begins = index not in self._logprobs
        logprobs = self._logprobs.setdefault(
            index, LegacyLogprobs(self._tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids))
        )
        token_ids = completion.token_ids
        positions: Sequence[Mapping[int, Logprob] | None] | None = completion.logprobs
        text = completion.text
        if begins and body.echo and self._tokenizer is not None:
            text = self._tokenizer.decode(output.prompt_token_ids) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            if positions is not None:
                positions = [*self._scored[number], *positions]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if positions is None else logprobs.piece(token_ids, positions),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None and begins:
            choice["prompt_logprobs"] = prompt_logprobs(self._scored[number])
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if begins else None
        return choice
