"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.logprobs import Echo, LegacyLogprobs, Shown, places_of, prompt_logprobs
from nanovllm.apps.server.protocol import CompletionRequest
from nanovllm.apps.server.requests import completion_params, completion_prompt, prompts_of
from nanovllm.apps.server.responses import invalid
from nanovllm.apps.server.serving import Envelope, Serving, new_id
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.text.tokenizer import Tokenizer


async def create_completion(serving: Serving, request: Request) -> Response:
    """Complete one prompt or several"""
    body = await serving.read(request, CompletionRequest)
    settings = serving.settings
    tokenizer = serving.engine.llm.engine.tokenizer
    given = prompts_of(body)
    most = min(settings.max_prompts, settings.max_queue)
    if not 1 <= len(given) <= most:
        raise invalid(f"prompt holds {len(given)} prompts and must hold 1 to {most}", "prompt")
    if body.echo and tokenizer is None:
        raise invalid("echo needs a tokenizer, and the model has none: leave it out", "echo")
    request_id = new_id("cmpl", body.request_id)
    return await serving.respond(
        request,
        body,
        completion_params(body, serving.defaults),
        Envelope(request_id, "text_completion", settings.answer_name(body.model), body),
        Completions(body, tokenizer),
        lambda: [completion_prompt(serving, prompt, body) for prompt in given],
        len(given),
    )


class Completions:
    """Turns outputs, complete ones or what is new, into choices."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer | None) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._skip_special_tokens = body.skip_special_tokens is not False
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by the index of the choice; these have begun
        self._scored: dict[int, Sequence[Mapping[int, Logprob] | None]] = {}  # log-probabilities of each prompt
        self._echoes: dict[int, Echo] = {}  # of each prompt

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = self._choices(number, output)
        return [{"choices": choices}] if choices else []

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {
            "choices": [choice for number, output in enumerate(outputs) for choice in self._choices(number, output)]
        }

    def _choices(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._scored.setdefault(number, output.prompt_logprobs or ())
        return [self._choice(number, output, completion) for completion in output.outputs]

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body = self._body
        index = number * (body.n or 1) + completion.index
        begins = index not in self._logprobs
        if begins:
            prompt = output.prompt_token_ids
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs[index] = LegacyLogprobs(
                self._tokenizer, body.logprobs or 0, as_ids, prompt, self._skip_special_tokens
            )
        echo = self._echo(number, output) if begins and body.echo else None
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text if echo is None else echo.text + completion.text,
            "logprobs": None if completion.logprobs is None else self._piece(number, index, echo, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None and begins:
            choice["prompt_logprobs"] = prompt_logprobs(self._scored[number])
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if begins else None
        return choice

    def _piece(self, number: int, index: int, echo: Echo | None, completion: CompletionOutput) -> Shown:
        """The log-probabilities of what is new, after those of the prompt if it is echoed here."""
        logprobs = self._logprobs[index]
        ends = completion.finish_reason is not None
        before = {} if echo is None else logprobs.echo(echo, self._scored[number])
        new = logprobs.piece(completion.token_ids, completion.logprobs or (), completion.text, ends=ends)
        return {name: [*before.get(name, ()), *values] for name, values in new.items()}

    def _echo(self, number: int, output: RequestOutput) -> Echo:
        """The prompt's text as it was given, or that of its tokens."""
        if number not in self._echoes:
            assert self._tokenizer is not None  # the request was refused without one
            text = output.prompt
            token_ids = output.prompt_token_ids
            skip = self._skip_special_tokens
            if text is None:
                text = self._tokenizer.decode(token_ids, skip_special_tokens=skip)
            is_scored = self._body.logprobs is not None
            places = places_of(self._tokenizer, token_ids, text, skip) if is_scored else []
            self._echoes[number] = Echo(text, token_ids, places)
        return self._echoes[number]
