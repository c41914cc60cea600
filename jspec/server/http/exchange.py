"""HTTP plumbing: bounded JSON bodies, errors, the bearer check, and disconnects.

An error has OpenAI's form as SGLang writes it (`object`, `message`, ...), and the same inside
`error`. `request.state.error_body` makes another API's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hmac
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.errors import (
    ContextLengthError,
    EngineClosedError,
    JspecError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    shown,
)
from jspec.files.json_files import json_fault, json_of
from jspec.messages.unknown_fields import ignoring
from jspec.server.hardening.body_budget import BodyBudget
from jspec.server.hardening.json_bounds import check_structure
from jspec.server.hardening.line_limit import REFUSED
from jspec.server.server_args import ServerArgs

T = TypeVar("T")
LOGGER = logging.getLogger("jspec.server")
# Limits for reading the rest of a body that is too long, so that its client reads the answer.
DRAIN_BYTES = 256 * 2**20
DRAIN_SECONDS = 10.0
NEAR_PATH = 0.8  # minimum similarity of a suggested path
INLINE_BYTES = 16_384  # larger bodies are parsed in a thread
MAX_LOGGED = 300  # characters of a path or a refusal's message
INTERNAL = "internal error; the server's log has the traceback"
# Probes and scrapers have no key; the page contains nothing secret and asks for the key itself.
OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ping", "/ready", "/metrics"})


class ClientGoneError(Exception):
    """Raised if the client closed its connection before the answer."""


class LongBodyError(HTTPException):
    """Raised for a body that is too long. comes: the client is sending it."""

    def __init__(self, max_bytes: int, *, comes: bool) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request body has more than {max_bytes} bytes; expected at most that "
            f"(--max-request-bytes)",
            {"Connection": "close"},
        )
        self.comes = comes


class EarlyResponse(JSONResponse):
    """A whole answer, after which the rest of the body is read and discarded, within bounds:
    closing a connection with unread bytes resets it, so the client might never see the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await super().__call__(scope, receive, send_part)
        await _drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while num_bytes <= DRAIN_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):  # the end, or a disconnect
                    return


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error. code: OpenAI's name of it, in `error`; None: the status."""
    kind = HTTPStatus(status).phrase.replace(" ", "")
    if status == HTTPStatus.BAD_REQUEST:
        kind = "BadRequestError"
    inner = {"message": message, "type": kind, "param": None, "code": status}
    return {"object": "error", **inner, "error": {**inner, "code": code or status}}


def error_response(
    message: str, status: int, *, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, status), status_code=status, headers=headers)


def status_of(error: JspecError) -> int:
    if isinstance(error, QueueFullError | EngineClosedError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, RequestError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR


def code_of(error: JspecError) -> str | None:
    return "context_length_exceeded" if isinstance(error, ContextLengthError) else None


def public_message(error: JspecError) -> str:
    return INTERNAL if _is_bug(error) else error.message


def _is_bug(error: JspecError) -> bool:
    is_internal = status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR
    return is_internal and not isinstance(error, RequestFailedError)


def in_one_line(text: str) -> str:
    """Escape and cut a client's text, so that it cannot start another log line."""
    return text[:MAX_LOGGED].encode("unicode_escape").decode()


def log_refusal(request: Request, status: int, message: str) -> None:
    path, line = in_one_line(request.url.path), in_one_line(message)
    REFUSED.info("%d %s %s: %s", status, request.method, path, line)


async def on_jspec_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JspecError)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    status = status_of(error)
    if _is_bug(error):
        LOGGER.error("a bug in jspec", exc_info=error)
    log_refusal(request, status, str(error))
    return _error_response(request, public_message(error), status, headers, code_of(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND and message == HTTPStatus.NOT_FOUND.phrase:
        path = request.url.path
        near = near_path(path, [route.path for route in request.app.routes])
        hint = f"did you mean {near}? " if near else ""
        message = (
            f"{request.method} {path[:MAX_LOGGED]} is not served; {hint}GET /docs lists what is"
        )
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} {request.url.path} is not served; expected {allowed}"
    log_refusal(request, error.status_code, message)
    kind = EarlyResponse if isinstance(error, LongBodyError) and error.comes else JSONResponse
    return _error_response(request, message, error.status_code, error.headers, kind=kind)


def _error_response(
    request: Request,
    message: str,
    status: int,
    headers: Mapping[str, str] | None,
    code: str | None = None,
    kind: type[JSONResponse] = JSONResponse,
) -> JSONResponse:
    body = getattr(request.state, "error_body", error_body)(message, status, code)
    return kind(body, status_code=status, headers=headers)


def near_path(path: str, known: Sequence[str]) -> str:
    """Suggest a known route for an unknown path; "" if none is similar.

    /chat/completions → /v1/chat/completions, /v1/v1/models → /v1/models, /v1/generate → /generate
    """
    path = "/" + "/".join(filter(None, path[:MAX_LOGGED].split("/")))
    for near in known:
        if near != "/" and (near.endswith(path) or path.endswith(near)):
            return near
    return next(iter(difflib.get_close_matches(path, known, n=1, cutoff=NEAR_PATH)), "")


async def on_gone(_: Request, __: Exception) -> Response:
    # Not sent, since the connection is closed. Proxies log 499 for it.
    return Response(status_code=499)


HANDLERS: Mapping[Any, Any] = {
    JspecError: on_jspec_error,
    HTTPException: on_http_error,
    ClientGoneError: on_gone,
    ClientDisconnect: on_gone,
}


async def read_call(
    request: Request, args: ServerArgs, parse: Callable[[object], T], *, or_empty: bool = False
) -> T:
    """Return parse(JSON of the body). or_empty: an empty body is an empty object.

    A long body is parsed in a thread, so that other requests proceed. Unknown fields are ignored
    (jspec.messages.unknown_fields), or refused if --strict-requests.

    Raises the errors of `parse` and `read_bytes`, RequestError if the body is not JSON, and
    HTTPException 415 for types that a browser sends to other sites without preflight.
    """
    body = await read_bytes(request, args)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the Content-Type is {shown(kind)}; expected application/json "
            "(curl: -H 'Content-Type: application/json')",
        )
    if not body and not or_empty:
        raise RequestError("the request body is empty; expected a JSON object")

    ignored = None if args.strict_requests else request.app.state.ignored_fields

    def parsed() -> T:
        with ignoring(ignored):
            return parse(_loaded(body) if body else {})

    return parsed() if len(body) <= INLINE_BYTES else await asyncio.to_thread(parsed)


def _loaded(body: bytes) -> object:
    check_structure(body)
    try:
        return json_of(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("the request body is nested too deeply; expected plain JSON") from None
    except ValueError as error:
        raise RequestError(f"the request body {json_fault(error)}") from None


async def read_bytes(request: Request, args: ServerArgs) -> bytes:
    """Return the body. Raises HTTPException: 413 too long, 408 too slow, 503 refused for others."""
    budget: BodyBudget = request.app.state.body_budget
    limit = asyncio.timeout(args.request_timeout)
    with budget.open(limit) as unfinished:
        try:
            async with limit:
                count = partial(budget.add, unfinished)
                return await _read_body(request, args.max_request_bytes, count=count)
        except TimeoutError:
            pass
    if unfinished.is_refused:
        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"unfinished request bodies have more than {budget.max_bytes} bytes together, and this "
            "one is the oldest; expected to be sent again",
            {"Connection": "close", "Retry-After": "1"},
        )
    raise HTTPException(
        HTTPStatus.REQUEST_TIMEOUT,
        f"the request body did not come within {args.request_timeout:g} s (--request-timeout)",
        {"Connection": "close"},
    )


async def _read_body(request: Request, max_bytes: int, *, count: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        # A client that waits for "100 Continue" sends nothing.
        waits = request.headers.get("expect", "").lower() == "100-continue"
        raise LongBodyError(max_bytes, comes=not waits)
    body = bytearray()
    async for part in request.stream():
        body += part
        count(len(part))
        if len(body) > max_bytes:
            raise LongBodyError(max_bytes, comes=True)
    return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it and raise ClientGoneError if the client disconnects. The body must
    have been read: the next message of `receive` is then the disconnect."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BearerAuth:
    """Middleware: every path except OPEN_PATHS needs the key as a bearer token or X-API-Key, with
    paths and headers as in SGLang (srt/utils/auth.py)."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            response = error_response(
                "the API key is missing or wrong; expected Authorization: Bearer KEY",
                HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), token if scheme.lower() == b"bearer" else b""]
        return any(hmac.compare_digest(key, self._key) for key in keys)


class RequestLog:
    """Middleware that logs one line per finished request, without its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            seconds = time.monotonic() - started
            path = in_one_line(scope["path"])
            LOGGER.info("%s %s %d in %.3f s", scope["method"], path, status, seconds)
