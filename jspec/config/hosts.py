"""The place of a process among the hosts that run one engine together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jspec.errors import ConfigError

HIGHEST_PORT = 65534  # the next one is used too


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """One of `count` hosts. Host 0 listens at (host, port), and jax's coordinator at port + 1."""

    count: int
    rank: int
    host: str
    port: int
    timeout: float  # seconds that hosts wait for each other

    @property
    def address(self) -> str:
        return f"{self._bracketed}:{self.port}"

    @property
    def coordinator(self) -> str:
        return f"{self._bracketed}:{self.port + 1}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def given_place(args: Any) -> HostPlace | None:
    """Return the place that `EngineArgs` give; None for one host. Raises ConfigError."""
    count, rank = args.nnodes or 1, args.node_rank or 0
    if rank >= count:
        raise ConfigError(
            f"node_rank is {rank}, but nnodes is {count}; expected a rank below nnodes"
        )
    if count == 1:
        return None
    if args.dist_init_addr is None:
        raise ConfigError(
            f"nnodes is {count} without dist_init_addr; expected HOST:PORT of host 0, the same on "
            "every host"
        )
    host, port = _host_and_port(args.dist_init_addr)
    return HostPlace(count=count, rank=rank, host=host, port=port, timeout=args.dist_timeout)


def check_hosts(args: Any) -> None:
    """Raise ConfigError for arguments that several hosts do not support."""
    if given_place(args) is not None:
        check_served(args, args.nnodes)


def check_served(args: Any, count: int) -> None:
    if args.tp_size % count:
        raise ConfigError(
            f"tp_size is {args.tp_size} on {count} hosts; expected a multiple of {count}: the "
            "number of devices of all hosts together"
        )
    if args.expert_distribution_recorder_mode is not None:
        raise ConfigError(
            f"expert_distribution_recorder_mode is {args.expert_distribution_recorder_mode!r} on "
            f"{count} hosts; expected it unset: the counts of one host are read"
        )
    if args.speculative_adaptive:
        raise ConfigError(
            f"speculative_adaptive is True on {count} hosts; expected False: shapes are chosen by "
            "step times that one host measures alone"
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= HIGHEST_PORT:
        raise ConfigError(
            f"dist_init_addr is {address!r}; expected HOST:PORT with a port from 1 to "
            f"{HIGHEST_PORT}"
        )
    return host.strip("[]"), int(port)
