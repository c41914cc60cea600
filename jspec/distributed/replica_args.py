"""Arguments of a deployment of replicas, in addition to those of each engine and the ingress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from jspec.config.arguments import argument, check_arguments, meant_argument, type_of
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError, shown
from jspec.server.server_args import ServerArgs

_REPLICAS = "Replicas"
# Server arguments that concern a socket, files of one machine, or one process.
NOT_OF_SERVE = {
    **dict.fromkeys(("host", "port"), "`serve start`, or http_options in the file"),
    **dict.fromkeys(
        ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
        "TLS in the load balancer before Ray's proxies",
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr", "dist_timeout"),
        "it to be left out: a replica runs on one host",
    ),
    "shutdown_timeout": "graceful_shutdown_timeout_s",
    "profile_dir": "it to be left out: a profile is one engine's",
    "trace_requests": "otlp_traces_endpoint, or it to be left out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaArgs:
    """Number, place and life of the replicas. Raises ConfigError."""

    num_replicas: int = argument(1, "Replicas, each an engine of its own", _REPLICAS, low=1)
    min_replicas: int = argument(1, "Fewest replicas with autoscaling", _REPLICAS, low=0)
    max_replicas: int | None = argument(
        None, "Most replicas; setting it turns autoscaling on", _REPLICAS, low=1
    )
    target_ongoing_requests: float = argument(
        32.0, "Requests in flight per replica that autoscaling aims at", _REPLICAS, above=0
    )
    max_ongoing_requests: int = argument(
        1024, "Most requests of a replica; more wait in the ingress", _REPLICAS, low=1
    )
    most_ahead: int = argument(
        8,
        "A prompt goes to the replica that has its beginning cached while that has at most this "
        "many requests more than the least loaded; else to the less loaded of two",
        _REPLICAS,
        low=0,
    )
    most_blocks: int = argument(
        65536,
        "Blocks of 64 tokens of prompts whose replicas an ingress remembers; about 16,000 for each "
        "replica, some hundred bytes each",
        _REPLICAS,
        low=1,
    )
    num_gpus: float = argument(0.0, "GPUs of each replica", _REPLICAS, low=0)
    num_cpus: float = argument(1.0, "CPUs of each replica, for Ray's placement", _REPLICAS, low=0)
    num_ingresses: int = argument(1, "Processes with HTTP and tokenizer", _REPLICAS, low=1)
    graceful_shutdown_timeout_s: float = argument(
        20.0, "Seconds that requests get to end in a replica that is removed", _REPLICAS, low=0
    )
    health_check_period_s: float = argument(
        2.0, "Seconds between health checks", _REPLICAS, above=0
    )
    health_check_timeout_s: float = argument(
        60.0, "Seconds without an answer after which a replica is replaced", _REPLICAS, above=0
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; expected at least min_replicas, "
                f"{self.min_replicas}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All arguments of an application; ray_actor_options are Ray's, for a replica's place."""

    engine: Mapping[str, Any]  # only explicitly set ones
    server: ServerArgs
    replicas: ReplicaArgs
    ray_actor_options: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServeSettings:
        """Sort arguments by their owner; texts, as on a command line, become their type.

        Raises ConfigError for an unknown name, and for one that has no effect here.
        """
        owners = (EngineArgs, ServerArgs, ReplicaArgs)
        kinds = {each.name: type_of(each) for owner in owners for each in fields(owner)}
        found: dict[str, Any] = {}
        for name, value in values.items():
            if name in NOT_OF_SERVE:
                raise ConfigError(
                    f"{name} is {shown(value)}; on Ray it has no effect: expected "
                    f"{NOT_OF_SERVE[name]}"
                )
            if name != "ray_actor_options" and name not in kinds:
                meant = meant_argument(name, *owners)
                raise ConfigError(f"unknown argument {name!r}{meant}")
            found[name] = _typed(name, value, kinds.get(name, "mapping"))
        options = found.pop("ray_actor_options", {})
        of = {owner: {each.name for each in fields(owner)} & found.keys() for owner in owners}
        engine, server, replicas = ({n: found[n] for n in of[owner]} for owner in owners)
        EngineArgs.from_mapping(engine)
        return cls(
            engine=engine,
            server=ServerArgs(**server),
            replicas=ReplicaArgs(**replicas),
            ray_actor_options=options,
        )


def _typed(name: str, value: Any, kind: str) -> Any:
    """Convert a text to the type of its argument; other values are checked where they belong."""
    if kind == "mapping":
        given = value
        if isinstance(value, str):
            with suppress(ValueError):
                value = json.loads(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {shown(given)}; expected an object: {{num_gpus: 1}}")
        return value
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null"):
        return None
    with suppress(ValueError):
        if kind == "bool":
            return {"true": True, "false": False}.get(value.lower(), value)
        if kind in ("int", "float"):
            return int(value) if kind == "int" else float(value)
    return value
