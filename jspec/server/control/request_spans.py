"""OpenTelemetry spans of requests, one per sequence, with vLLM's attribute names, below the
request's `traceparent`. Nothing is imported without --otlp-traces-endpoint (extra `otlp`)."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.errors import ConfigError
from jspec.messages.request import FinishKind
from jspec.messages.response import Completion
from jspec.serving.request_trace import Border

NAME = "llm_request"  # vLLM's
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    protocol: f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter"
    for protocol, name in (("grpc", "grpc"), ("http/protobuf", "http"))
}
_HTTP_PATH = "/v1/traces"
NO_PARENT: Mapping[str, str] = MappingProxyType({})
_PARENT: ContextVar[Mapping[str, str]] = ContextVar("trace_parent", default=NO_PARENT)


class TraceParent:
    """Middleware that remembers a request's trace headers for the sequences that it submits."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = (b"traceparent", b"tracestate")
            found = ((name, value) for name, value in scope["headers"] if name in names)
            _PARENT.set({n.decode("latin-1"): v.decode("latin-1") for n, v in found})
        await self.app(scope, receive, send)


def parent_headers() -> Mapping[str, str]:
    return _PARENT.get()


class RequestSpans:
    """Records a span for each sequence that ended. provider: an SDK's TracerProvider."""

    def __init__(self, provider: Any, *, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import tracecontext

        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("jspec")
        self._kind, self._propagator = SpanKind.SERVER, tracecontext.TraceContextTextMapPropagator()
        self._failed: Callable[[str], Any] = partial(Status, StatusCode.ERROR)

    def record(
        self, completion: Completion, times: Mapping[str, float], parent: Mapping[str, str]
    ) -> None:
        """Record a span without waiting for the exporter. times: of the request's trace."""
        now = time.monotonic()
        began = times.get(Border.RECEIVED.value, completion.started)
        ended = now if completion.finish is None else completion.last_token or now
        to_epoch = time.time_ns() - int(now * 1e9)
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(parent),
            kind=self._kind,
            start_time=to_epoch + int(began * 1e9),
            attributes=self._attributes(completion, times, began=began, ended=ended),
        )
        finish = completion.finish
        if finish is None or finish.kind is FinishKind.ABORT:
            why = "the client left" if finish is None else finish.message or "aborted"
            span.set_status(self._failed(why))
        span.end(end_time=to_epoch + int(ended * 1e9))

    def _attributes(
        self, completion: Completion, times: Mapping[str, float], *, began: float, ended: float
    ) -> dict[str, Any]:
        finish, counters = completion.finish, completion.counters
        found: dict[str, Any] = {
            "gen_ai.request.id": completion.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": ["abort" if finish is None else finish.kind.value],
            "gen_ai.usage.prompt_tokens": completion.prompt_tokens,
            "gen_ai.usage.completion_tokens": len(completion.output_ids),
            "gen_ai.latency.e2e": ended - began,
            "jspec.cached_tokens": completion.cached_tokens,
            "jspec.num_verifications": counters.verify_ct,
        }
        submitted = times.get(Border.SUBMITTED.value)
        planned = times.get(Border.PLANNED.value)
        if submitted is not None and planned is not None:
            found["gen_ai.latency.time_in_queue"] = planned - submitted
        if completion.first_token:
            found["gen_ai.latency.time_to_first_token"] = completion.first_token - began
        if counters.full_verify_ct:
            found["jspec.acceptance_length"] = counters.acceptance_length
        return found

    def close(self) -> None:
        """Export the remaining spans; blocks for at most the exporter's timeout."""
        self._provider.shutdown()


def exporting_spans(endpoint: str, *, model_name: str) -> RequestSpans:
    """Return spans that a thread sends to `endpoint` in batches. Raises ConfigError."""
    resources, sdk, export = _sdk(endpoint)
    # The exporter for gRPC encrypts for any scheme except http, unless a variable overrides this.
    address = endpoint.replace("grpc://", "http://", 1)
    exporter = _exporter_module(endpoint).OTLPSpanExporter(endpoint=address)
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "jspec")}
    provider = sdk.TracerProvider(resource=resources.Resource.create(named))
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return RequestSpans(provider, model_name=model_name)


def check_exporter(endpoint: str | None) -> None:
    """Raise ConfigError if spans could not be exported there, before anything loads."""
    if endpoint is not None:
        _sdk(endpoint)
        _exporter_module(endpoint)


def _protocol(endpoint: str) -> str:
    protocol = os.environ.get(PROTOCOL_VARIABLE)
    if protocol is None:
        return "http/protobuf" if endpoint.rstrip("/").endswith(_HTTP_PATH) else "grpc"
    if protocol not in _EXPORTERS:
        raise ConfigError(
            f"{PROTOCOL_VARIABLE} is {protocol!r}; expected {' or '.join(map(repr, _EXPORTERS))}"
        )
    return protocol


def _sdk(endpoint: str) -> tuple[Any, Any, Any]:
    names = ("resources", "trace", "trace.export")
    resources, sdk, export = (_imported(f"opentelemetry.sdk.{name}", endpoint) for name in names)
    return resources, sdk, export


def _exporter_module(endpoint: str) -> Any:
    return _imported(_EXPORTERS[_protocol(endpoint)], endpoint)


def _imported(module: str, endpoint: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}, which needs {module}, and that cannot be "
            f"imported ({error}): pip install 'jspec[otlp]'"
        ) from error
