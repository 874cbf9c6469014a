"""Errors as HTTP responses in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from nanovllm.errors import ConfigError, EngineError, RequestError, one_line

logger = logging.getLogger(__name__)

INVALID, NOT_FOUND, AUTHENTICATION = "invalid_request_error", "not_found_error", "authentication_error"
RATE_LIMIT, SERVER = "rate_limit_error", "server_error"
LONGEST = 2000  # characters of a message
INTERNAL = "the server failed to answer this request; its log says why"
PARAMETER = re.compile(r"\b([a-z_]+)=")  # how RequestErrors quote the value of a parameter


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        self.body = {"error": {"message": one_line(message, LONGEST), "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is: status 400."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception. Only messages that are written for users are shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        named = PARAMETER.search(str(error))
        return invalid(str(error), named[1] if named else None)
    if isinstance(error, EngineError):
        logger.error("%s", error)
        return ApiError(503, "the engine has ended; the server's log says why", kind=SERVER, code="engine_error")
    if isinstance(error, ConfigError):
        return invalid(str(error))
    if isinstance(error, ClientDisconnect):
        return invalid("the client went away before its request was complete")
    if isinstance(error, HTTPException):
        kind = NOT_FOUND if error.status_code == 404 else INVALID
        return ApiError(error.status_code, str(error.detail), kind=kind)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, INTERNAL, kind=SERVER, code="internal_error")


async def respond_to_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's exception handler for all errors."""
    path, method = request.url.path, request.method
    if isinstance(error, HTTPException) and error.status_code == 404:
        return ApiError(404, f"there is no {path}", kind=NOT_FOUND).response()
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers: Mapping[str, Any] = error.headers or {}
        answer = ApiError(405, f"{path} does not take {method}, only {headers.get('Allow', 'others')}")
        answer.headers |= headers
        return answer.response()
    return as_api_error(error).response()
