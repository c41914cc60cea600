"""Running the server: socket, engine, uvicorn, in that order, with every stage said aloud.

It parses nothing: settings come checked.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable

import uvicorn

from jspec.api import Engine
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import ConfigError
from jspec.core.resolved_config import ResolvedConfig
from jspec.engine.compilation import Progress
from jspec.engine.interrupts import interruptible
from jspec.server.app import create_app
from jspec.server.flags import Settings
from jspec.server.server_args import ServerArgs

LOGGER = logging.getLogger("jspec.server")
GRACE_SECONDS = 5


class EngineServer(uvicorn.Server):
    """A uvicorn server that says when it listens, and ends the engine's streams before it waits.

    Without the latter a shutdown would wait for every generation to run to its end.
    """

    def __init__(
        self, config: uvicorn.Config, *, engine: Engine, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then calls on_ready."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the engine, then the connections."""
        await self._engine.close()
        await super().shutdown(sockets=sockets)


def bind(args: ServerArgs) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError if the address is no free one."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    bound = socket.socket(family=family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((args.host, args.port))
    except (OSError, TypeError, ValueError) as error:  # the latter: no host has such a name
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot listen on host {args.host}, port {args.port}: {reason}; "
            f"expected a free port of this machine"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """http://127.0.0.1:30000"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_progress(log: Callable[[str], None]) -> Progress:
    """The programs' progress as lines: compiled 3/9: decode B=4, or loaded 3/9 from the disk."""

    def progress(done: int, total: int, what: str, how: str) -> None:
        log(f"{how} {done}/{total}: {what}")

    return progress


def describe(engine: Engine) -> str:
    """The engine in one line."""
    spec, limits = engine.limits.spec, engine.limits
    shape = f" {spec.num_steps}/{spec.topk}/{spec.num_draft_tokens}" if spec.num_steps else ""
    if spec.simulate_acceptance is not None:
        shape += f" with SIMULATED acceptance {spec.simulate_acceptance:g}"
    return (
        f"{spec.algorithm.value}{shape}, {limits.num_slots} slots, "
        f"context {limits.context_length}, KV pool {limits.max_total_tokens} tokens"
    )


def describe_config(config: ResolvedConfig) -> str:
    """Every resolved value in one line, but for those that are None."""
    known = ((name, value) for name, value in config.values().items() if value is not None)
    return ", ".join(f"{name}={value}" for name, value in known)


def measurement_warnings(args: EngineArgs) -> tuple[str, ...]:
    """What makes this engine's text meaningless, one line each; empty for an ordinary one."""
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
    """Serves until a signal ends it. Raises ConfigError or CheckpointError before it listens."""
    started = time.monotonic()
    args = settings.server
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
    with bind(args) as bound, contextlib.ExitStack() as stack:
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
                on_ready=lambda: LOGGER.info(
                    "ready: %s after %.1f s", url_of(bound), time.monotonic() - started
                ),
            )
        # uvicorn passes the signal on once it has shut down, where it is not ignored.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
        LOGGER.info("stopped")


def _server(engine: Engine, args: ServerArgs, *, on_ready: Callable[[], None]) -> EngineServer:
    config = uvicorn.Config(
        create_app(engine, args),
        http="h11",
        loop="asyncio",
        log_config=None,
        log_level="warning" if args.log_level == "info" else args.log_level,
        access_log=args.log_level == "debug",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return EngineServer(config, engine=engine, on_ready=on_ready)
