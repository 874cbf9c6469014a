"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.apps.server.logprobs import chat_logprobs, prompt_logprobs
from nanovllm.apps.server.protocol import ChatRequest
from nanovllm.apps.server.requests import chat_params, chat_prompt, checked_prompt, naming
from nanovllm.apps.server.serving import Envelope, Serving, new_id
from nanovllm.apps.tool_calls.pieces import Arguments, Broken, Call, Ended, Piece, Reasoning, new_call_id
from nanovllm.apps.tool_calls.reader import Parser
from nanovllm.apps.tool_calls.reading import Reading, check_shown
from nanovllm.apps.tool_choice import check_choice, check_tools, forced_schema
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.text.tokenizer import Tokenizer


async def create_chat_completion(serving: Serving, request: Request) -> Response:
    """Answer a conversation"""
    body = await serving.read(request, ChatRequest)
    reading = await read_tools(serving, body)
    schema = forced_schema(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    forced: dict[str, Any] = {} if schema is None else {"structured_outputs": {"json": schema}}
    if reading.shows_special:
        forced["skip_special_tokens"] = False
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    request_id = new_id("chatcmpl", body.request_id)
    return await serving.respond(
        request,
        body,
        chat_params(body, serving.defaults, **forced),
        Envelope(request_id, kind, serving.settings.answer_name(body.model), body),
        Messages(body, reading, serving.engine.llm.engine.tokenizer),
        lambda: [checked_prompt(serving, chat_prompt(serving, body), body, "messages")],
    )


async def read_tools(serving: Serving, body: ChatRequest) -> Reading:
    """How the answers to a request are read. Raises ApiError for tools that cannot be served."""
    tools = body.tools or []
    with naming("tools"):
        check_tools(tools)
    with naming("tool_choice"):
        check_choice(tools, body.tool_choice)
    template = serving.settings.chat_template
    if body.chat_template is not None and serving.settings.trust_request_chat_template:
        template = body.chat_template
    shown = await serving.in_text_thread(body, lambda: serving.formats.shown(template))
    if tools and body.tool_choice != "none":
        with naming("tools"):
            check_shown(shown, body.tool_choice)
    skips_special = body.skip_special_tokens is not False
    choice = body.tool_choice
    return serving.formats.reading(shown.form, tools, choice, body.parallel_tool_calls, skips_special=skips_special)


@dataclass(slots=True)
class Choice:
    """The state of one choice while it is generated. calls: that have begun; complete_calls: that have ended."""

    parser: Parser
    begun: bool = False
    calls: int = 0
    complete_calls: int = 0
    skips: bool = False  # a call that the request does not want


class Messages:
    """Turns outputs, complete ones or what is new, into messages or their deltas."""

    def __init__(self, body: ChatRequest, reading: Reading, tokenizer: Tokenizer | None = None) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._reading = reading
        self._choices: dict[int, Choice] = {}  # by index

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            answer = self._reading.read(completion.text, completion.finish_reason, output.prompt_token_ids)
            choices.append(self._choice(completion, answer.finish_reason, {"message": answer.message}))
        return {"choices": choices, **self._prompt_fields(output)}

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        is_first = not self._choices
        deltas = [delta for completion in output.outputs for delta in self._deltas(output, completion)]
        chunks = [{"choices": [delta]} for delta in deltas]
        if is_first and chunks:
            chunks[0] |= self._prompt_fields(output)
        return chunks

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What the request asks for of its prompt; `output` is complete, or the first one."""
        fields: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _deltas(self, output: RequestOutput, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of the chunks that an output makes of one completion."""
        if completion.index not in self._choices:
            self._choices[completion.index] = Choice(self._reading.parser(output.prompt_token_ids))
        choice = self._choices[completion.index]
        pieces = choice.parser.feed(completion.text)
        if completion.finish_reason is not None:
            pieces += choice.parser.finish()
        parts = [part for piece in pieces if (part := self._delta(choice, piece))]
        last = parts.pop() if parts else {}
        if not choice.begun:
            choice.begun = True
            parts.insert(0, {"role": "assistant", "content": ""})
        common = {"index": completion.index, "logprobs": None, "finish_reason": None}
        deltas = [{**common, "delta": part} for part in parts]
        if last or completion.logprobs or completion.finish_reason is not None or self._body.return_token_ids:
            reason = self._reading.finish_reason(completion.finish_reason, choice.complete_calls > 0)
            deltas.append(self._choice(completion, reason, {"delta": last}))
        return deltas

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """What a piece adds to a message, as OpenAI shows it; counts the calls."""
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Reasoning):
            return {"reasoning": piece.text}
        if isinstance(piece, Broken):
            rest = piece.raw if choice.skips else piece.unsent
            return {"content": rest} if rest else {}
        if isinstance(piece, Call):
            choice.skips = choice.calls > 0 and self._reading.only_first
        if choice.skips:
            return {}
        if isinstance(piece, Ended):
            choice.complete_calls += 1
            return {}
        if isinstance(piece, Arguments):
            return {"tool_calls": [{"index": choice.calls - 1, "function": {"arguments": piece.text}}]}
        choice.calls += 1
        begun = {"index": choice.calls - 1, "id": new_call_id(self._reading.form), "type": "function"}
        return {"tool_calls": [{**begun, "function": {"name": piece.name, "arguments": ""}}]}

    def _choice(self, completion: CompletionOutput, reason: str | None, content: dict[str, Any]) -> dict[str, Any]:
        body = self._body
        logprobs = None
        if completion.logprobs is not None:
            num_top = body.top_logprobs or 0
            as_ids = bool(body.return_tokens_as_token_ids)
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
