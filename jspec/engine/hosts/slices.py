"""Detection of a TPU slice of several hosts, with jax's own cluster detection."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax._src import clusters

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace, check_served, given_place
from jspec.errors import ConfigError

log = logging.getLogger("jspec.engine")
PORT = 8470  # of the channel on a slice; jax's coordinator has the next one


def place_of(args: EngineArgs) -> HostPlace | None:
    """Return this process's place, as given or in its TPU slice; None for a single host."""
    if args.nnodes is not None or args.dist_init_addr is not None:
        return given_place(args)
    found = _slice()
    if found is None:
        return None
    try:
        count, rank = found.get_process_count(), found.get_process_id()
        if count == 1:
            return None
        address = found.get_coordinator_address(int(args.dist_timeout), str(PORT))
    except Exception as error:  # of the metadata server, and RuntimeError
        raise ConfigError(
            f"nnodes is unset, and the hosts of this TPU slice cannot be found: {error!r}; "
            "expected nnodes, node_rank and dist_init_addr, or nnodes 1 for this host alone"
        ) from error
    check_served(args, count)
    host, port = address.rsplit(":", 1)
    return HostPlace(count=count, rank=rank, host=host, port=int(port), timeout=args.dist_timeout)


def _slice() -> Any | None:
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and "tpu" not in platforms:
        return None
    for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
        try:
            if cluster.is_env_present():
                return cluster
        except Exception as error:  # the metadata server cannot be reached, or requests is missing
            log.warning("whether this host belongs to a TPU slice is unknown: %r", error)
    return None
