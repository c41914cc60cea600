"""What a user may set on the server itself; what the model pair needs is in `EngineArgs`.

It opens no socket and reads no file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from jspec.core.errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/\s,*?#]+")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Arguments of `jspec serve` beside the engine's.

    host, port: where to listen; port 0 takes a free one. served_model_name: the id in /v1/models;
    None uses the model path's last part. api_key: asked for as "Authorization: Bearer KEY" or
    "X-API-Key: KEY". incremental_streaming_output: /generate streams deltas instead of all text so
    far. stream_interval: tokens between two events of a stream, at least. log_interval: seconds
    between two decode lines in the log; 0 writes none. max_request_bytes: largest request body.
    request_timeout: seconds in which a request's head, and then its body, must have come.
    shutdown_timeout: seconds that SIGTERM leaves to running requests. allowed_origins: web pages
    from elsewhere that may use the server, separated by commas; "*" is all. profile_dir: where
    /start_profile writes; None refuses it. ssl_certfile, ssl_keyfile, ssl_keyfile_password: for
    TLS. log_requests: a line in the log for each request, not for the refused ones alone.
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
    request_timeout: float = 60.0
    shutdown_timeout: float = 20.0
    allowed_origins: str | None = None
    profile_dir: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    log_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected an integer from 0 to 65535")
        texts = ("host", "served_model_name", "api_key", "profile_dir", "ssl_certfile")
        for name in (*texts, "ssl_keyfile"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; expected text, or leave it out")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level is {self.log_level!r}; expected one of {', '.join(LOG_LEVELS)}"
            )
        for name in ("log_interval", "shutdown_timeout"):
            seconds = getattr(self, name)
            if not math.isfinite(seconds) or seconds < 0:
                raise ConfigError(f"{name} is {seconds}; expected seconds, 0 or more")
        if not math.isfinite(self.request_timeout) or self.request_timeout <= 0:
            raise ConfigError(
                f"request_timeout is {self.request_timeout}; expected seconds, more than 0"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("ssl_keyfile is given without ssl_certfile; expected both")
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins holds {origin!r}; expected * or origins such as "
                    "https://example.com"
                )
        for name in ("stream_interval", "max_request_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; expected an integer of at least 1"
                )

    @property
    def origins(self) -> tuple[str, ...]:
        """allowed_origins, one by one; also as vLLM writes them, a JSON list."""
        words = (self.allowed_origins or "").strip("[] ").split(",")
        return tuple(word.strip(" \"'").rstrip("/") for word in words if word.strip(" \"'"))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
