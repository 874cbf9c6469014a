"""The page at `/`: one file without a build step, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from nanovllm.server.serving import Serving

PAGE = Path(__file__).with_name("page.html")


async def show_page(serving: Serving, request: Request) -> Response:
    """The endpoint."""
    html = PAGE.read_text(encoding="utf-8")
    return HTMLResponse(html, headers=page_headers(html))


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
