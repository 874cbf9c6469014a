"""The tools of a request: which of them can be served, and how the answers to it are read."""

from __future__ import annotations

from typing import Any

from nanovllm.apps import tool_choice
from nanovllm.apps.server.protocol import ChatRequest, NamedTool
from nanovllm.apps.server.responses import invalid
from nanovllm.apps.server.serving import Serving
from nanovllm.apps.tool_calls.detection import Shown
from nanovllm.apps.tool_calls.formats import PARSERS
from nanovllm.apps.tool_calls.reading import Reading
from nanovllm.errors import RequestError


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
    """How the answers to a request are read. Raises ApiError as `check_tools`, and for a template that is not taken."""
    template = serving.settings.chat_template
    if body.chat_template is not None and serving.settings.trust_request_chat_template:
        template = body.chat_template
    check_choice(body)
    shown = await serving.in_text_thread(body, lambda: serving.formats.shown(template))
    chosen = serving.settings.tool_call_parser
    if chosen != "auto":
        shown = shown._replace(form=chosen)
    check_tools(body, shown)
    skips_special = body.skip_special_tokens is not False
    return serving.formats.reading(shown.form, tool_dicts(body), choice_of(body), skips_special=skips_special)


def check_choice(body: ChatRequest) -> None:
    """Raise ApiError for tools that are no functions of an object, and for a `tool_choice` that does not fit them."""
    try:
        tool_choice.check_tools(tool_dicts(body))
    except RequestError as error:
        raise invalid(str(error), "tools") from None
    try:
        tool_choice.check_choice(tool_dicts(body), choice_of(body))
    except RequestError as error:
        raise invalid(str(error), "tool_choice") from None


def check_tools(body: ChatRequest, shown: Shown) -> None:
    """Raise ApiError for tools that the model would not see, and for those whose calls could not be read.

    shown: what the chat template shows; its form is "none" where calls are to stay text.
    """
    if not body.tools or body.tool_choice == "none":
        return
    if not shown.tools:
        raise invalid(
            "tools: the model's chat template does not show tools to the model; start the server with --chat-template "
            "FILE, a template that does",
            "tools",
        )
    if shown.form is None and body.tool_choice in (None, "auto"):
        known = ", ".join(PARSERS[1:-1])
        raise invalid(
            "tools: the chat template writes calls in no format that the server reads; name the format that the model "
            f"writes with --tool-call-parser ({known}), or none to get calls as text",
            "tools",
        )
