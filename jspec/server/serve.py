"""Runs the server: socket, engine, uvicorn, in that order, with a log line for each stage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.gc_control import freeze_heap
from jspec.engine.hosts.follower import follow
from jspec.engine.hosts.handshake import token_in
from jspec.engine.hosts.slices import place_of
from jspec.engine.interrupts import interruptible
from jspec.engine.programs.compilation import Progress
from jspec.errors import ConfigError, JspecError
from jspec.server.app import create_app
from jspec.server.control.request_spans import check_exporter
from jspec.server.hardening.connections import (
    ACCEPTS_IN_A_TURN,
    Handshakes,
    Listener,
    bounded_protocol,
    most_connections,
    refuse_half_sent,
)
from jspec.server.hardening.line_limit import limited_lines
from jspec.server.server_args import ServerArgs, Settings
from jspec.server.service import Service
from jspec.serving.engine import Engine

LOGGER = logging.getLogger("jspec.server")
GRACE_SECONDS = 5
DRAIN_POLL_SECONDS = 0.05
END_SECONDS = 1.0  # for aborted requests to send their last event
KEY_VARIABLE = "JSPEC_API_KEY"


class EngineServer(uvicorn.Server):
    """A uvicorn server that logs its start. SIGTERM refuses new requests (503) and gives running
    ones shutdown_timeout seconds; any other signal, or a second one, ends streams immediately."""

    def __init__(
        self, config: uvicorn.Config, *, service: Service, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._signals: list[int] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - of uvicorn
        """Record the signal; no more requests are accepted."""
        # uvicorn must not see it: it raises each signal again after its shutdown, and a SIGTERM
        # would end the process before the engine is closed.
        self._signals.append(sig)
        self._service.is_shutting_down = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """After SIGTERM wait for running requests; close the engine, then the connections."""
        self._service.is_shutting_down = True
        if self._signals == [signal.SIGTERM]:
            await self._drain()
        for server in self.servers:
            server.close()
        await self._end_requests()
        await self._service.engine.close()
        # Abort clients that do not read the end of their answer, since uvicorn's cancellation logs
        # a traceback.
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._abort)
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # uvicorn skips the lifespan shutdown then
            await self.lifespan.shutdown()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain(self) -> None:
        refuse_half_sent(self.server_state.connections)
        seconds = self._service.args.shutdown_timeout
        tasks = self.server_state.tasks
        if tasks:
            LOGGER.info("shutting down: waiting up to %g s; requests: %d", seconds, len(tasks))
        deadline = time.monotonic() + seconds
        while tasks and len(self._signals) == 1 and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if tasks:
            LOGGER.info("shutting down: requests aborted: %d", len(tasks))

    async def _end_requests(self) -> None:
        """Abort all requests, so that each stream reports it and ends with [DONE]."""
        with contextlib.suppress(JspecError, TimeoutError):  # the engine failed or hangs
            async with asyncio.timeout(END_SECONDS):
                await self._service.engine.abort_all(why="the server is shutting down")
                while self.server_state.tasks:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)


def bind(args: ServerArgs) -> Listener:
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    # asyncio disables Nagle only if the protocol is named; else each event waits 40 ms for an ACK.
    bound = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((args.host, args.port))
    except (OSError, TypeError, ValueError) as error:  # ValueError, TypeError: an invalid host name
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot listen on host {args.host}, port {args.port}: {reason}; "
            f"expected a free port of this machine"
        ) from error
    return bound


def url_of(bound: socket.socket, *, scheme: str = "http") -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def with_environment(args: ServerArgs, environment: Mapping[str, str]) -> ServerArgs:
    key = environment.get(KEY_VARIABLE)
    return args if args.api_key is not None or not key else replace(args, api_key=key)


def check_certificate(args: ServerArgs) -> None:
    """Raise ConfigError for unusable TLS files, before anything loads."""
    if args.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or ""
        )
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(
            f"ssl_certfile {args.ssl_certfile!r} with ssl_keyfile {args.ssl_keyfile!r} cannot be "
            f"used: {error}; expected a certificate and its key, as PEM"
        ) from error


def log_progress(log: Callable[[str], None]) -> Progress:
    def progress(done: int, total: int, what: str, how: str) -> None:
        log(f"{how} {done}/{total}: {what}")

    return progress


def describe(engine: Engine) -> str:
    draft_shape, limits = engine.limits.draft_shape, engine.limits
    shape = (
        f" {draft_shape.num_steps}/{draft_shape.topk}/{draft_shape.num_draft_tokens}"
        if draft_shape.num_steps
        else ""
    )
    if draft_shape.lookup:
        shape += " and a lookup"
    if draft_shape.simulate_acceptance is not None:
        shape += f" with SIMULATED acceptance {draft_shape.simulate_acceptance:g}"
    return (
        f"{engine.config.speculative_algorithm}{shape}, {limits.pool.max_rows} slots, "
        f"context {limits.pool.context_length}, KV pool {limits.max_total_tokens} tokens"
    )


def describe_config(config: ResolvedConfig) -> str:
    known = ((name, value) for name, value in config.values().items() if value is not None)
    return ", ".join(f"{name}={value}" for name, value in known)


def measurement_warnings(args: EngineArgs) -> tuple[str, ...]:
    warnings = []
    if args.simulate_acceptance is not None:
        warnings.append(
            f"simulate_acceptance is {args.simulate_acceptance:g}: drafts are accepted whatever "
            f"the target chose; the text is not the model's"
        )
    if args.load_format == "dummy":
        warnings.append("load_format is dummy: the weights are random, the text means nothing")
    return tuple(warnings)


def serve(settings: Settings) -> None:
    """Serve until a signal. Raises ConfigError or CheckpointError before it listens."""
    started = time.monotonic()
    args = with_environment(settings.server, os.environ)
    check_certificate(args)
    check_exporter(args.otlp_traces_endpoint)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
    )
    if args.log_level == "info":
        logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each backend it lacks
    for warning in settings.warnings:
        LOGGER.warning("%s", warning)
    place = place_of(settings.engine_args)
    if place is not None and place.rank:
        follow_host_0(settings.engine_args, place)
        return
    with limited_lines(), bind(args) as bound, contextlib.ExitStack() as stack:
        with interruptible():
            LOGGER.info("loading %s", settings.engine_args.model_path or "the bundled pair")
            progress = log_progress(LOGGER.info)
            engine = stack.enter_context(Engine(progress=progress, **settings.engine))
            LOGGER.info("%s", describe(engine))
            LOGGER.info("resolved: %s", describe_config(engine.config))
            for warning in measurement_warnings(settings.engine_args):
                LOGGER.warning("%s", warning)
            server = _server(
                engine,
                args,
                bound,
                on_ready=lambda: LOGGER.info(
                    "ready: %s after %.1f s",
                    url_of(bound, scheme="https" if args.ssl_certfile else "http"),
                    time.monotonic() - started,
                ),
            )
            freeze_heap()
        server.run(sockets=[bound])
        LOGGER.info("stopped")


def follow_host_0(args: EngineArgs, place: HostPlace) -> None:
    """Follow host 0 until it ends, or this process gets SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # its runner process ends too
    token = token_in(os.environ)
    LOGGER.info("host %d of %d, of host 0 at %s", place.rank, place.count, place.address)
    follow(args, place, token)
    LOGGER.info("stopped")


def _server(
    engine: Engine, args: ServerArgs, bound: Listener, *, on_ready: Callable[[], None]
) -> EngineServer:
    app = create_app(engine, args)
    config = server_config(app, args, bound)
    return EngineServer(config, service=app.state.service, on_ready=on_ready)


def server_config(app: ASGIApp, args: ServerArgs, bound: Listener) -> uvicorn.Config:
    most = most_connections()
    bound.handshakes = Handshakes(most)
    return uvicorn.Config(
        app,
        http=bounded_protocol(
            head_seconds=args.request_timeout, max_connections=most, handshakes=bound.handshakes
        ),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
        loop="asyncio",
        backlog=ACCEPTS_IN_A_TURN,
        log_config=None,
        log_level="warning" if args.log_level == "info" else args.log_level,
        access_log=args.log_level == "debug",
        timeout_graceful_shutdown=GRACE_SECONDS + 1,
    )
