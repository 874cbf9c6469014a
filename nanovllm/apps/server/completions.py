"""`/v1/completions`, and log-probabilities in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.protocol import CompletionRequest
from nanovllm.apps.server.requests import completion_params, completion_prompt, prompts_of
from nanovllm.apps.server.responses import invalid
from nanovllm.apps.server.serving import Envelope, Serving, new_id
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


async def create_completion(serving: Serving, request: Request) -> Response:
    """Complete one prompt or several"""
    body = await serving.read(request, CompletionRequest)
    settings, tokenizer, given = serving.settings, serving.engine.llm.engine.tokenizer, prompts_of(body)
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
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by the index of the choice; these have begun
        self._scored: dict[int, Sequence[Mapping[int, Logprob] | None]] = {}  # log-probabilities of each prompt

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = self._choices(number, output)
        return [{"choices": choices}] if choices else []

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"choices": [each for number, output in enumerate(outputs) for each in self._choices(number, output)]}

    def _choices(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
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
            text = self._echo(output, self._tokenizer) + text
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

    def _echo(self, output: RequestOutput, tokenizer: Tokenizer) -> str:
        """The prompt's text as it was given, or that of its tokens."""
        if output.prompt is not None:
            return output.prompt
        skip_special_tokens = self._body.skip_special_tokens is not False
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip_special_tokens)


class LegacyLogprobs:
    """The `logprobs` of completions, piece by piece: `text_offset` goes on where the last piece ended."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, list[Any]]:
        """The next tokens. A position without log-probabilities, as the first of a prompt, has None."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._text(token_id, None if position is None else position[token_id])
            found["text_offset"].append(self._offset)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if position is None else finite(position[token_id].logprob))
            found["top_logprobs"].append(None if position is None else self._top(position, token_id))
            self._offset += len(text)
        return found

    def _top(self, position: Mapping[int, Logprob], token_id: int) -> dict[str, float]:
        """The most likely tokens, and the sampled one, which comes first among tokens of the same text."""
        ranked = {token_id: position[token_id], **dict(most_likely(position, self._num_top))}
        top: dict[str, float] = {}
        for other, entry in sorted(ranked.items(), key=lambda item: -item[1].logprob):
            top.setdefault(self._text(other, entry), finite(entry.logprob))
        return top

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if entry is not None:
            return token_text(token_id, entry.decoded_token, self._as_token_ids)
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return token_text(token_id, text, self._as_token_ids)


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]], num_top: int, as_token_ids: bool
) -> dict[str, Any]:
    """The `logprobs` of chat completions."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [_entry(other, entry, as_token_ids) for other, entry in most_likely(position, num_top)]
        content.append({**_entry(token_id, position[token_id], as_token_ids), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each position the entries by token id."""

    def shown(entry: Logprob) -> dict[str, Any]:
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}

    return [None if at is None else {str(token): shown(entry) for token, entry in at.items()} for at in positions]


def most_likely(position: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely entries, the most likely first; all of them if `count` is -1."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count == -1 else ranked[:count]


def token_text(token_id: int, text: str | None, as_token_id: bool) -> str:
    """The text of a token, or `token_id:N` if asked for or if it has none."""
    return f"token_id:{token_id}" if as_token_id or text is None else text


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _entry(token_id: int, entry: Logprob, as_token_id: bool) -> dict[str, Any]:
    text = token_text(token_id, entry.decoded_token, as_token_id)
    return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode("utf-8", "replace"))}
