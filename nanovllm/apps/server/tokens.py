"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm.apps.server.http_errors import invalid
from nanovllm.apps.server.protocol import DetokenizeRequest, TokenizeRequest
from nanovllm.apps.server.request_prompts import chat_prompt, encode
from nanovllm.apps.server.serving import Serving
from nanovllm.errors import RequestError, as_request_error, quoted


async def tokenize(serving: Serving, request: Request) -> Response:
    """Token ids of a prompt or of messages, which may be longer than what the engine takes."""
    body = await serving.read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    llm = serving.engine.llm

    def token_ids() -> list[int]:
        if body.prompt is None:
            return chat_prompt(serving, body)
        return encode(llm, body.prompt, body.add_special_tokens is not False) if body.prompt else []

    tokens = await serving.in_text_thread(body, token_ids)
    answer = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": None}
    if body.return_token_strs:
        texts = llm.engine.tokenizer
        assert texts is not None
        answer["token_strs"] = await serving.in_text_thread(body, lambda: [texts.token_text(token) for token in tokens])
    return JSONResponse(answer)


async def detokenize(serving: Serving, request: Request) -> Response:
    body = await serving.read(request, DetokenizeRequest)
    tokenizer, size = serving.engine.llm.engine.tokenizer, serving.engine.llm.engine.facts.vocab_size
    if tokenizer is None:
        raise RequestError("the model directory has no tokenizer files, so token ids have no text")
    for token in body.tokens:
        if not 0 <= token < size:
            raise invalid(f"token id {quoted(token)} is not one of the model's: ids are from 0 to {size - 1}", "tokens")

    def text() -> str:
        with as_request_error("the tokenizer cannot decode the tokens"):
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return JSONResponse({"prompt": await serving.in_text_thread(body, text)})
