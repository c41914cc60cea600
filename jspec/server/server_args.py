"""What a user may set on the server itself; what the model pair needs is in `EngineArgs`.

It opens no socket and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jspec.core.arguments import argument, check_arguments
from jspec.core.errors import ConfigError

_SERVER = "Server"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Arguments of `jspec serve` beside the engine's. Raises ConfigError for what cannot be."""

    host: str = argument("127.0.0.1", "Address to listen on (127.0.0.1)", _SERVER)
    port: int = argument(30000, "Port to listen on; 0 takes a free one", _SERVER, low=0, high=65535)
    served_model_name: str | None = argument(
        None, "The id in /v1/models; unset: the model path's last part", _SERVER
    )
    api_key: str | None = argument(
        None, 'Asked for as "Authorization: Bearer KEY" or "X-API-Key: KEY"', _SERVER
    )
    log_level: str = argument(
        "info",
        "debug, info, warning, error or critical (info)",
        _SERVER,
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_interval: float = argument(
        5.0,
        "Seconds between decode lines in the log; 0: none",
        _SERVER,
        low=0,
        expected="seconds, 0 or more",
    )
    incremental_streaming_output: bool = argument(
        False, "/generate streams deltas instead of all text so far", _SERVER
    )
    stream_interval: int = argument(
        1, "Tokens between two events of a stream, at least", _SERVER, low=1
    )
    max_request_bytes: int = argument(32 * 2**20, "Largest request body", _SERVER, low=1)

    def __post_init__(self) -> None:
        check_arguments(self)
        for name in ("host", "served_model_name", "api_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; expected text, or leave it out")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
