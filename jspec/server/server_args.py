"""What a user may set on the server itself; what the model pair needs is in `EngineArgs`.

It opens no socket and reads no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from jspec.core.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Arguments of `jspec serve` beside the engine's.

    host, port: where to listen; port 0 takes a free one. served_model_name: the id in /v1/models;
    None uses the model path's last part. api_key: asked for as "Authorization: Bearer KEY" or
    "X-API-Key: KEY". incremental_streaming_output: /generate streams deltas instead of all text so
    far. stream_interval: tokens between two events of a stream, at least. log_interval: seconds
    between two decode lines in the log; 0 writes none. max_request_bytes: largest request body.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    api_key: str | None = None
    log_level: str = "info"
    log_interval: float = 5.0
    incremental_streaming_output: bool = False
    stream_interval: int = 1
    max_request_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected an integer from 0 to 65535")
        for name in ("host", "served_model_name", "api_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; expected text, or leave it out")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level is {self.log_level!r}; expected one of {', '.join(LOG_LEVELS)}"
            )
        if not math.isfinite(self.log_interval) or self.log_interval < 0:
            raise ConfigError(f"log_interval is {self.log_interval}; expected seconds, 0 or more")
        for name in ("stream_interval", "max_request_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; expected an integer of at least 1"
                )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
