"""--otlp-traces-endpoint: a span per sequence, under the caller's own trace."""

from __future__ import annotations

import http.server
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from jspec.errors import ConfigError
from jspec.messages.response import Completion
from jspec.server.app import create_app
from jspec.server.control import request_spans
from jspec.server.control.request_spans import RequestSpans, check_exporter, exporting_spans
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import ask, events_of, wait_idle

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "a=b"}
ENDPOINT = "http://127.0.0.1:1/v1/traces"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep in memory what an SDK's provider receives."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    kept = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    monkeypatch.setattr(
        "jspec.server.service.exporting_spans",
        lambda _, *, model_name: RequestSpans(provider, model_name=model_name),
    )
    return kept


@pytest.fixture
def app(engine: Engine, spans: Any) -> Iterator[Starlette]:
    del spans
    yield create_app(engine, ServerArgs(otlp_traces_endpoint=ENDPOINT))
    wait_idle(engine)


def finished(spans: Any, count: int) -> Any:
    """Wait for the spans: a stream's last event is sent before its span is recorded."""
    deadline = time.monotonic() + 10
    while len(spans.get_finished_spans()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    found = spans.get_finished_spans()
    assert len(found) == count
    return found


def test_each_sequence_is_a_span_of_the_callers_trace(app: Starlette, spans: Any) -> None:
    sampling = {"max_new_tokens": 9, "ignore_eos": True, "n": 2}
    body = {"text": "ab", "rid": "r", "sampling_params": sampling}
    answers = ask(app, "POST", "/generate", json=body, headers=PARENT).json()
    first, second = finished(spans, 2)
    assert {each.context.trace_id for each in (first, second)} == {int(TRACE, 16)}
    assert first.parent.span_id == int(CALLER, 16)
    assert first.context.trace_state.to_header() == "a=b"
    assert (first.name, first.kind.name, first.status.is_ok) == ("llm_request", "SERVER", True)
    found, meta = dict(first.attributes), answers[0]["meta_info"]
    seconds = {name: found.pop(f"gen_ai.latency.{name}") for name in ("e2e", "time_in_queue")}
    first_token = found.pop("gen_ai.latency.time_to_first_token")
    assert 0 <= seconds["time_in_queue"] < first_token <= seconds["e2e"]
    assert first.end_time - first.start_time == pytest.approx(seconds["e2e"] * 1e9, abs=1e4)
    assert found == {
        "gen_ai.request.id": "r",
        "gen_ai.response.model": "target",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": meta["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 9,
        "jspec.cached_tokens": meta["cached_tokens"],
        "jspec.num_verifications": meta["spec_verify_ct"],
        "jspec.acceptance_length": meta["acceptance_length"],
    }
    assert second.attributes["gen_ai.request.id"] == "r-1"


def test_streams_and_chats_are_spans_too_and_a_refusal_is_none(app: Starlette, spans: Any) -> None:
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    events = ask(app, "POST", "/v1/chat/completions", json={**said, "stream": True}).text
    assert events_of(events)
    assert ask(app, "POST", "/v1/responses", json={"input": "a", "max_output_tokens": 3}).is_success
    assert ask(app, "POST", "/generate", json={"text": ""}, headers=PARENT).status_code == 400
    traced = finished(spans, 2)
    assert all(each.parent is None for each in traced)
    assert len({each.context.trace_id for each in traced}) == 2


def test_a_trace_that_is_not_sampled_stays_so(app: Starlette, spans: Any) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 2}}
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
    assert ask(app, "POST", "/generate", json=body, headers=headers).is_success
    assert ask(app, "POST", "/generate", json=body, headers={"traceparent": "x"}).is_success
    (other,) = finished(spans, 1)
    assert other.parent is None


def test_what_no_client_waited_for_is_an_error(app: Starlette, spans: Any) -> None:
    app.state.service._spans.record(Completion("left"), {}, {})
    (span,) = spans.get_finished_spans()
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "the client left")
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_in_queue" not in span.attributes


class Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        type(self).bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_spans_reach_a_collector_when_the_server_ends(engine: Engine) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    Collector.bodies = []
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        app = create_app(engine, ServerArgs(otlp_traces_endpoint=endpoint))
        ask(app, "POST", "/generate", json={"text": "ab", "rid": "seen"}, headers=PARENT)
        app.state.service._spans.close()
        collector.shutdown()
        thread.join()
    (body,) = Collector.bodies
    assert b"seen" in body
    assert bytes.fromhex(TRACE) in body


@pytest.mark.parametrize(
    ("endpoint", "given"),
    [
        ("grpc://h:4317", "http://h:4317"),
        ("https://h:4317", "https://h:4317"),
        ("http://h/v1/traces", "http://h/v1/traces"),
    ],
)
def test_grpc_is_not_encrypted_unless_it_is_said(
    endpoint: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's gRPC exporter encrypts for every scheme but http."""
    pytest.importorskip("opentelemetry.sdk.trace")
    seen: list[str] = []

    class Exporter:
        def __init__(self, *, endpoint: str) -> None:
            seen.append(endpoint)

        def shutdown(self) -> None: ...

    module = SimpleNamespace(OTLPSpanExporter=Exporter)
    monkeypatch.setattr(request_spans, "_exporter_module", lambda _: module)
    exporting_spans(endpoint, model_name="m").close()
    assert seen == [given]


def missing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.mark.parametrize("use", [check_exporter, lambda url: exporting_spans(url, model_name="m")])
def test_without_the_packages_it_names_the_extra(
    use: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_spans.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs opentelemetry\.sdk.*pip install 'jspec\[otlp\]'"):
        use(ENDPOINT)
    check_exporter(None)


def test_the_protocol_is_the_variables_or_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(request_spans.importlib, "import_module", seen.append)
    for endpoint in ("http://h:4318/v1/traces", "grpc://h:4317", "http://h:4317"):
        check_exporter(endpoint)
    protocols = [name.split(".")[4] for name in seen if "exporter" in name]
    assert protocols == ["http", "grpc", "grpc"]
    monkeypatch.setenv(request_spans.PROTOCOL_VARIABLE, "http/json")
    with pytest.raises(ConfigError, match="is 'http/json'; expected 'grpc' or 'http/protobuf'"):
        check_exporter("http://h:4317")
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'h:4317'; expected http://"):
        ServerArgs(otlp_traces_endpoint="h:4317")
