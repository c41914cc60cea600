"""Completions, models, health, information, metrics, the page, keys, and routes that are not
served."""

from __future__ import annotations

import dataclasses
import gc
import re
from typing import Any

import httpx
import pytest

from jspec.messages.request import SpecCounters
from jspec.scheduler.stats import SchedulerStats
from jspec.server.app import create_app
from jspec.server.control.metrics import RateMeter
from jspec.server.http.page import page
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service
from jspec.serving.engine import Engine

from .helpers import ask, events_of, wait_idle

PARAMS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
NATIVE = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


def native(client: httpx.Client, text: Any, **params: Any) -> Any:
    body = {"text": text, "sampling_params": {**NATIVE, **params}}
    return client.post("/generate", json=body).raise_for_status().json()


def test_a_completion_is_the_native_answer_in_openais_shape(client: httpx.Client) -> None:
    body = {"model": "target", "prompt": "def fib(", **PARAMS, "return_meta_info": True}
    body["return_spec_tokens_details"] = True
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    expected = native(client, "def fib(")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "target"
    (choice,) = answer["choices"]
    assert choice["text"] == expected["text"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert choice["meta_info"]["spec_verify_ct"] == expected["meta_info"]["spec_verify_ct"]
    assert answer["usage"]["total_tokens"] == 20
    details = answer["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] == expected["meta_info"]["spec_verify_ct"]


def test_choices_are_prompt_major(client: httpx.Client) -> None:
    params = {"n": 2, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    answer = client.post("/v1/completions", json={"prompt": ["a", "b"], **params}).json()
    expected = native(client, ["a", "b"], n=2, sampling_seed=3, max_new_tokens=8, temperature=1.0)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == [r["text"] for r in expected]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 32,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": None,
        "reasoning_tokens": 0,
    }


def test_a_completion_stream_is_deltas_and_a_usage(client: httpx.Client) -> None:
    body = {"prompt": ["a", "b"], **PARAMS, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    events = events_of(client.post("/v1/completions", json={**body, **options}).text)
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        assert event["usage"] is None
        assert event["id"] == events[0]["id"]
    assert [texts[0], texts[1]] == [r["text"] for r in native(client, ["a", "b"])]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 24
    events = events_of(client.post("/v1/completions", json=body).text)
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
    assert response.status_code == 404
    assert "model is 'gpt-9'; expected 'target' or 'default'" in response.json()["message"]


def test_a_slash_after_models_lists_them(client: httpx.Client) -> None:
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_models(client: httpx.Client, engine: Engine) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("target", "model", 16384)
    app = create_app(engine, ServerArgs(served_model_name="mine"))
    assert ask(app, "GET", "/v1/models").json()["data"][0]["id"] == "mine"
    assert ask(app, "POST", "/v1/completions", json={"prompt": "a", "model": "mine"}).is_success


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(client: httpx.Client, path: str) -> None:
    info = client.get(path).json()
    assert info["speculative_algorithm"] == "EAGLE3"
    assert info["speculative_num_steps"] == 3
    assert info["max_total_num_tokens"] == 40000
    assert info["port"] == 30000
    assert info["version"]
    (state,) = info["internal_states"]
    for resolved in (info, state):
        assert resolved["attention_backend"] in ("xla", "pallas")
    assert state["avg_spec_accept_length"] >= 1
    assert state["speculative_num_steps"] == 3
    assert "last_gen_throughput" in state


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(client: httpx.Client, path: str, engine: Engine) -> None:
    info = client.get(path).json()
    assert info["model_path"] == engine.args.model_path
    assert info["is_generation"] is True


def metrics(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    found = re.findall(r'^([a-z]+:\w+)\{model_name="target"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_metrics_are_the_schedulers_counts(client: httpx.Client, engine: Engine) -> None:
    wait_idle(engine)
    before = metrics(client)
    answer = native(client, "def fib(")
    after = metrics(client)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    meta = answer["meta_info"]
    assert gained["sglang:num_requests_total"] == 1
    assert gained["sglang:prompt_tokens_total"] == 8
    assert gained["sglang:generation_tokens_total"] == 12
    assert gained["sglang:spec_verify_calls_total"] == meta["spec_verify_ct"]
    assert gained["jspec:spec_accepted_drafts_total"] == meta["spec_num_correct_drafts"]
    assert gained["sglang:num_aborted_requests_total"] == 0
    assert gained["sglang:num_retracted_requests_total"] == 0
    assert after["sglang:spec_accept_length"] == engine.stats.counters.acceptance_length
    assert 0 < after["sglang:spec_accept_rate"] < 1
    assert (after["sglang:spec_num_steps"], after["sglang:spec_num_draft_tokens"]) == (3, 4)
    assert (after["sglang:num_running_reqs"], after["sglang:num_queue_reqs"]) == (0, 0)
    assert (after["sglang:token_usage"], after["sglang:num_used_tokens"]) == (0, 0)
    assert after["sglang:kv_available_tokens"] == after["sglang:max_total_num_tokens"] == 40000
    assert after["sglang:gen_throughput"] >= 0
    assert gained["sglang:time_to_first_token_seconds_count"] == 1
    assert gained["sglang:inter_token_latency_seconds_count"] == 11
    assert gained["sglang:e2e_request_latency_seconds_count"] == 1


def test_rates_are_of_the_window(engine: Engine) -> None:
    now = [0.0]
    params = {"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 1}
    meter = RateMeter(clock=lambda: now[0])
    meter.sample(engine.stats)
    num_tokens = len(engine.generate("x", params)["output_ids"])
    now[0] = 2.0
    assert meter.rates(engine.stats).gen_throughput == num_tokens / 2
    assert meter.rates(engine.stats).acceptance_length > 1
    for second in range(3, 20):  # idle: the window shrinks to nothing
        now[0] = float(second)
        meter.sample(engine.stats)
    assert meter.rates(engine.stats).gen_throughput == 0


def stats_of(engine: Engine, **totals: Any) -> SchedulerStats:
    """Return statistics of an engine with one running request and these totals."""
    zero = dataclasses.replace(
        engine.stats, num_running=1, num_emitted=0, num_finished=0, counters=SpecCounters()
    )
    return dataclasses.replace(zero, **totals)


def test_the_log_line_says_what_ran(engine: Engine) -> None:
    now = [0.0]
    service = Service(engine, ServerArgs())
    service.meter = RateMeter(clock=lambda: now[0])
    service.meter.sample(stats_of(engine, num_running=0))
    now[0] = 2.0
    line = service.decode_line(stats_of(engine))
    assert line.startswith("Prefill batch, #running-req: 1, #queue-req: 0, token usage: ")
    assert "throughput" not in line
    assert "accept" not in line
    plain = service.decode_line(stats_of(engine, num_emitted=30))
    assert plain.endswith(", gen throughput (token/s): 15.0")
    assert "accept" not in plain
    counters = SpecCounters(
        verify_ct=10, num_accepted=20, num_proposed=30, full_verify_ct=10, full_num_emitted=30
    )
    line = service.decode_line(stats_of(engine, num_emitted=31, counters=counters))
    assert line.startswith("Decode batch, #running-req: 1, ")
    assert line.endswith("accept len: 3.00, accept rate: 0.67, gen throughput (token/s): 15.5")


def test_retry_after_follows_the_queue(engine: Engine) -> None:
    now = [0.0]
    meter = RateMeter(clock=lambda: now[0])
    assert meter.seconds_until_left(stats_of(engine), 5) == 1.0  # no rate is known yet
    meter.sample(stats_of(engine))
    now[0] = 4.0
    assert meter.seconds_until_left(stats_of(engine, num_finished=8), 1) == 1.0  # at least
    assert meter.seconds_until_left(stats_of(engine, num_finished=8), 5) == 2.5
    assert meter.seconds_until_left(stats_of(engine, num_finished=6), 6) == 4.0
    assert meter.seconds_until_left(stats_of(engine), 2) == 8.0  # none left in 4 s
    assert meter.seconds_until_left(stats_of(engine), 100) == 60.0  # at most
    ended = stats_of(engine, num_finished=8)
    assert meter.seconds_until_left(ended, 20, less=3.0) == 7.0  # half a second each
    assert meter.seconds_until_left(ended, 20, less=30.0) == 1.0
    assert meter.seconds_until_left(ended, 300, less=100.0) == 50.0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache_empties_what_is_cached(client: httpx.Client, method: str) -> None:
    ids = [20 + i % 7 for i in range(40)]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    client.post("/generate", json=body)
    again = client.post("/generate", json=body).json()
    assert again["meta_info"]["cached_tokens"] > 0
    response = client.request(method, "/flush_cache")
    assert (response.status_code, response.text) == (200, "Cache flushed.\n")
    again = client.post("/generate", json=body).json()
    assert again["meta_info"]["cached_tokens"] == 0


def test_freeze_gc_leaves_nothing_to_look_through(client: httpx.Client) -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    try:
        response = client.post("/freeze_gc")
        assert (response.status_code, response.text) == (200, "Garbage collection frozen.\n")
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > 700
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.text == page()
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    loaded = page().replace('<a href="docs">', "")  # a link of its own, which loads nothing
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", loaded)


def test_what_is_not_served(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={})
    assert response.status_code == 404
    assert "POST /v1/embeddings is not served" in response.json()["error"]["message"]
    assert "GET /docs lists" in response.json()["message"]
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/generate", "/generate"),
        ("/nothing/here", ""),
    ):
        message = client.post(path, json={}).json()["message"]
        assert f"POST {path} is not served; " in message
        assert ("did you mean" in message) == bool(meant)
        assert not meant or f"did you mean {meant}?" in message
    response = client.get("/generate")
    assert response.status_code == 405
    assert response.json()["code"] == 405
    assert "POST" in response.headers["allow"]


def test_a_key_is_asked_for(engine: Engine) -> None:
    app = create_app(engine, ServerArgs(api_key="s3cret"))
    for path in ("/", "/health", "/health_generate", "/ping", "/metrics"):
        assert ask(app, "GET", path).status_code == 200
    assert ask(app, "OPTIONS", "/generate").status_code == 405
    for value in ("", "Bearer no", "s3cret", "Bearer  s3cret", "Basic s3cret", "Bearer é"):
        response = ask(app, "GET", "/v1/models", headers={"Authorization": value.encode()})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == 401
    for header in ({}, {"X-API-Key": "no"}, {"X-API-Key": ""}):
        for path in ("/v1/models", "/healthy", "/metrics/x", "/nothing"):
            assert ask(app, "GET", path, headers=header).status_code == 401
    for name, value in (("Authorization", "bearer s3cret"), ("X-API-Key", "s3cret")):
        assert ask(app, "GET", "/v1/models", headers={name: value}).status_code == 200
    key = {"Authorization": "Bearer s3cret"}
    info = ask(app, "GET", "/server_info", headers=key)
    assert info.status_code == 200
    assert "s3cret" not in info.text
