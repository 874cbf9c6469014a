"""The tools of a request: which of them can be served, and how the answers to it are read."""

from __future__ import annotations

from typing import Any

from nanovllm.apps import tool_choice
from nanovllm.apps.server.protocol import ChatRequest, NamedTool
from nanovllm.apps.server.requests import naming
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.tool_calls.detection import check_shown
from nanovllm.apps.tool_calls.reading import Reading


def tool_dicts(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools as plain data."""
    return [tool.given for tool in body.tools or ()]


def choice_of(body: ChatRequest) -> Any:
    """`tool_choice` as plain data."""
    return body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice


def forced_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that `tool_choice` forces the answer into; None for "auto" and "none"."""
    return tool_choice.forced_schema(tool_dicts(body), choice_of(body), body.parallel_tool_calls)


async def read_tools(serving: Serving, body: ChatRequest) -> Reading:
    """How the answers to a request are read. Raises ApiError for tools that cannot be served."""
    template = serving.settings.chat_template
    if body.chat_template is not None and serving.settings.trust_request_chat_template:
        template = body.chat_template
    check_choice(body)
    shown = await serving.in_text_thread(body, lambda: serving.formats.shown(template))
    if body.tools and body.tool_choice != "none":
        with naming("tools"):
            check_shown(shown, body.tool_choice)
    skips_special = body.skip_special_tokens is not False
    return serving.formats.reading(shown.form, tool_dicts(body), choice_of(body), skips_special=skips_special)


def check_choice(body: ChatRequest) -> None:
    """Raise ApiError for tools that are no functions of an object, and for a `tool_choice` that does not fit them."""
    with naming("tools"):
        tool_choice.check_tools(tool_dicts(body))
    with naming("tool_choice"):
        tool_choice.check_choice(tool_dicts(body), choice_of(body))
