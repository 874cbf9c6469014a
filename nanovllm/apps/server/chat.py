"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.completions import chat_logprobs, prompt_logprobs
from nanovllm.apps.server.protocol import ChatRequest, NamedTool
from nanovllm.apps.server.requests import chat_params, chat_prompt, checked_prompt, template_text
from nanovllm.apps.server.serving import Envelope, Serving, new_id
from nanovllm.apps.server.tool_calls import Call, Parser, Piece, check_tools, detect_format, forced_schema, make_parser
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.text.tokenizer import Tokenizer


async def create_chat_completion(serving: Serving, request: Request) -> Response:
    """Answer a conversation"""
    body = await serving.read(request, ChatRequest)
    settings = serving.settings
    template = body.chat_template or template_text(serving)
    form = detect_format(template) if settings.tool_call_parser == "auto" else settings.tool_call_parser
    check_tools(body, template, form)
    schema = forced_schema(body)
    forced = {} if schema is None else {"structured_outputs": {"json": schema}}
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    request_id = new_id("chatcmpl", body.request_id)
    return await serving.respond(
        request,
        body,
        chat_params(body, serving.defaults, **forced),
        Envelope(request_id, kind, settings.answer_name(body.model), body),
        Messages(body, form, serving.engine.llm.engine.tokenizer),
        lambda: [checked_prompt(serving, chat_prompt(serving, body), body, "messages")],
    )


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated."""

    parser: Parser
    begun: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)


class Messages:
    """Turns outputs, complete ones or what is new, into messages or their deltas."""

    def __init__(self, body: ChatRequest, form: str | None, tokenizer: Tokenizer | None = None) -> None:
        """form: of tool calls, see `tool_calls.make_parser`."""
        self._body = body
        self._tokenizer = tokenizer
        self._make_parser = partial(make_parser, body, form)
        self._choices: dict[int, Choice] = {}  # by index

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            choice = Choice(self._make_parser())
            pieces = [*choice.parser.feed(completion.text), *choice.parser.finish()]
            content = "".join(piece for piece in self._read(choice, pieces) if isinstance(piece, str))
            empty = bool(choice.calls) and not content.strip()
            message: dict[str, Any] = {"role": "assistant", "content": None if empty else content, "refusal": None}
            if choice.calls:
                message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in choice.calls]
            choices.append(self._choice(completion, choice, {"message": message}))
        return {"choices": choices, **self._prompt_fields(output)}

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        is_first = not self._choices
        found = [{"choices": [delta]} for completion in output.outputs for delta in self._deltas(completion)]
        if is_first and found:
            found[0] |= self._prompt_fields(output)
        return found

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What the request asks for of its prompt; `output` is complete, or the first one."""
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _deltas(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of the chunks that an output makes of one completion."""
        choice = self._choices.setdefault(completion.index, Choice(self._make_parser()))
        pieces = choice.parser.feed(completion.text)
        if completion.finish_reason is not None:
            pieces += choice.parser.finish()
        parts: list[dict[str, Any]] = [
            {"content": piece} if isinstance(piece, str) else {"tool_calls": [piece]}
            for piece in self._read(choice, pieces)
        ]
        last = parts.pop() if parts else {}
        if not choice.begun:
            choice.begun = True
            parts.insert(0, {"role": "assistant", "content": ""})
        common = {"index": completion.index, "logprobs": None, "finish_reason": None}
        deltas = [{**common, "delta": part} for part in parts]
        if last or completion.logprobs or completion.finish_reason is not None or self._body.return_token_ids:
            deltas.append(self._choice(completion, choice, {"delta": last}))
        return deltas

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

    def _choice(self, completion: CompletionOutput, choice: Choice, content: dict[str, Any]) -> dict[str, Any]:
        body, reason = self._body, completion.finish_reason
        if choice.calls and reason == "stop" and not isinstance(body.tool_choice, NamedTool):
            reason = "tool_calls"
        logprobs = None
        if completion.logprobs is not None:
            num_top, as_ids = body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, num_top, as_ids, self._tokenizer)
        tokens = {"token_ids": completion.token_ids} if body.return_token_ids else {}
        return {
            "index": completion.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            **tokens,
        }
