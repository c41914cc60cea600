"""Replicas without HTTP, for the duration of a batch run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from jspec.distributed.ray_replicas import (
    RayReplicas,
    check_gpus,
    import_serve,
    replica_deployment,
)
from jspec.distributed.replica_args import ServeSettings
from jspec.errors import ConfigError


@contextmanager
def replicas_on_ray(arguments: Mapping[str, Any], *, address: str | None) -> Iterator[RayReplicas]:
    """Start replicas on a cluster, and remove them at the end. Raises ConfigError.

    address: a cluster's; None: RAY_ADDRESS, a cluster of this machine, or a new one for this run.
    """
    serve, settings = import_serve(), ServeSettings.of(arguments)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster is at {address or 'RAY_ADDRESS'!r} ({error}); expected the address "
            "of a running one, or --ray alone for one of this machine"
        ) from error
    check_gpus(settings, ray.nodes())
    name = f"jspec-batch-{uuid.uuid4().hex[:8]}"
    try:
        serve.start(http_options={"location": "NoServer"})
        handle = serve.run(replica_deployment(settings), name=name, route_prefix=None)
        yield RayReplicas(handle)
    finally:
        with suppress(Exception):  # what ended the run may have ended Serve, too
            serve.delete(name)
        ray.shutdown()
