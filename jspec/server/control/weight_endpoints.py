"""Routes that read the weights, and update them while the server runs.

Names, fields and answers are SGLang's, but a body of tensors is a safetensors file, not a pickle,
which would execute code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jspec.errors import CheckpointError, ConfigError, RequestError, shown_json
from jspec.models.files.array_tensors import arrays_of_safetensors
from jspec.server.http.exchange import log_refusal, read_bytes, read_call
from jspec.server.http.fields import (
    BODY,
    Neutral,
    check_text,
    get_bool,
    read_body,
    without_neutral,
)
from jspec.server.service import Service

QUERY = "the query"
SAFETENSORS = ("application/octet-stream", "application/x-safetensors")
# Options about running requests and the version's name.
FLAGS = ("abort_all_requests", "wait_for_requests", "keep_pause", "flush_cache")
TEXTS = ("selector", "weight_version")
DISK = frozenset({"model_path", "load_format", "speculative_draft_model_path", *FLAGS, *TEXTS})
NEUTRAL_DISK: Neutral = {
    "is_async": (False,),
    "torch_empty_cache": (False, True),
    "recapture_cuda_graph": (False, True),  # programs take weights as arguments
    "token_step": (None, 0),
    "manifest": (None,),
}
NEUTRAL_ADAPTER: Neutral = {"lora_id": (None,), "rid": (None,)}
PICKLES = (
    "serialized_named_tensors are pickles, which run what a client wrote: they are not read; "
    f"expected a safetensors file as the body, with Content-Type {SAFETENSORS[0]} and everything "
    "else in the query (?selector=target&weight_version=2), or update_weights_from_disk"
)


class WeightEndpoints:
    def __init__(self, service: Service) -> None:
        self.service = service

    def routes(self) -> list[Route]:
        post, both = ["POST"], ["GET", "POST"]
        return [
            Route("/update_weights_from_disk", self.update_from_disk, methods=post),
            Route("/update_weights_from_tensor", self.update_from_tensor, methods=post),
            Route("/get_weights_by_name", self.get_by_name, methods=both),
            Route("/update_weight_version", self.update_version, methods=post),
            Route("/load_lora_adapter", self.load_adapter, methods=post),
            Route("/unload_lora_adapter", self.unload_adapter, methods=post),
            Route("/get_weight_version", self.get_version, methods=["GET"]),
        ]

    async def update_from_disk(self, request: Request) -> Response:
        """POST /update_weights_from_disk {"model_path", "abort_all_requests", ...}."""
        values = await self._read(request, read=DISK, neutral=NEUTRAL_DISK)
        paths: dict[str, Any] = {
            name: check_text(name, values[name])
            for name in ("model_path", "speculative_draft_model_path", "load_format")
            if values.get(name) is not None
        }
        if "model_path" not in paths:
            raise RequestError(f"{BODY} has no model_path; expected a directory of the server's")
        engine = self.service.engine
        return await _answer(
            request, engine.async_update_weights_from_disk(**paths, **_options(values))
        )

    async def update_from_tensor(self, request: Request) -> Response:
        """POST /update_weights_from_tensor?selector=...: a safetensors file as the body."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in SAFETENSORS:
            raise RequestError(PICKLES)
        values = without_neutral(
            QUERY,
            {name: _from_query(name, text) for name, text in request.query_params.items()},
            read=frozenset((*FLAGS, *TEXTS)),
            neutral={"load_format": (None, "safetensors")},
        )
        body = await read_bytes(request, self.service.args)
        try:
            tensors = await asyncio.to_thread(arrays_of_safetensors, body)
        except CheckpointError as error:
            raise RequestError(f"{BODY}: {error}") from None
        engine = self.service.engine
        return await _answer(
            request, engine.async_update_weights_from_tensor(tensors, **_options(values))
        )

    async def get_by_name(self, request: Request) -> Response:
        """GET or POST /get_weights_by_name {"name", "truncate_size": 100, "selector"}: its rows."""
        read = frozenset({"name", "truncate_size", "selector"})
        values: Mapping[str, Any]
        if request.query_params:
            given: dict[str, Any] = dict(request.query_params)
            if given.get("truncate_size", "").isdecimal():
                given["truncate_size"] = int(given["truncate_size"])
            values = without_neutral(QUERY, given, read=read, neutral={})
        else:
            values = await self._read(request, read=read, neutral={})
        size = values.get("truncate_size")
        selector = values.get("selector")
        rows = await self.service.engine.async_get_weights_by_name(
            check_text("name", values.get("name")),
            100 if size is None else size,
            selector=None if selector is None else check_text("selector", selector),
        )
        return JSONResponse(rows)

    async def update_version(self, request: Request) -> Response:
        """POST /update_weight_version {"new_version", "abort_all_requests": true}."""
        values = await self._read(
            request, read=frozenset({"new_version", "abort_all_requests"}), neutral={}
        )
        version = check_text("new_version", values.get("new_version"))
        aborts = get_bool(values, "abort_all_requests", default=True)
        await self.service.engine.update_weight_version(version, abort_all_requests=aborts)
        message = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": message, "new_version": version})

    async def load_adapter(self, request: Request) -> Response:
        """POST /load_lora_adapter {"lora_name", "lora_path"}: a directory of the server's."""
        read = frozenset({"lora_name", "lora_path", "pinned"})
        values = await self._read(request, read=read, neutral=NEUTRAL_ADAPTER)
        name, path = (check_text(key, values.get(key)) for key in ("lora_name", "lora_path"))
        get_bool(values, "pinned")
        loading = self.service.engine.async_load_lora_adapter(name, path)
        return await _adapter_answer(request, loading)

    async def unload_adapter(self, request: Request) -> Response:
        """POST /unload_lora_adapter {"lora_name"}: answers once no request has it any more."""
        values = await self._read(request, read=frozenset({"lora_name"}), neutral=NEUTRAL_ADAPTER)
        name = check_text("lora_name", values.get("lora_name"))
        unloading = self.service.engine.async_unload_lora_adapter(name)
        return await _adapter_answer(request, unloading)

    async def get_version(self, _: Request) -> Response:
        """GET /get_weight_version."""
        return JSONResponse({"weight_version": self.service.engine.weight_version})

    async def _read(
        self, request: Request, *, read: frozenset[str], neutral: Neutral
    ) -> Mapping[str, Any]:
        parse = partial(read_body, read=read, neutral=neutral)
        return await read_call(request, self.service.args, parse)


async def _adapter_answer(request: Request, update: Awaitable[dict[str, Any]]) -> Response:
    try:
        return JSONResponse({**await update, "error_message": None})
    except (CheckpointError, ConfigError, RequestError) as error:
        status = HTTPStatus.BAD_REQUEST
        log_refusal(request, status, str(error))
        answer = {"success": False, "error_message": error.message}
        return JSONResponse(answer, status_code=status)


async def _answer(request: Request, update: Awaitable[dict[str, Any]]) -> Response:
    try:
        return JSONResponse(await update)
    except (CheckpointError, ConfigError, RequestError) as error:
        status = HTTPStatus.BAD_REQUEST
        log_refusal(request, status, str(error))
        answer = {"success": False, "message": error.message, "num_paused_requests": 0}
        return JSONResponse(answer, status_code=status)


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: check_text(name, values[name]) for name in TEXTS if values.get(name) is not None}
    flags = {name: get_bool(values, name) for name in FLAGS if values.get(name) is not None}
    return {**texts, **flags}


def _from_query(name: str, text: str) -> Any:
    if name not in FLAGS:
        return text
    if text.lower() not in ("true", "false"):
        raise RequestError(f"{name} is {shown_json(text)}; expected true or false")
    return text.lower() == "true"
