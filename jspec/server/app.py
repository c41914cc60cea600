"""The HTTP application: routes and their endpoints, around an engine made by the caller."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jspec import __version__
from jspec.errors import JspecError
from jspec.messages.unknown_fields import IgnoredFields
from jspec.server.anthropic.endpoints import MessagesEndpoints
from jspec.server.control.control_endpoints import ControlEndpoints
from jspec.server.control.request_spans import TraceParent
from jspec.server.control.weight_endpoints import WeightEndpoints
from jspec.server.hardening.body_budget import NUM_BODIES, BodyBudget
from jspec.server.hardening.origins import OriginGuard
from jspec.server.http import openapi, openapi_page
from jspec.server.http.event_json import EventJson
from jspec.server.http.exchange import (
    HANDLERS,
    INTERNAL,
    BearerAuth,
    RequestLog,
    error_response,
    read_call,
)
from jspec.server.http.page import CONTENT_SECURITY_POLICY, page
from jspec.server.native.generate_schema import parse_abort, parse_generate
from jspec.server.native.score_endpoint import ScoreEndpoint
from jspec.server.openai.endpoints import OpenAIEndpoints
from jspec.server.openai.responses_endpoints import ResponsesEndpoints
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service, answer_stream
from jspec.serving.engine import Engine


def create_app(engine: Engine, args: ServerArgs | None = None) -> Starlette:
    """Return the ASGI application for `engine`, which the caller closes."""
    args = args or ServerArgs()
    endpoints = Endpoints(Service(engine, args))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service = endpoints.service
        task = asyncio.create_task(service.watch(), name="jspec-watch")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            await service.close_spans()

    app = Starlette(
        routes=endpoints.routes(),
        exception_handlers={**HANDLERS, Exception: _on_bug},
        middleware=middleware_of(args),
        lifespan=lifespan,
    )
    app.state.service = endpoints.service
    app.state.body_budget = BodyBudget(NUM_BODIES * args.max_request_bytes)
    app.state.ignored_fields = IgnoredFields()
    return app


def middleware_of(args: ServerArgs) -> list[Middleware]:
    found = [Middleware(RequestLog)] if args.log_requests else []
    if args.origins:
        found.append(
            Middleware(
                CORSMiddleware, allow_origins=args.origins, allow_methods=["*"], allow_headers=["*"]
            )
        )
    if args.otlp_traces_endpoint is not None:
        found.append(Middleware(TraceParent))
    found.append(Middleware(OriginGuard, args=args))
    if args.api_key is not None:
        found.append(Middleware(BearerAuth, api_key=args.api_key))
    return found


async def _on_bug(_: Request, __: Exception) -> Response:
    # Starlette raises it again after this answer, so it is logged with its traceback.
    return error_response(INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR)


class Endpoints:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._args = service.args

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/", self.page, methods=get),
            Route("/openapi.json", self.openapi, methods=get),
            Route("/docs", self.docs, methods=get),
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            *OpenAIEndpoints(self.service).routes(),
            *ResponsesEndpoints(self.service).routes(),
            *MessagesEndpoints(self.service).routes(),
            *ScoreEndpoint(self.service).routes(),
            Route("/health", self.health, methods=get),
            Route("/health_generate", self.health_generate, methods=get),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/server_info", self.server_info, methods=get),
            Route("/get_server_info", self.server_info, methods=get),
            Route("/model_info", self.model_info, methods=get),
            Route("/get_model_info", self.model_info, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/abort_request", self.abort_request, methods=post),
            *ControlEndpoints(self.service).routes(),
            *WeightEndpoints(self.service).routes(),
        ]

    # Generation.

    async def generate(self, request: Request) -> Response:
        """POST /generate, SGLang's native endpoint."""
        received = time.monotonic()
        parse = partial(parse_generate, defaults=self.service.engine.sampling_defaults)
        call = await read_call(request, self._args, parse)
        self.service.check_model(call.model)
        work = await self.service.submit(
            call.prompts,
            model=call.model,
            group=call.group,
            return_spec_tokens=call.return_spec_tokens,
            received=received,
            return_text_in_logprobs=call.return_text_in_logprobs,
        )
        is_list = call.is_list or len(work.completions) > 1
        if call.stream:
            keeps_all = not self._args.incremental_streaming_output
            events = [
                EventJson(completion, keeps_all=keeps_all, index=index if is_list else None)
                for index, completion in enumerate(work.completions)
            ]
            return answer_stream(work, lambda index, _: events[index].take())
        await work.finish(request.receive)
        results = [completion.to_json() for completion in work.completions]
        return JSONResponse(results if is_list else results[0])

    # Models and state.

    async def page(self, _: Request) -> Response:
        """GET /: a page that shows drafts being accepted."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: this document."""
        return JSONResponse(openapi.document(request.app.routes))

    async def docs(self, request: Request) -> Response:
        """GET /docs: this document as HTML."""
        text = openapi_page.page(openapi.document(request.app.routes))
        return HTMLResponse(text, headers={"Content-Security-Policy": openapi_page.PAGE_POLICY})

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while the server is alive, also while the engine restarts."""
        return _health(not self.service.engine.is_closed)

    async def ping(self, request: Request) -> Response:
        """GET or POST /ping: /health by the name that vLLM has for SageMaker."""
        return await self.health(request)

    async def health_generate(self, _: Request) -> Response:
        """GET /health_generate: 200 if the engine makes a token within 20 s."""
        return _health(await self.service.probe())

    async def server_info(self, _: Request) -> Response:
        """GET /server_info: resolved arguments, flat, and live counters."""
        engine = self.service.engine
        info = engine.get_server_info()
        server = {name: getattr(self._args, name) for name in ServerArgs.names()}
        for name in ("api_key", "ssl_keyfile_password"):
            server[name] = None if server[name] is None else "(set)"
        server["served_model_name"] = self.service.model_name
        live = self.service.meter.rates(engine.stats)
        states = [
            {**state, "last_gen_throughput": live.gen_throughput}
            for state in info["internal_states"]
        ]
        command = shlex.join(_without_key(sys.argv))
        info["engine_process_id"] = engine.process_id
        return JSONResponse(
            {**server, **info, "internal_states": states, "launch_command": command}
        )

    async def model_info(self, _: Request) -> Response:
        """GET /model_info: the served model, without counters."""
        engine = self.service.engine
        return JSONResponse(
            {
                "model_path": engine.updated_model_path
                or engine.args.model_path
                or self.service.model_name,
                "tokenizer_path": engine.config.tokenizer_path,
                "served_model_name": self.service.model_name,
                "is_generation": True,
                "context_length": engine.limits.pool.context_length,
                "eos_token_ids": list(engine.eos_token_ids),
                "weight_version": engine.weight_version,
                "version": __version__,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, for Prometheus."""
        balancedness: Mapping[int, float] = {}
        with suppress(JspecError):  # the engine restarts, or is closed
            balancedness = await self.service.engine.expert_balancedness()
        text = self.service.metrics.render(balancedness)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def abort_request(self, request: Request) -> Response:
        """POST /abort_request {rid | abort_all}; an id must match exactly, not by prefix."""
        call = await read_call(request, self._args, parse_abort)
        if call.rid is None:
            num_aborted = await self.service.engine.abort_all()
        else:
            num_aborted = await self.service.abort(call.rid)
        return JSONResponse({"num_aborted": num_aborted})


def _health(is_well: bool) -> Response:
    if is_well:
        return Response(status_code=HTTPStatus.OK)
    return error_response(
        "the engine makes no progress or is closed", HTTPStatus.SERVICE_UNAVAILABLE
    )


def _without_key(argv: list[str]) -> list[str]:
    words = list(argv)
    for index, word in enumerate(words):
        for flag in ("--api-key", "--ssl-keyfile-password"):
            if word == flag and index + 1 < len(words):
                words[index + 1] = "***"
            elif word.startswith(f"{flag}="):
                words[index] = f"{flag}=***"
    return words
