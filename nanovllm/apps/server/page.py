"""The page at `/`, one file that loads nothing from elsewhere, and the events that it shows."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from nanovllm.apps.server.events import EventStream
from nanovllm.apps.server.http_errors import RATE_LIMIT, ApiError
from nanovllm.apps.server.limits import RETRY_SECONDS
from nanovllm.apps.server.serving import Serving

MAX_LISTENERS = 32
PAGE = Path(__file__).with_name("page.html")


async def show_page(serving: Serving, request: Request) -> Response:
    """`GET /`."""
    html = PAGE.read_text(encoding="utf-8")
    return HTMLResponse(html, headers=page_headers(html))


async def kv_cache_events(serving: Serving, request: Request) -> Response:
    """`GET /v1/kv-cache/events`. Raises ApiError if too many clients listen."""
    if serving.kv_events.num_listeners >= MAX_LISTENERS:
        message = f"{MAX_LISTENERS} clients listen to the KV cache already: close one of them, or try again later"
        raise ApiError(429, message, kind=RATE_LIMIT, retry_after=RETRY_SECONDS)
    return EventStream(serving.kv_events.listen())


def page_headers(html: str) -> dict[str, str]:
    """The headers of the page. The browser runs only what the file itself holds, and connects only to this server."""
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(_hashes(html, "script")),
        "style-src": " ".join(_hashes(html, "style")),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hashes(html: str, tag: str) -> list[str]:
    """The sources that allow the inline elements of this tag, as Content-Security-Policy names them."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies]
