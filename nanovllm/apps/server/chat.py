"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.events import DONE, EventStream, answer, event, to_json
from nanovllm.apps.server.generation import Generation
from nanovllm.apps.server.logprobs import chat_logprobs, prompt_logprobs
from nanovllm.apps.server.protocol import ChatRequest, NamedTool
from nanovllm.apps.server.request_prompts import chat_prompt, check_tokens, template_text
from nanovllm.apps.server.sampling import chat_params
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.server.tool_calls import Call, Parser, Piece, check_tools, detect_format, forced_schema, make_parser
from nanovllm.apps.server.usage import Envelope, new_id
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.prompts import PromptParts


async def create_chat_completion(serving: Serving, request: Request) -> Response:
    body = await serving.read(request, ChatRequest)
    return await answer(request, _respond(serving, body))


async def _respond(serving: Serving, body: ChatRequest) -> Response:
    llm, settings = serving.engine.llm, serving.settings
    template = body.chat_template or template_text(serving)
    form = detect_format(template) if settings.tool_call_parser == "auto" else settings.tool_call_parser
    check_tools(body, template, form)
    schema = forced_schema(body)
    forced = {} if schema is None else {"structured_outputs": StructuredOutputsParams(json=schema)}
    params = chat_params(body, serving.defaults, **forced)
    request_id = new_id("chatcmpl", body.request_id)

    def prompt() -> PromptParts:
        tokens = chat_prompt(serving, body)
        if body.truncate_prompt_tokens is None:
            check_tokens(llm, tokens, "messages")
        return PromptParts(None, tokens, body.cache_salt)

    with ExitStack() as held:
        held.enter_context(serving.admission.admitted(1))
        prompts = [await serving.in_text_thread(body, prompt)]
        generation = await serving.start(held.pop_all(), prompts, params, request_id, body)
    messages = Messages(body, form)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(request_id, kind, settings.answer_name(body.model), body)
    if body.stream:
        return EventStream(_events(generation, messages, envelope))
    try:
        (output,) = await generation.final()
    finally:
        generation.close()
    envelope.usage.count(0, output)
    return Response(to_json(messages.complete(output, envelope)), media_type="application/json")


async def _events(generation: Generation, messages: Messages, envelope: Envelope) -> AsyncGenerator[bytes, None]:
    try:
        others: dict[str, Any] | None = None
        async for _, output in generation.outputs():
            envelope.usage.count(0, output)
            others = messages.prompt_fields(output) if others is None else {}
            for choice in messages.deltas(output):
                yield event(envelope.chunk([choice], **others))
                others = {}
        if envelope.sends_usage:
            yield event(envelope.usage_chunk())
        yield DONE
    finally:
        generation.close()


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated."""

    parser: Parser
    begun: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)


class Messages:
    """Turns outputs, complete ones or what is new, into messages or their deltas."""

    def __init__(self, body: ChatRequest, form: str | None) -> None:
        """form: of tool calls, see `tool_calls.make_parser`."""
        self._body = body
        self._make_parser = partial(make_parser, body, form)
        self._choices: dict[int, Choice] = {}  # by index

    def complete(self, output: RequestOutput, envelope: Envelope) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for completion in output.outputs:
            choice = Choice(self._make_parser())
            pieces = [*choice.parser.feed(completion.text), *choice.parser.finish()]
            content = "".join(piece for piece in self._read(choice, pieces) if isinstance(piece, str))
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if choice.calls and not content.strip() else content,
                "refusal": None,
            }
            if choice.calls:
                message["tool_calls"] = [
                    {name: call[name] for name in call if name != "index"} for call in choice.calls
                ]
            choices.append(self._choice(completion, output, choice, {"message": message}))
        return envelope.complete(choices, **self.prompt_fields(output))

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What the request asks for of its prompt; `output` is complete, or the first one."""
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def deltas(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of the chunks that an output makes."""
        return [delta for completion in output.outputs for delta in self._deltas(completion, output)]

    def _deltas(self, completion: CompletionOutput, output: RequestOutput) -> list[dict[str, Any]]:
        choice = self._choices.setdefault(completion.index, Choice(self._make_parser()))
        pieces = choice.parser.feed(completion.text)
        if completion.finish_reason is not None:
            pieces += choice.parser.finish()
        parts: list[dict[str, Any]] = []
        for piece in self._read(choice, pieces):
            parts.append({"content": piece} if isinstance(piece, str) else {"tool_calls": [piece]})
        deltas: list[dict[str, Any]] = []
        if not choice.begun:
            choice.begun = True
            deltas.append(self._delta(completion, {"role": "assistant", "content": ""}))
        deltas += [self._delta(completion, part) for part in parts[:-1]]
        if parts or completion.logprobs or completion.finish_reason is not None or self._body.return_token_ids:
            last = {"delta": parts[-1] if parts else {}}
            deltas.append(self._choice(completion, output, choice, last))
        return deltas

    def _delta(self, completion: CompletionOutput, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _read(self, choice: Choice, pieces: list[Piece]) -> list[str | dict[str, Any]]:
        """The pieces with calls as OpenAI shows them; counts the calls."""
        shown: list[str | dict[str, Any]] = []
        for piece in pieces:
            if not isinstance(piece, Call):
                shown.append(piece)
            elif not choice.calls or self._body.parallel_tool_calls is not False:
                function = {"name": piece.name, "arguments": piece.arguments}
                call_id = f"call_{uuid.uuid4().hex}"
                call = {"index": len(choice.calls), "id": call_id, "type": "function", "function": function}
                choice.calls.append(call)
                shown.append(call)
        return shown

    def _choice(
        self, completion: CompletionOutput, output: RequestOutput, choice: Choice, content: dict[str, Any]
    ) -> dict[str, Any]:
        body, reason = self._body, completion.finish_reason
        if choice.calls and reason == "stop" and not isinstance(body.tool_choice, NamedTool):
            reason = "tool_calls"
        logprobs = None
        if completion.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0, as_ids)
        tokens = {"token_ids": completion.token_ids} if body.return_token_ids else {}
        return {
            "index": completion.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            **tokens,
        }
