"""Lists of any length, streams of lists, scores and tokens: `jspec.Engine` in Python and its
routes."""

from __future__ import annotations

import asyncio
import html
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import jspec
from jspec.messages.request import Request
from jspec.serving.engine import Engine
from jspec.text.tokenizer.tokenizer import Tokenizer

from .helpers import ask, wait_idle

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_what_a_program_needs_stands_at_the_top() -> None:
    for name in jspec.__all__:
        assert getattr(jspec, name) is not None
    assert issubclass(jspec.QueueTimeoutError, jspec.QueueFullError)
    assert issubclass(jspec.RequestError, jspec.JspecError)
    assert jspec.SamplingParams(n=2).n == 2
    with pytest.raises(jspec.ConfigError, match="model is 'a' and model_path 'b'"):
        jspec.Engine("a", model_path="b")
    with pytest.raises(jspec.JspecError, match="no/such/model"):
        jspec.Engine(model="no/such/model")


def test_a_list_is_streamed_with_indices(engine: Engine) -> None:
    prompts = ["def fib(", "class A", "import "]
    whole = engine.generate(prompts, GREEDY)
    last: dict[int, Any] = {}
    for event in engine.generate(prompts, GREEDY, stream=True):
        before = last.get(event["index"], {"output_ids": []})["output_ids"]
        assert event["output_ids"][: len(before)] == before
        last[event["index"]] = event
    assert [last[i]["output_ids"] for i in range(3)] == [r["output_ids"] for r in whole]
    stream = engine.generate(prompts, {**GREEDY, "max_new_tokens": 5000}, stream=True)
    next(stream)
    stream.close()
    wait_idle(engine)


def test_errors_may_stand_in_their_place_and_else_refuse_the_list(engine: Engine) -> None:
    before = engine.stats.num_requests
    prompts: list[Any] = ["a", "b" * 20000, "c"]
    with pytest.raises(jspec.RequestError, match=r"tokens.*prompt 1 of 3, counted from 0"):
        engine.generate(prompts, GREEDY)
    assert engine.stats.num_requests == before
    results = engine.generate(prompts, {**GREEDY, "n": 2}, return_exceptions=True)
    kinds = [dict] * 2 + [jspec.RequestError] * 2 + [dict] * 2
    assert all(isinstance(r, kind) for r, kind in zip(results, kinds, strict=True))
    (alone,) = engine.generate(["c"], GREEDY)
    assert results[4]["output_ids"] == alone["output_ids"]
    one = engine.generate("b" * 20000, GREEDY, return_exceptions=True)
    assert isinstance(one, jspec.RequestError)


def test_each_prompt_has_as_many_places_as_its_n(engine: Engine) -> None:
    """So has a refused one, so that a result's index shows its prompt."""
    params: list[Any] = [{**GREEDY, "n": n} for n in (2, 3, 1)]
    params += [{"n": 0}, {"n": 10**6}, {"n": "x"}]  # none is a number of choices
    prompts: list[Any] = ["a", "b" * 20000, "c", "d", "e", "f"]
    results = engine.generate(prompts, params, return_exceptions=True)
    kinds = [*[dict] * 2, *[jspec.RequestError] * 3, dict, *[jspec.RequestError] * 3]
    assert all(isinstance(r, kind) for r, kind in zip(results, kinds, strict=True))
    for place, prompt in ((2, 1), (3, 1), (4, 1), (6, 3), (7, 4), (8, 5)):
        assert f"prompt {prompt} of 6" in str(results[place])
    pair = engine.generate("b" * 20000, {**GREEDY, "n": 2}, return_exceptions=True)
    assert all(isinstance(r, jspec.RequestError) for r in pair)


@pytest.mark.parametrize("name", ["return_exceptions", "progress"])
def test_a_stream_refuses_what_is_for_whole_results(engine: Engine, name: str) -> None:
    with pytest.raises(jspec.RequestError, match=f"{name} is True, and so is stream; expected"):
        engine.generate(["a"], GREEDY, stream=True, **{name: True})

    async def ask_for_both() -> None:
        await engine.async_generate("a", GREEDY, stream=True, **{name: True})

    with pytest.raises(jspec.RequestError, match=f"{name} is True, and so is stream; expected"):
        asyncio.run(ask_for_both())


def test_a_long_list_is_never_there_as_a_whole(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has room for 32: of 150 requests about that many are made before others end."""
    most, num_made, make = 0, 0, engine._intake.requests
    before = engine.stats.num_finished

    def counting(*args: Any, **options: Any) -> tuple[Request, ...]:
        nonlocal most, num_made
        num_made += 1
        most = max(most, num_made - (engine.stats.num_finished - before))
        return make(*args, **options)

    monkeypatch.setattr(engine._intake, "requests", counting)
    params = {"max_new_tokens": 1, "temperature": 0}
    results = engine.generate([f"x{i}" for i in range(150)], params, progress=True)
    assert [r["meta_info"]["completion_tokens"] for r in results] == [1] * 150
    assert num_made == 150
    assert most <= 40
    assert "150/150 prompts" in capsys.readouterr().err
    wait_idle(engine)


def test_a_text_is_tokenized_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also in a list, which is checked as a whole before the first request is made."""
    tokenized, tokenize = [], Tokenizer.encode

    def counting(tokenizer: Tokenizer, text: str, **options: Any) -> tuple[int, ...]:
        tokenized.append(text)
        return tokenize(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    params = {"max_new_tokens": 1, "temperature": 0}
    for prompts in ("a", ["a"], ["a", "b"]):
        for stream in (False, True):
            tokenized.clear()
            list(engine.generate(prompts, {**params, "n": 2}, stream=stream))
            assert tokenized == [*prompts]
    with pytest.raises(jspec.RequestError, match=r"tokens.*context"):
        engine.generate(["b" * 20000], params)
    num_requests = engine.stats.num_requests
    long = {**params, "max_new_tokens": 10**6}
    with pytest.raises(jspec.RequestError, match=r"max_new_tokens is 1000000 .*\(prompt 1 of 2, c"):
        engine.generate(["a", "b"], [params, long])
    assert engine.stats.num_requests == num_requests
    wait_idle(engine)


def test_what_is_no_text_is_named(engine: Engine) -> None:
    whole = "expected text or a list of texts"
    for wrong, message in (
        *((None, f"text is None; {whole}"), (5, f"text is 5; {whole}")),
        *(
            (b"a", "text 0, counted from 0, is 97; expected text"),
            (["a", 5], "text 1, counted from 0, is 5; expected t"),
        ),
    ):
        with pytest.raises(jspec.RequestError, match=message):
            engine.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(jspec.RequestError, match="prompt is bytes; expected text"):
        engine.generate(b"abc")  # type: ignore[arg-type]
    assert engine.encode([]) == []


@pytest.mark.parametrize("streams", [False, True])
def test_lists_of_several_callers_wait_for_room(engine: Engine, *, streams: bool) -> None:
    """The queue has room for 32; a single prompt may be refused meanwhile, a list is not."""
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    prompts = [f"x{i}" for i in range(40)]

    def ask_all(_: int) -> list[int]:
        if not streams:
            return [r["meta_info"]["completion_tokens"] for r in engine.generate(prompts, params)]
        events = engine.generate(prompts, params, stream=True)
        last = {event["index"]: event["meta_info"]["completion_tokens"] for event in events}
        return [last[i] for i in range(len(prompts))]

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(ask_all, range(4))) == [[2] * len(prompts)] * 4
    wait_idle(engine)


@pytest.mark.parametrize("streams", [False, True])
def test_a_list_of_one_is_a_list(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, streams: bool
) -> None:
    submit, num_full = engine._loop.submit, 3

    def full_at_first(*arguments: Any, **options: Any) -> Any:
        nonlocal num_full
        num_full -= 1
        if num_full >= 0:
            raise jspec.QueueFullError("full")
        return submit(*arguments, **options)

    monkeypatch.setattr(engine._loop, "submit", full_at_first)
    (*_, last) = engine.generate(["x"], GREEDY, stream=streams)
    assert last["meta_info"]["completion_tokens"] == 8
    num_full = 1
    with pytest.raises(jspec.QueueFullError):
        list(engine.generate("x", GREEDY, stream=streams))


def test_scores_are_the_next_tokens_probabilities(client: httpx.Client, engine: Engine) -> None:
    labels = list(range(5, 45))  # more than one request has room for
    items = ["x", "yy"]
    scores = engine.score("def f(", items, labels)
    for item, row in zip(items, scores, strict=True):
        for half in (labels[:20], labels[20:]):
            meta = engine.generate(
                "def f(" + item, {"max_new_tokens": 1}, return_logprob=True, token_ids_logprob=half
            )["meta_info"]
            for value, token_id, _ in meta["output_token_ids_logprobs"][0]:
                assert math.isclose(row[labels.index(token_id)], math.exp(value), rel_tol=1e-5)
    by_labels = engine.score("def f(", items, labels, apply_softmax=True)
    for row, plain in zip(by_labels, scores, strict=True):
        assert math.isclose(sum(row), 1)
        assert math.isclose(row[3] / row[7], plain[3] / plain[7], rel_tol=1e-5)
    head, tail = engine.encode("def f("), engine.encode(items)
    assert engine.decode(head) == "def f("
    np.testing.assert_allclose(engine.score(head, tail, labels), scores, rtol=1e-5)
    first = engine.score("x", "def f(", labels, item_first=True)[0]
    np.testing.assert_allclose(first, scores[0], rtol=1e-5)
    body = {"query": "def f(", "items": items, "label_token_ids": labels, "model": "default"}
    answer = client.post("/v1/score", json=body).json()
    np.testing.assert_allclose(answer["scores"], scores, rtol=1e-5)
    assert (answer["object"], answer["model"]) == ("scoring", "default")
    assert answer["usage"]["prompt_tokens"] == len(head) * 2 + 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items is []; expected texts"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items holds [1]; expected texts"),
        (
            {"query": [1], "items": ["a"], "label_token_ids": [1]},
            "items holds 'a'; expected tok",
        ),
        ({"query": "a", "items": ["a"]}, "label_token_ids is null; expected token ids"),
        ({"query": "a", "items": ["a"], "label_token_ids": []}, "label_token_ids has 0 ids"),
        ({"query": "a", "items": "b", "label_token_ids": [99999]}, "label_token_ids holds 99999"),
        ({"query": None, "items": "b", "label_token_ids": [1]}, "query is null"),
        ({"query": "a", "itms": "b", "label_token_ids": [1]}, "items is null; expected texts"),
    ],
)
def test_a_bad_score_call_is_a_400(
    client: httpx.Client, body: dict[str, Any], message: str
) -> None:
    answer = client.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["message"]


def test_lm_evals_scoring_pattern(client: httpx.Client, engine: Engine) -> None:
    """Prompts as ids, echo, logprobs, one token: context and continuation are told apart."""
    rows = [engine.encode("def fib(n"), engine.encode("import os")]
    body = {
        "model": "target",
        "prompt": rows,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = client.post("/v1/completions", json=body).json()
    for row, choice in zip(rows, sorted(answer["choices"], key=lambda c: c["index"]), strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(row) + 1
        scored = engine.generate(
            input_ids=row,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )["meta_info"]
        of_prompt = [entry[0] for entry in scored["input_token_logprobs"]][3:]
        assert told["token_logprobs"][3:-1] == pytest.approx(of_prompt, abs=1e-4)
        tops = [max(top.values()) for top in told["top_logprobs"][3:-1]]
        assert tops == pytest.approx([t[0][0] for t in scored["input_top_logprobs"][3:]], abs=1e-4)


def test_a_drawn_seed_is_told_and_gives_the_same_text(client: httpx.Client) -> None:
    params = {"temperature": 1, "max_new_tokens": 12, "ignore_eos": True}
    body = {"text": "def ", "sampling_params": {**params, "n": 2}}
    for result in client.post("/generate", json=body).json():
        seed = result["meta_info"]["sampling_seed"]
        again = {"text": "def ", "sampling_params": {**params, "sampling_seed": seed}}
        assert client.post("/generate", json=again).json()["text"] == result["text"]
    asked = {"prompt": "def ", "max_tokens": 12, "temperature": 1, "ignore_eos": True}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert choice["seed"] < 2**53
    (same,) = client.post("/v1/completions", json={**asked, "seed": choice["seed"]}).json()[
        "choices"
    ]
    assert same["text"] == choice["text"]


def test_the_openapi_document_has_every_route_and_field(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert {"/generate", "/v1/models/{name}", "/v1/score", "/flush_cache"} <= set(paths)
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation["summary"], path
            assert ("requestBody" in operation) == (method in ("post", "put")), path
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    fields = body["schema"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100}
    assert fields["seed"]["anyOf"][0]["minimum"] == -(2**63)
    assert "messages" in body["schema"]["required"]
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<h2><code>POST /v1/score</code></h2>" in page.text
    assert "<p>SGLang's native endpoint.</p>" in html.unescape(page.text)
    assert ">0 fields" not in page.text
    assert 'href="docs"' in client.get("/").text


def test_the_docs_name_every_route(client: httpx.Client) -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text.partition("## Endpoints")[2].partition("###")[0]
    for path in client.get("/openapi.json").json()["paths"]:
        name = path.replace("get_server_", "server_").replace("get_model_", "model_")
        name = name.replace("{name}", "{id}").replace("/v1/tok", "/tok").replace("/v1/det", "/det")
        assert f"`{name}`" in table or f" {name}`" in table, path


def test_the_document_says_nothing_that_is_refused(engine: Engine) -> None:
    """Neutral values, null and defaults of each field, as the document has them, are accepted."""
    from jspec.server.app import create_app

    app = create_app(engine)
    document = ask(app, "GET", "/openapi.json").json()
    for path, needed in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for name, field in schema["schema"]["properties"].items():
            values = field.get("enum", [field["default"]] if "default" in field else [])
            if name in needed:
                continue
            body = {**needed, **({name: values[-1]} if values else {name: None})}
            answer = ask(app, "POST", path, json=body)
            assert answer.status_code == 200, (name, answer.text)
