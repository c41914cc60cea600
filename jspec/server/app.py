"""The HTTP application: routes, and which endpoint does what. The engine is given, never made here.

Everything an endpoint decides is in the schemas; everything it waits for is in the service.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec import __version__
from jspec.api import Engine
from jspec.server import openai_schemas
from jspec.server.http import (
    HANDLERS,
    BearerAuth,
    error_response,
    read_json,
    unless_gone,
)
from jspec.server.openai_schemas import CompletionCall, CompletionHead, parse_completion
from jspec.server.page import CONTENT_SECURITY_POLICY, PAGE
from jspec.server.schemas import GenerateCall, parse_abort, parse_generate
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service, Work
from jspec.server.streaming import EventStream, SequenceFold, fold_all, fold_events


def create_app(engine: Engine, args: ServerArgs | None = None) -> Starlette:
    """The ASGI application around `engine`, which the caller closes."""
    args = args or ServerArgs()
    endpoints = Endpoints(Service(engine, args))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(endpoints.service.watch(), name="jspec-watch")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    middleware = []
    if args.api_key is not None:
        middleware.append(Middleware(BearerAuth, api_key=args.api_key))
    return Starlette(
        routes=endpoints.routes(),
        exception_handlers={**HANDLERS, Exception: _on_bug},
        middleware=middleware,
        lifespan=lifespan,
    )


async def _on_bug(_: Request, __: Exception) -> Response:
    # Starlette raises it again behind this answer, so that it is logged with its traceback.
    return error_response(
        "internal error; the server's log has the traceback", HTTPStatus.INTERNAL_SERVER_ERROR
    )


class Endpoints:
    """One method an endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._args = service.args

    def routes(self) -> list[Route]:
        get, post, any_of = ["GET"], ["POST"], ["GET", "POST"]
        return [
            Route("/", self.page, methods=get),
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/health", self.health, methods=get),
            Route("/health_generate", self.health_generate, methods=get),
            Route("/server_info", self.server_info, methods=get),
            Route("/get_server_info", self.server_info, methods=get),
            Route("/model_info", self.model_info, methods=get),
            Route("/get_model_info", self.model_info, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/abort_request", self.abort_request, methods=post),
            Route("/flush_cache", self.flush_cache, methods=any_of),
        ]

    async def _read(self, request: Request) -> object:
        return await read_json(request, max_bytes=self._args.max_request_bytes)

    # Generation.

    async def generate(self, request: Request) -> Response:
        """POST /generate, SGLang's native endpoint."""
        call = parse_generate(await self._read(request))
        work = await self.service.submit(
            call.prompts, group=call.group, return_spec_tokens=call.return_spec_tokens
        )
        is_list = call.is_list or len(work.folds) > 1
        if call.stream:
            return self._generate_stream(call, work, has_index=is_list)
        await self._finish(request, work)
        results = [fold.to_json() for fold in work.folds]
        return JSONResponse(results if is_list else results[0])

    def _generate_stream(self, _: GenerateCall, work: Work, *, has_index: bool) -> Response:
        incremental = self._args.incremental_streaming_output

        def event(index: int, fold: SequenceFold) -> dict[str, Any]:
            body = fold.take(incremental=incremental)
            return {"index": index, **body} if has_index else body

        return self._stream(work, event)

    def _stream(
        self,
        work: Work,
        event: Callable[[int, SequenceFold], dict[str, Any] | None],
        last: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> Response:
        events = fold_events(
            work.streams,
            work.folds,
            interval=self._args.stream_interval,
            event=event,
            last=last,
        )
        return EventStream(events, close=work.close)

    async def _finish(self, request: Request, work: Work) -> None:
        """Waits for all sequences; a client that goes away ends them."""
        try:
            await unless_gone(request.receive, fold_all(work.streams, work.folds))
        finally:
            await work.close()

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions, OpenAI's."""
        call = parse_completion(await self._read(request))
        if call.model is not None and call.model not in self.service.model_names:
            raise HTTPException(
                HTTPStatus.NOT_FOUND,
                f"model is {call.model!r}; expected one of {list(self.service.model_names)}",
            )
        head = CompletionHead(
            completion_id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=call.model or self.service.model_name,
        )
        with openai_schemas.openai_names():
            work = await self.service.submit(call.prompts, group=call.group)
        if call.stream:
            return self._completion_stream(call, head, work)
        await self._finish(request, work)
        choices = []
        for index, fold in enumerate(work.folds):
            completion = fold.completion
            choice = openai_schemas.choice(index, completion.text, completion.finish)
            if call.return_meta_info:
                choice["meta_info"] = fold.to_json()["meta_info"]
            choices.append(choice)
        body = head.to_json(choices)
        body["usage"] = openai_schemas.usage_of(work.completions(), work.prompt_idxs)
        if call.return_spec_tokens_details:
            details = openai_schemas.spec_details(work.completions())
            body["sglext"] = {"spec_tokens_details": details if len(details) > 1 else details[0]}
        return JSONResponse(body)

    def _completion_stream(
        self, call: CompletionCall, head: CompletionHead, work: Work
    ) -> Response:
        def event(index: int, fold: SequenceFold) -> dict[str, Any] | None:
            text, finish = fold.take_text(), fold.completion.finish
            if not text and finish is None:
                return None  # ids whose text is held back: nothing that this shape could say
            choice = openai_schemas.choice(index, text, finish)
            if call.return_meta_info and finish is not None:
                choice["meta_info"] = fold.to_json()["meta_info"]
            body = head.to_json([choice])
            return {**body, "usage": None} if call.include_usage else body

        def last() -> dict[str, Any] | None:
            if not (call.include_usage or call.return_spec_tokens_details):
                return None
            body = head.to_json([])
            if call.include_usage:
                body["usage"] = openai_schemas.usage_of(work.completions(), work.prompt_idxs)
            if call.return_spec_tokens_details:
                details = openai_schemas.spec_details(work.completions())
                only = details if len(details) > 1 else details[0]
                body["sglext"] = {"spec_tokens_details": only}
            return body

        return self._stream(work, event, last)

    # Models and state.

    async def page(self, _: Request) -> Response:
        """GET /: the page that shows drafts being accepted."""
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the one model."""
        engine = self.service.engine
        card = openai_schemas.model_card(
            self.service.model_name,
            created=int(self.service.started),
            root=engine.args.model_path or self.service.model_name,
            max_model_len=engine.limits.context_length,
        )
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while requests are taken."""
        return _health(not self.service.engine.is_closed)

    async def health_generate(self, _: Request) -> Response:
        """GET /health_generate: 200 if the engine makes a token within 20 s."""
        return _health(await self.service.probe())

    async def server_info(self, _: Request) -> Response:
        """GET /server_info: resolved arguments, flat, and live counters."""
        engine = self.service.engine
        info = engine.get_server_info()
        server = {name: getattr(self._args, name) for name in ServerArgs.names()}
        server["api_key"] = None if self._args.api_key is None else "(set)"
        server["served_model_name"] = self.service.model_name
        live = self.service.meter.rates(engine.stats)
        states = [
            {**state, "last_gen_throughput": live.gen_throughput}
            for state in info["internal_states"]
        ]
        command = shlex.join(_without_key(sys.argv))
        return JSONResponse(
            {**server, **info, "internal_states": states, "launch_command": command}
        )

    async def model_info(self, _: Request) -> Response:
        """GET /model_info: what is served, without the counters."""
        engine = self.service.engine
        return JSONResponse(
            {
                "model_path": engine.args.model_path or self.service.model_name,
                "tokenizer_path": engine.config.tokenizer_path,
                "served_model_name": self.service.model_name,
                "is_generation": True,
                "context_length": engine.limits.context_length,
                "eos_token_ids": list(engine.eos_token_ids),
                "weight_version": "default",
                "version": __version__,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def abort_request(self, request: Request) -> Response:
        """POST /abort_request {rid | abort_all}; an id matches whole, not by its beginning."""
        call = parse_abort(await self._read(request))
        if call.rid is None:
            num_aborted = await self.service.engine.abort_all()
        else:
            num_aborted = await self.service.abort(call.rid)
        return JSONResponse({"num_aborted": num_aborted})

    async def flush_cache(self, _: Request) -> Response:
        """GET or POST /flush_cache."""
        return PlainTextResponse("Nothing to flush: there is no prefix cache yet.\n")


def _health(is_well: bool) -> Response:
    if is_well:
        return Response(status_code=HTTPStatus.OK)
    return error_response(
        "the engine makes no progress or is closed", HTTPStatus.SERVICE_UNAVAILABLE
    )


def _without_key(argv: list[str]) -> list[str]:
    """The command line with the API key taken out."""
    words = list(argv)
    for index, word in enumerate(words):
        if word == "--api-key" and index + 1 < len(words):
            words[index + 1] = "***"
        elif word.startswith("--api-key="):
            words[index] = "--api-key=***"
    return words
