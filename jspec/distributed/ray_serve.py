"""Replicas on Ray Serve: `serve run jspec.distributed.ray_serve:app num_replicas=2`.

Serve's proxy → Ingress (the HTTP application, tokenizer, seeds, open streams)
                    ↓ requests of token ids; chunks come back
                EngineReplica, EngineReplica, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import ASGIApp

from jspec.distributed.ray_replicas import (
    RayReplicas,
    check_gpus,
    import_serve,
    replica_deployment,
)
from jspec.distributed.remote_engine import remote_engine
from jspec.distributed.replica_args import ServeSettings
from jspec.server.app import create_app

MOST_CONNECTIONS = 65536  # of an ingress; the engines' queues bound the requests


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the Serve application for arguments of EngineArgs, ServerArgs and ReplicaArgs.

    Serve calls it, for `serve run` and for `import_path` of a file. Raises ConfigError.
    """
    serve = import_serve()
    settings = ServeSettings.of(arguments)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=settings.replicas.num_ingresses,
        max_ongoing_requests=MOST_CONNECTIONS,
        # It computes nothing on a device, and must not reserve one's memory.
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}},
    )
    return ingress.bind(replica_deployment(settings), settings)


class Ingress:
    """The server's HTTP application, around replicas instead of an engine."""

    def __init__(self, handle: Any, settings: ServeSettings) -> None:
        import ray

        check_gpus(settings, ray.nodes())
        self._replicas, self._settings = RayReplicas(handle), settings
        self._until_end = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application once a replica runs."""
        engine = await self._until_end.enter_async_context(
            remote_engine(self._replicas, self._settings.engine)
        )
        return create_app(engine, self._settings.server)

    async def __del__(self) -> None:
        if hasattr(self, "_until_end"):
            await self._until_end.aclose()
