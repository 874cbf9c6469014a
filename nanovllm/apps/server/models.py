"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm.apps.server.limits import check_model
from nanovllm.apps.server.serving import Serving


async def list_models(serving: Serving, request: Request) -> Response:
    names = serving.settings.names
    return JSONResponse({"object": "list", "data": [_model(serving, name) for name in names]})


async def show_model(serving: Serving, request: Request) -> Response:
    name = request.path_params["name"]
    check_model(name, serving.settings.names)
    return JSONResponse(_model(serving, name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    settings, adapter = serving.settings, serving.settings.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "nanovllm",
        "root": settings.model_name if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or settings.model_name,
        "max_model_len": serving.engine.llm.max_model_len,
    }
