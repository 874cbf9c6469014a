"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm.server.limits import check_model
from nanovllm.server.serving import Serving


async def list_models(serving: Serving, request: Request) -> Response:
    names = serving.settings.served_model_names
    return JSONResponse({"object": "list", "data": [_model(serving, name) for name in names]})


async def show_model(serving: Serving, request: Request) -> Response:
    name = request.path_params["name"]
    check_model(name, serving.settings.served_model_names)
    return JSONResponse(_model(serving, name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "nanovllm",
        "root": serving.settings.model_name,
        "parent": None,
        "max_model_len": serving.engine.llm.max_model_len,
    }
