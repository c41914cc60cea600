"""POST /generate and related routes on a live server: answers, streams, refusals, aborts."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from jspec.errors import RequestError, shown_json
from jspec.messages.request import SamplingParams
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service
from jspec.serving.engine import Engine
from jspec.text.intake import Prompt

from .helpers import ENDLESS, ask, events_of, wait_idle, wait_running, wait_taken

PROMPTS = ["Hello, my name is", "The president of", "The capital of France is", "The future"]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_one_answer_has_sglangs_shape(client: httpx.Client) -> None:
    body = generate(client, text="def fib(", sampling_params=GREEDY)
    meta = body["meta_info"]
    assert set(body) == {"text", "output_ids", "meta_info"}
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (8, 24)
    assert len(body["output_ids"]) == 24
    assert meta["e2e_latency"] > 0
    # Every name under which some version of SGLang reports speculation.
    assert meta["spec_accept_length"] == 24 / meta["spec_verify_ct"]
    assert meta["spec_num_correct_drafts"] == meta["spec_accept_token_num"]
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    assert meta["spec_correct_drafts_histogram"] == meta["spec_accept_histogram"]


def test_a_batch_is_a_list_in_order(client: httpx.Client) -> None:  # C2
    alone = [generate(client, text=text, sampling_params=GREEDY) for text in PROMPTS]
    batch = generate(client, text=PROMPTS, sampling_params=GREEDY)
    assert [r["output_ids"] for r in batch] == [r["output_ids"] for r in alone]
    tokens = sum(r["meta_info"]["completion_tokens"] for r in batch)
    assert tokens / sum(r["meta_info"]["spec_verify_ct"] for r in batch) > 1


def test_n_choices_are_a_list_and_differ(client: httpx.Client) -> None:
    params = {"n": 3, "sampling_seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    choices = generate(client, text="x", sampling_params=params, rid="many")
    assert [c["meta_info"]["id"] for c in choices] == ["many", "many-1", "many-2"]
    assert len({tuple(c["output_ids"]) for c in choices}) == 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_changes_nothing(client: httpx.Client, temperature: int) -> None:  # C5
    params = {"temperature": temperature, "max_new_tokens": 48, "sampling_seed": 11}
    speculative = generate(client, text=PROMPTS, sampling_params=params)
    plain = generate(client, text=PROMPTS, sampling_params={**params, "speculative": "off"})
    assert [r["output_ids"] for r in speculative] == [r["output_ids"] for r in plain]
    assert [r["text"] for r in speculative] == [r["text"] for r in plain]
    assert all("spec_verify_ct" not in r["meta_info"] for r in plain)


def test_a_stream_is_cumulative_and_ends_with_the_answer(client: httpx.Client) -> None:
    whole = generate(client, text="def fib(", sampling_params=GREEDY)
    response = client.post(
        "/generate", json={"text": "def fib(", "sampling_params": GREEDY, "stream": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert len(events) > 3
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["spec_verify_ct"] == whole["meta_info"]["spec_verify_ct"]


def test_an_incremental_stream_adds_up(client: httpx.Client, engine: Engine) -> None:
    whole = generate(client, text="def fib(", sampling_params=GREEDY)
    app = create_app(engine, ServerArgs(incremental_streaming_output=True))
    body = {"text": "def fib(", "sampling_params": GREEDY, "stream": True}
    body["return_spec_tokens"] = True
    events = events_of(ask(app, "POST", "/generate", json=body).text)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [i for event in events for i in event["output_ids"]] == whole["output_ids"]
    for event in events:
        assert "".join(p["text"] for p in event["spec_tokens"]) == event["text"]
    assert events[-1]["meta_info"]["completion_tokens"] == 24


def test_stream_interval_makes_fewer_events(engine: Engine) -> None:
    app = create_app(engine, ServerArgs(stream_interval=10))
    body = {"text": "def fib(", "sampling_params": GREEDY, "stream": True}
    events = events_of(ask(app, "POST", "/generate", json=body).text)
    # 24 tokens: an event at 10 or a few more, at 20 or a few more, and at the end.
    lens = [len(event["output_ids"]) for event in events]
    assert len(lens) in (2, 3)
    assert lens[-1] == 24
    assert all(b - a >= 10 for a, b in zip([0, *lens[:-2]], lens[:-1], strict=True))


def test_a_stream_of_several_has_indices(client: httpx.Client) -> None:
    whole = generate(client, text=PROMPTS, sampling_params=GREEDY)
    response = client.post(
        "/generate", json={"text": PROMPTS, "sampling_params": GREEDY, "stream": True}
    )
    last = {event["index"]: event for event in events_of(response.text)}
    assert sorted(last) == [0, 1, 2, 3]
    assert [last[i]["output_ids"] for i in range(4)] == [r["output_ids"] for r in whole]


def test_spec_tokens_add_up_and_count_the_accepted(client: httpx.Client) -> None:
    params = {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 4}
    body = {"text": "def fib(", "sampling_params": params, "return_spec_tokens": True}
    response = client.post("/generate", json={**body, "stream": True})
    events = events_of(response.text)
    for event in events:
        assert "".join(p["text"] for p in event["spec_tokens"]) == event["text"]
        assert (
            event["meta_info"]["completion_tokens"] == 1
            or "acceptance_length" in (event["meta_info"])
        )
    accepted = [p["accepted"] for p in events[-1]["spec_tokens"]]
    assert 0 < sum(accepted) <= events[-1]["meta_info"]["spec_num_correct_drafts"]
    assert not all(accepted)
    drafts = {p["step"]: p["proposed"] for p in events[-1]["spec_tokens"] if p["step"]}
    assert set(drafts.values()) == {3}
    assert generate(client, **body)["spec_tokens"] == events[-1]["spec_tokens"]


def test_stop_strings_and_stop_tokens(client: httpx.Client) -> None:
    free = generate(client, text="def fib(", sampling_params=GREEDY)
    stop_id = free["output_ids"][6]
    by_id = generate(
        client, text="def fib(", sampling_params={**GREEDY, "stop_token_ids": [stop_id]}
    )
    first = free["output_ids"].index(stop_id)
    assert by_id["output_ids"] == free["output_ids"][: first + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    char = next(c for c in reversed(free["text"]) if c != "\ufffd")
    by_text = generate(client, text="def fib(", sampling_params={**GREEDY, "stop": char})
    assert by_text["text"] == free["text"].split(char)[0]
    assert by_text["meta_info"]["finish_reason"]["matched"] == char


def test_a_router_sends_a_model(client: httpx.Client) -> None:
    for model in (None, "target", "default"):
        generate(client, text="x", sampling_params={"max_new_tokens": 1}, model=model)
    answer = client.post("/generate", json={"text": "x", "model": "gpt-9"})
    assert answer.status_code == 404
    assert "model is 'gpt-9'" in answer.json()["message"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "the prompt is empty"),
    ({"input_ids": [10**30]}, "input_ids holds 1000000000"),
    ({"input_ids": [1] * 16384}, "this model's maximum context length is 16384 tokens"),
    ({"text": "y" * 20000}, "this model's maximum context length is 16384 tokens"),
    (
        {"text": "xy", "sampling_params": {"max_new_tokens": 16383}},
        "max_new_tokens is 16383 after a prompt of 2 tokens; expected at most 16382",
    ),
    ({"text": "x", "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids holds 999"),
    ({"text": ["x"] * 33}, "33 sequences at once; expected at most max_queued_requests 32"),
    ({"text": "x", "sampling_params": {"n": 33}}, "33 sequences at once"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid is 'a'; expected one that is not in use"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_refusal_is_a_400_that_names_the_field(
    client: httpx.Client, body: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        response = client.post("/generate", json={**body, "stream": stream})
        assert response.status_code == 400
        answer = response.json()
        assert message in answer["message"].replace("request_id", "rid")
        assert (answer["object"], answer["code"]) == ("error", 400)
        assert answer["error"]["message"] == answer["message"]


def test_who_waits_too_long_gets_a_503_with_retry_after(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_idle(engine)
    monkeypatch.setattr(engine._loop, "_queue_time_limit", 0.2)
    with ThreadPoolExecutor(max_workers=1) as pool:
        filling = pool.submit(generate, client, text=["x"] * 2, sampling_params=ENDLESS)
        wait_running(engine, 2)
        response = client.post("/generate", json={"text": "y"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "queue_time_limit" in response.json()["message"]
        streamed = client.post("/generate", json={"text": "y", "stream": True})
        (event,) = events_of(streamed.text)
        assert event["error"]["code"] == 503
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        assert len(filling.result(timeout=120)) == 2
    wait_idle(engine)
    # More sequences than slots: the last of them run long after the limit, as their call runs.
    params = {"max_new_tokens": 200, "ignore_eos": True}
    assert len(generate(client, text=["x"] * 8, sampling_params=params)) == 8
    wait_idle(engine)


@pytest.mark.parametrize("wrong", [1.5, True, "a", None, 10**6, -1])
def test_ids_are_checked_in_one_place_for_every_route(client: httpx.Client, wrong: Any) -> None:
    for path, body, name in (
        ("/generate", {"input_ids": [1, wrong]}, "input_ids"),
        ("/generate", {"input_ids": [[1], [1, wrong]]}, "input_ids"),
        ("/v1/completions", {"prompt": [1, wrong]}, "prompt"),
        ("/v1/completions", {"prompt": [1, wrong], "echo": True}, "prompt"),
        ("/detokenize", {"tokens": [1, wrong]}, "tokens"),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        message = answer.json()["message"]
        assert f"{name} holds {shown_json(wrong)}; expected ids from 0 to 319" in message


def test_a_priority_needs_an_engine_with_priorities(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    calls = (("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x"}))
    for path, body in (*calls, ("/v1/chat/completions", chat)):
        refused = client.post(path, json={**body, "priority": 3})
        assert refused.status_code == 400
        assert "enable_priority_scheduling" in refused.json()["message"]
        assert client.post(path, json={**body, "priority": 1.5}).status_code == 400
    assert client.post("/generate", json={"text": "x", "priority": 0}).status_code == 200


def test_a_full_queue_is_a_503_with_retry_after(client: httpx.Client, engine: Engine) -> None:
    wait_idle(engine)
    with ThreadPoolExecutor(max_workers=8) as pool:
        body = {"text": ["x"] * 32, "sampling_params": ENDLESS}
        filling = pool.submit(generate, client, **body)
        wait_running(engine, 2)
        before = engine.stats
        for path, key in (("/generate", "text"), ("/v1/completions", "prompt")):
            response = client.post(path, json={key: ["y"] * 3})
            assert response.status_code == 503
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.json()["error"]["code"] == 503
        assert engine.stats.num_requests == before.num_requests
        assert client.get("/health_generate").status_code == 200
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        assert len(filling.result(timeout=120)) == 32
    wait_idle(engine)


def test_abort_by_rid_ends_all_of_it_and_nothing_else(client: httpx.Client, engine: Engine) -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        other = pool.submit(
            generate,
            client,
            text="x",
            rid="r-10",
            sampling_params={"max_new_tokens": 300, "ignore_eos": True},
        )
        mine = pool.submit(
            generate, client, text=["x", "y"], rid="r-1", sampling_params={**ENDLESS, "n": 2}
        )
        wait_taken(engine, 5)
        again = client.post("/generate", json={"text": "x", "rid": "r-10"})
        assert again.status_code == 400
        assert "not in use" in again.json()["message"]
        assert client.post("/abort_request", json={"rid": "r"}).json() == {"num_aborted": 0}
        assert client.post("/abort_request", json={"rid": "r-1"}).json() == {"num_aborted": 4}
        reasons = [r["meta_info"]["finish_reason"]["type"] for r in mine.result(timeout=120)]
        assert reasons == ["abort"] * 4
        finish = other.result(timeout=120)["meta_info"]["finish_reason"]
        assert finish["type"] == "length"
    wait_idle(engine)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_rid_is_free_once_its_stream_ended(client: httpx.Client, path: str) -> None:
    params = {"sampling_params": {"max_new_tokens": 2}} if path == "/generate" else {}
    body = {"text": "x", **params} if params else {"prompt": "x", "max_tokens": 2}
    for _ in range(8):
        with client.stream("POST", path, json={**body, "rid": "again", "stream": True}) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
            assert answer.status_code == 200


def test_closing_twice_leaves_a_later_call_of_that_rid(engine: Engine) -> None:
    service = Service(engine, ServerArgs())
    sampling = SamplingParams(max_new_tokens=16000, ignore_eos=True)
    prompt = Prompt(text="x", sampling=sampling, request_id="twice")

    async def run() -> int:
        first = await service.submit([prompt])
        await first.close()
        second = await service.submit([prompt])
        await first.close()
        try:
            with pytest.raises(RequestError, match="rid is 'twice'; expected one that is not"):
                await service.submit([prompt])
            return await service.abort("twice")
        finally:
            await second.close()

    assert asyncio.run(run()) == 1
    wait_idle(engine)


def send_and_leave(url: str, path: str, body: dict[str, Any], *, read: int) -> None:
    """Post, read `read` bytes of the answer, and drop the connection."""
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=120) as connection:
        connection.sendall(head.encode() + content)
        while read > 0:
            read -= len(connection.recv(read))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "sampling_params": ENDLESS}),
        ("/generate", {"text": ["x", "y", "z"], "sampling_params": ENDLESS}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 16000, "ignore_eos": True}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything(
    live_url: str, engine: Engine, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    wait_idle(engine)
    before = engine.stats
    num_sequences = len(body["text"]) if isinstance(body.get("text"), list) else 1
    leaving = threading.Thread(
        target=send_and_leave,
        args=(live_url, path, {**body, "stream": stream}),
        kwargs={"read": 2000 if stream else 0},
    )
    leaving.start()
    leaving.join(timeout=120)
    deadline = time.monotonic() + 20
    while engine.stats.num_aborted < before.num_aborted + num_sequences:
        assert engine.stats.num_finished == before.num_finished
        assert time.monotonic() < deadline
        time.sleep(0.01)
    wait_idle(engine)


def test_normal_and_impatient_clients_together(live_url: str, engine: Engine) -> None:  # C13
    params = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=live_url, timeout=120, trust_env=False) as client:
        expected = generate(client, text=PROMPTS[0], sampling_params=params)["output_ids"]

    def normal(_: int) -> bool:
        with httpx.Client(base_url=live_url, timeout=120, trust_env=False) as client:
            answers = [generate(client, text=PROMPTS[0], sampling_params=params) for _ in range(2)]
        return all(answer["output_ids"] == expected for answer in answers)

    def impatient(_: int) -> bool:
        for _ in range(2):
            body = {"text": PROMPTS[1], "sampling_params": ENDLESS}
            with (
                httpx.Client(base_url=live_url, timeout=0.2, trust_env=False) as client,
                pytest.raises(httpx.TimeoutException),
            ):
                client.post("/generate", json=body)
        return True

    with ThreadPoolExecutor(max_workers=6) as pool:
        results = [pool.submit(normal, i) for i in range(3)]
        results += [pool.submit(impatient, i) for i in range(3)]
        assert all(result.result(timeout=120) for result in results)
    wait_idle(engine)


def test_what_stops_a_text_may_stay_in_it(client: httpx.Client, engine: Engine) -> None:
    whole = generate(client, text="def fib(", sampling_params=GREEDY)
    text, ids = whole["text"], whole["output_ids"]
    stop = text[4:6]
    for trims in (True, False):
        params = {**GREEDY, "stop": stop, "no_stop_trim": not trims}
        cut = generate(client, text="def fib(", sampling_params=params, return_spec_tokens=True)
        end = text.index(stop) + (0 if trims else len(stop))
        assert cut["text"] == text[:end]
        assert "".join(piece["text"] for piece in cut["spec_tokens"]) == text[:end]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    last = ids.index(ids[5])
    params = {**GREEDY, "stop_token_ids": [ids[5]], "no_stop_trim": True}
    cut = generate(client, text="def fib(", sampling_params=params)
    assert cut["output_ids"] == ids[: last + 1]
    assert cut["text"] == engine.tokenizer.decode(ids[: last + 1])


def test_special_tokens_may_be_shown_but_not_the_one_that_ends(engine: Engine) -> None:
    params = {"max_new_tokens": 80, "sampling_seed": 1, "logit_bias": {"256": 3.0}}
    shown = engine.generate("x", {**params, "skip_special_tokens": False, "ignore_eos": True})
    assert 256 in shown["output_ids"]
    assert shown["text"].count("<|endoftext|>") == shown["output_ids"].count(256)
    ended = engine.generate("x", {**params, "skip_special_tokens": False, "no_stop_trim": True})
    assert ended["output_ids"][-1] == 256
    assert "<|endoftext|>" not in ended["text"]


def test_a_negative_seed_and_no_top_k_are_what_other_servers_take(engine: Engine) -> None:
    params = {"max_new_tokens": 24, "ignore_eos": True}
    texts = [
        engine.generate("x", {**params, "sampling_seed": seed})["output_ids"]
        for seed in (-1, 2**64 - 1, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)
