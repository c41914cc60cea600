"""Arguments of the server itself; the model's are in `EngineArgs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspec.config.arguments import argument, check_arguments
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError
from jspec.text.calls.registry import (
    CALL_ALIASES,
    CALL_FORMATS,
    GPT_OSS,
    REASONING_ALIASES,
    REASONING_FORMATS,
    AnswerFormat,
)

_SERVER = "Server"
_ORIGIN = re.compile(r"https?://[^/\s,*?#]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Arguments of `jspec serve` in addition to the engine's. Raises ConfigError."""

    host: str = argument("127.0.0.1", "Address to listen on (127.0.0.1)", _SERVER)
    port: int = argument(30000, "Port to listen on; 0: a free one", _SERVER, low=0, high=65535)
    served_model_name: str | None = argument(
        None, "Model id in /v1/models; unset: the last part of the model path", _SERVER
    )
    api_key: str | None = argument(
        None,
        'Key that requests must send as "Authorization: Bearer KEY" or "X-API-Key: KEY"',
        _SERVER,
    )
    log_level: str = argument(
        "info",
        "Log level: debug, info, warning, error or critical (info)",
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
        False, "Stream deltas from /generate instead of all text so far", _SERVER
    )
    stream_interval: int = argument(1, "Minimum tokens between two stream events", _SERVER, low=1)
    max_request_bytes: int = argument(
        32 * 2**20, "Maximum size of a request body in bytes", _SERVER, low=1
    )
    request_timeout: float = argument(
        60.0,
        "Seconds allowed to receive a request's head, and then its body",
        _SERVER,
        above=0,
        expected="seconds, more than 0",
    )
    shutdown_timeout: float = argument(
        25.0,
        "Seconds that running and waiting requests get after SIGTERM; Ctrl-C gives none",
        _SERVER,
        aliases=("--drain-seconds",),
        low=0,
        expected="seconds, 0 or more",
    )
    allowed_origins: str | None = argument(
        None,
        "Origins of web pages that may use the server (CORS): https://a.example,https://b.example",
        _SERVER,
    )
    profile_dir: str | None = argument(
        None, "Directory that /start_profile writes to; unset: it is refused", _SERVER
    )
    ssl_certfile: str | None = argument(None, "TLS certificate chain", _SERVER)
    ssl_keyfile: str | None = argument(None, "TLS key, if not in the certificate's file", _SERVER)
    ssl_keyfile_password: str | None = argument(None, "Password of the TLS key", _SERVER)
    log_requests: bool = argument(
        False, "Log a line per request; otherwise only refused ones are logged", _SERVER
    )

    strict_requests: bool = argument(
        False, "Refuse requests with unknown fields; otherwise they are ignored and logged", _SERVER
    )
    tool_call_parser: str | None = argument(
        None,
        f"Format of the model's tool calls: {', '.join(CALL_FORMATS)}",
        _SERVER,
        choices=tuple(CALL_FORMATS),
        translated=CALL_ALIASES,
    )
    reasoning_parser: str | None = argument(
        None,
        "Format of the model's reasoning, which chats return separately: "
        f"{', '.join(REASONING_FORMATS)}",
        _SERVER,
        choices=tuple(REASONING_FORMATS),
        translated=REASONING_ALIASES,
    )
    trace_requests: str | None = argument(
        None,
        "File for one JSON line per streamed request with the times of its stages up to the "
        "first token",
        _SERVER,
        is_local=True,
    )
    otlp_traces_endpoint: str | None = argument(
        None,
        "Address of an OpenTelemetry collector that gets a span per sequence: http://HOST:4318/v1/"
        "traces, or grpc://HOST:4317",
        _SERVER,
    )
    max_unread_events: int = argument(
        4096,
        "Maximum unread steps of a request's stream; beyond, the request is aborted",
        _SERVER,
        low=1,
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        texts = ("host", "served_model_name", "api_key", "profile_dir", "ssl_certfile")
        for name in (*texts, "ssl_keyfile", "trace_requests"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; expected text, or leave it out")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("ssl_keyfile is given without ssl_certfile; expected both")
        parsers = {self.tool_call_parser, self.reasoning_parser} - {None}
        if GPT_OSS in parsers and len(parsers) > 1:
            raise ConfigError(
                f"tool_call_parser is {self.tool_call_parser!r} with reasoning_parser "
                f"{self.reasoning_parser!r}; expected {GPT_OSS!r} for both, or one of them alone"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://", "grpc://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}; expected http://, https:// or grpc:// and "
                "a collector's address"
            )
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins holds {origin!r}; expected * or origins such as "
                    "https://example.com"
                )

    @property
    def origins(self) -> tuple[str, ...]:
        """allowed_origins, split at commas; a JSON list, as in vLLM, is accepted too."""
        words = (self.allowed_origins or "").strip("[] ").split(",")
        return tuple(word.strip(" \"'").rstrip("/") for word in words if word.strip(" \"'"))

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(calls=self.tool_call_parser, reasoning=self.reasoning_parser)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine: Mapping[str, Any]  # only explicitly set ones
    server: ServerArgs
    warnings: tuple[str, ...] = ()  # one line each

    @property
    def engine_args(self) -> EngineArgs:
        return EngineArgs.from_mapping(self.engine)
