"""Ray Serve's side of the replicas: their deployment, a handle to them, and its router.

Ray is imported where it is used, so this module loads without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextvars import Context
from typing import Any

from jspec.distributed.continued_stream import EngineLostError, Item
from jspec.distributed.replica import EngineReplica, Facts
from jspec.distributed.replica_args import ServeSettings
from jspec.errors import ConfigError, RequestFailedError
from jspec.messages.request import Request

ANSWER_SECONDS = 10.0  # for a call of every replica
QUIET = {"enable_access_log": False}  # reports would log a line per second
REPLICA_NAME = "EngineReplica"


def import_serve() -> Any:
    """Return ray.serve. Raises ConfigError if Ray is missing."""
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed; expected `pip install 'jspec[ray]'` in this environment, and "
            f"in that of every node ({error})"
        ) from error
    return serve


def replica_deployment(settings: ServeSettings) -> Any:
    """Return the bound deployment of the engine replicas. Raises ConfigError."""
    serve, given = import_serve(), settings.replicas
    from jspec.distributed.prefix_router import PrefixRouter

    scaling: dict[str, Any] = {"num_replicas": given.num_replicas}
    if given.max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": given.min_replicas,
                "initial_replicas": max(given.min_replicas, 1),
                "max_replicas": given.max_replicas,
                "target_ongoing_requests": given.target_ongoing_requests,
            }
        }
    deployment = serve.deployment(
        EngineReplica,
        name=REPLICA_NAME,
        ray_actor_options=actor_options(settings),
        max_ongoing_requests=given.max_ongoing_requests,
        graceful_shutdown_timeout_s=given.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=QUIET,
        health_check_period_s=given.health_check_period_s,
        health_check_timeout_s=given.health_check_timeout_s,
        request_router_config=serve.config.RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "most_ahead": given.most_ahead,
                "most_blocks": given.most_blocks,
            },
        ),
        **scaling,
    )
    return deployment.bind(dict(settings.engine))


def actor_options(settings: ServeSettings) -> dict[str, Any]:
    """Return Ray's options for the place of a replica."""
    given = settings.replicas
    own = {"num_cpus": given.num_cpus, "num_gpus": given.num_gpus}
    return {**own, **settings.ray_actor_options}


def check_gpus(settings: ServeSettings, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if no node (ray.nodes()) has a replica's GPUs, for which it would wait
    forever.

    GPUs in ray_actor_options are not checked, since the cluster may grow.
    """
    num_gpus = settings.replicas.num_gpus
    of_nodes = (node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"])
    if num_gpus > (most := max(of_nodes, default=0.0)):
        raise ConfigError(
            f"num_gpus is {num_gpus:g}, and no node has more than {most:g}; expected at most "
            "that, 0 for replicas on CPUs, or ray_actor_options if the cluster grows"
        )


class RayReplicas:
    """Implements `remote_engine.Replicas` with a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True).stream

    async def facts(self) -> Facts:
        found: Facts = await self._handle.facts.remote()
        return found

    async def connect(self, request: Request, *, waits: bool) -> AsyncGenerator[Item]:
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        # In the context of an HTTP request all calls would have its id, and Serve's router loses
        # all but one of several pending calls with one id.
        response = Context().run(self._streams.remote, request, waits=waits)
        is_whole = False
        try:
            async for item in response:
                yield item
            is_whole = True
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # of a call that the replica made
                raise EngineLostError(str(error.cause)) from error
            why = f"request {request.request_id!r} was ended by an internal error of its replica"
            yield RequestFailedError(why, f": {error.cause!r}")
        except (RayError, RayServeException) as error:
            raise EngineLostError(_first_line(error)) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The replica cancelled it, because it is being removed.
            raise EngineLostError("its replica was stopped") from error
        finally:
            if not is_whole:
                response.cancel()

    async def each(self, method: str) -> list[Any]:
        from ray.serve.exceptions import RayServeException

        try:
            found = await self._handle.broadcast(method).results_async(
                timeout_s=ANSWER_SECONDS, return_exceptions=True
            )
        except RayServeException:  # no replica is alive
            return []
        except TimeoutError:
            raise EngineLostError(f"a replica did not answer in {ANSWER_SECONDS:g} s") from None
        return [each for each in found if not isinstance(each, BaseException)]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
