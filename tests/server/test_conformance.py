"""Black-box checks of SGLang's surface, by number (C1 to C24): the bundled pair in float32.

One engine for each shape, all checks against it: plain, chain, tree, and NGRAM. The same on a tiny
pair are in the fast tests of this folder. Elsewhere or not here: C19, sampling masks, is optional
and not served; C24 is tests/speculative/test_distribution. docs/conformance.md lists all.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import wait_idle, wait_taken

pytestmark = pytest.mark.slow

SHAPES: Mapping[str, dict[str, Any]] = {
    "plain": {"speculative_algorithm": "NONE"},
    "chain": {"speculative_algorithm": "EAGLE3"},
    "tree": {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 12,
    },
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
}
LEAST = {"chain": 1.6, "tree": 1.8, "ngram": 1.05}  # tokens a verification, C1
ONE = "Human: Give me a fully functional FastAPI server. Show the python code.\n\nAssistant:"
FOUR = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
PARITY = [
    "The capital of France is",
    "Once upon a time, there was a",
    "The three primary colors are",
    "def fibonacci(n):",
]
TOLERANCE = 1e-3
CAPITAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 100000000},
        "country": {"type": "string", "maxLength": 20},
        "capital": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "population", "country", "capital"],
    "additionalProperties": False,
    # The bundled model is small, and would write blanks to the end of its length.
    "x-guidance": {"whitespace_flexible": False},
}
ENDLESS = {"max_new_tokens": 1900, "ignore_eos": True}


def arguments(shape: str, cache: Path) -> dict[str, Any]:
    return {
        **SHAPES[shape],
        "dtype": "float32",
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
        "max_total_tokens": 2400,  # C20: less than the running requests need
        "max_queued_requests": 512,
        "compilation_cache_dir": str(cache),
    }


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve the engine on its own port; return the URL."""
    app = create_app(engine, ServerArgs(log_interval=0))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, loop="asyncio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=120)


class Served:
    """One draft shape served on a socket."""

    def __init__(self, engine: Engine, url: str, shape: str) -> None:
        self.engine, self.url, self.shape = engine, url, shape
        self.client = httpx.Client(base_url=url, timeout=300, trust_env=False)

    def generate(self, **body: Any) -> Any:
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def plain_texts(cache: Path) -> list[str]:
    with Engine(**{**arguments("plain", cache), "disable_logprobs": True}) as engine:
        results = engine.generate(PARITY, {"temperature": 0, "max_new_tokens": 48})
    return [result["text"] for result in results]


# Each shape compiles another engine: one in the second pass, all by hand.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(shape, marks=() if shape == "chain" else pytest.mark.exhaustive)
        for shape in SHAPES
    ],
)
def served(request: pytest.FixtureRequest, cache: Path) -> Iterator[Served]:
    with Engine(**arguments(request.param, cache)) as engine, serving(engine) as url:
        found = Served(engine, url, request.param)
        yield found
        found.client.close()


def length_of(results: list[Any]) -> float:
    tokens = sum(r["meta_info"]["completion_tokens"] for r in results)
    return float(tokens / sum(r["meta_info"]["spec_verify_ct"] for r in results))


def test_c1_c2_and_c21_acceptance(served: Served) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 128}
    five = served.generate(text=[ONE] * 5, sampling_params=greedy)
    four = served.generate(text=FOUR, sampling_params={**greedy, "max_new_tokens": 50})
    assert len({result["text"] for result in five}) == 1
    state = served.client.get("/server_info").json()["internal_states"][0]
    if served.shape == "plain":
        assert "spec_verify_ct" not in five[0]["meta_info"]
        assert state["avg_spec_accept_length"] == 0
        return
    assert length_of(five) > LEAST[served.shape]
    assert length_of(four) > 1
    assert state["avg_spec_accept_length"] > 1


def test_c3_the_end_is_not_in_the_text(served: Served) -> None:
    (eos, *_) = served.engine.eos_token_ids
    params = {"temperature": 0, "max_new_tokens": 64, "skip_special_tokens": False}
    biased = {**params, "logit_bias": {str(eos): 12.0}}
    for each in (params, biased):
        result = served.generate(text="def add(a, b):", sampling_params=each)
        assert eos not in served.engine.encode(result["text"])
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}


def test_c4_first_tokens_that_finish(served: Served) -> None:
    rng = random.Random(4)
    params = [{"max_new_tokens": rng.randint(1, 3)} for _ in range(8)]
    for result, given in zip(
        served.generate(text=(FOUR * 2), sampling_params=params), params, strict=True
    ):
        assert isinstance(result["text"], str)
        assert result["meta_info"]["completion_tokens"] <= given["max_new_tokens"]


@pytest.mark.exhaustive  # with every drafter: tests/speculative/test_engine_laws.py
def test_c5_parity_with_a_server_that_does_not_speculate(
    served: Served, plain_texts: list[str]
) -> None:
    params = {"temperature": 0, "max_new_tokens": 48}
    results = served.generate(text=PARITY, sampling_params=params)
    assert [result["text"] for result in results] == plain_texts
    off = served.generate(text=PARITY, sampling_params={**params, "speculative": "off"})
    assert [result["text"] for result in off] == plain_texts
    assert "spec_verify_ct" not in off[0]["meta_info"]


@pytest.mark.exhaustive  # fast on a tiny pair
def test_c6_logprob_start_len(served: Served) -> None:
    for result in served.generate(
        text=FOUR[:2],
        sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=5,
        logprob_start_len=4,
    ):
        meta = result["meta_info"]
        assert meta["prompt_tokens"] == 4 + len(meta["input_token_logprobs"])
        assert meta["completion_tokens"] == 4 == len(meta["output_token_logprobs"])


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_c7_and_c8_decode_equals_a_rescoring(served: Served, temperature: int) -> None:
    asked: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
        "token_ids_logprob": [1, 2, 10, 100, 1000],
    }
    params = {"temperature": temperature, "max_new_tokens": 128, "ignore_eos": True}
    meta = served.generate(
        text="I have a very good idea on how to", sampling_params=params, **asked
    )["meta_info"]
    ids = [entry[1] for entry in (*meta["input_token_logprobs"], *meta["output_token_logprobs"])]
    again = served.generate(input_ids=ids, sampling_params={"max_new_tokens": 0}, **asked)
    rescored = again["meta_info"]
    for name in ("token_logprobs", "token_ids_logprobs"):
        whole = (meta[f"input_{name}"] + meta[f"output_{name}"])[1:]
        other = rescored[f"input_{name}"][1:]
        assert [np.shape(x) for x in whole] == [np.shape(x) for x in other]
        np.testing.assert_allclose(values_of(whole), values_of(other), atol=TOLERANCE)
    for one, two in zip(
        meta["output_top_logprobs"], rescored["input_top_logprobs"][-128:], strict=True
    ):
        known = {entry[1]: entry[0] for entry in two}
        pairs = [(entry[0], known[entry[1]]) for entry in one if entry[1] in known]
        assert len(pairs) >= 4
        np.testing.assert_allclose([a for a, _ in pairs], [b for _, b in pairs], atol=TOLERANCE)


def values_of(entries: list[Any]) -> list[float]:
    if isinstance(entries[0][0], list):
        return [entry[0] for token in entries for entry in token]
    return [entry[0] for entry in entries]


@pytest.mark.exhaustive  # fast on a tiny pair
def test_c9_and_c10_sweep_of_lengths_ragged(served: Served) -> None:
    cases = [
        (n, out, start, top)
        for n in (200, 500, 1000)
        for out, start, top in ((4, 0, 5), (8, 100, 0), (4, 300, 5), (8, 800, 1))
    ]

    def ask(case: tuple[int, int, int, int]) -> None:
        n, out, start, top = case
        meta = served.generate(
            input_ids=list(range(n)),
            sampling_params={"temperature": 0, "max_new_tokens": out, "ignore_eos": True},
            return_logprob=top > 0,
            logprob_start_len=start,
            top_logprobs_num=top,
            token_ids_logprob=list(range(1, 2 + n % 4 + top % 3)),
        )["meta_info"]
        assert meta["completion_tokens"] == out
        if top:
            assert len(meta["input_token_logprobs"]) == max(n - start, 0)
            assert len(meta["output_token_logprobs"]) == out
            assert {len(x) for x in meta["output_top_logprobs"]} == {top}
            for chosen, tops in zip(
                meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
            ):
                assert chosen[0] == pytest.approx(tops[0][0], abs=1e-5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, cases))
    wait_idle(served.engine)


@pytest.mark.exhaustive  # exactly: tests/sampling/test_penalties.py
def test_c11_penalties(served: Served) -> None:
    combinations: list[dict[str, Any]] = [
        {"frequency_penalty": f, "presence_penalty": p, "min_new_tokens": m}
        for f, p, m in (
            *((x, 0, 0) for x in (-2, -0.5, 0.5, 2)),
            *((0, x, 0) for x in (-2, -0.5, 0.5, 2)),
            *((x, y, 48) for x, y in ((0, 0), (2, 0), (0, -2), (1, 1), (-1, 1), (2, 2))),
        )
    ]
    assert len(combinations) == 14
    params = [{"temperature": 0.7, "max_new_tokens": 48, **each} for each in combinations]
    results = served.generate(
        text=["class Stack:"] * 14, sampling_params=params, return_logprob=True
    )
    for result, given in zip(results, params, strict=True):
        meta = result["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        if given["min_new_tokens"]:
            assert meta["completion_tokens"] == 48
    often = served.generate(
        text=["x = [0, 0, 0, 0,"] * 2,
        sampling_params=[
            {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "frequency_penalty": f}
            for f in (0, 2)
        ],
    )
    most = [max(map(r["output_ids"].count, r["output_ids"])) for r in often]
    assert most[1] < most[0]


@pytest.mark.exhaustive  # with their text: tests/speculative/test_prefix_cache.py
def test_c12_shared_prefixes(served: Served) -> None:
    rng = random.Random(12)
    nodes: list[list[int]] = [[rng.randrange(4096) for _ in range(40)]]
    while len(nodes) < 120:
        parent = nodes[rng.randrange(len(nodes))]
        nodes.append([*parent[:200], *(rng.randrange(4096) for _ in range(rng.randint(1, 40)))])
    params = [
        {"temperature": 0, "max_new_tokens": rng.randint(1, 8), "ignore_eos": True} for _ in nodes
    ]
    results = served.generate(input_ids=nodes, sampling_params=params)
    for result, given in zip(results, params, strict=True):
        assert result["meta_info"]["completion_tokens"] == given["max_new_tokens"]
    again = served.generate(input_ids=nodes[:20], sampling_params=params[:20])
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in results[:20]]
    assert sum(r["meta_info"]["cached_tokens"] for r in again) > 0
    wait_idle(served.engine)
    assert served.client.get("/flush_cache").status_code == 200


@pytest.mark.exhaustive  # fast on a tiny pair
def test_c13_clients_that_go_away(served: Served) -> None:
    def impatient(_: int) -> None:
        with (
            httpx.Client(base_url=served.url, timeout=1, trust_env=False) as client,
            pytest.raises(httpx.TimeoutException),
        ):
            client.post("/generate", json={"text": [*FOUR, ONE], "sampling_params": ENDLESS})

    def normal(_: int) -> None:
        params = {"temperature": 0, "max_new_tokens": 64}
        results = served.generate(text=[*FOUR, ONE], sampling_params=params)
        assert all(r["meta_info"]["finish_reason"]["type"] != "abort" for r in results)

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(f, i) for i in range(4) for f in (normal, impatient)]
        for each in waiting:
            each.result(timeout=300)
    wait_idle(served.engine)


def test_c14_abort_all(served: Served) -> None:
    with ThreadPoolExecutor(32) as pool:
        body = {"text": FOUR[2], "sampling_params": ENDLESS}
        answers = [pool.submit(served.generate, **body) for _ in range(32)]
        wait_taken(served.engine, 32)
        served.client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        for answer in answers:
            reason = answer.result(timeout=120)["meta_info"]["finish_reason"]
            assert reason["type"] == "abort"
    wait_idle(served.engine)
    assert served.client.get("/health_generate").status_code == 200


@pytest.mark.exhaustive  # fast on a tiny pair: test_grammar.py
def test_c16_a_chat_in_json(served: Served) -> None:
    pytest.importorskip("llguidance")
    messages = [
        {"role": "system", "content": "You are a helpful AI assistant"},
        {"role": "user", "content": "Give me a json"},
    ]
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 512,
        "response_format": {"type": "json_object"},
    }
    answer = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert isinstance(json.loads(answer["message"]["content"]), dict)


@pytest.mark.exhaustive  # fast on a tiny pair: test_grammar.py
def test_c17_a_schema_with_and_without_log_probabilities(served: Served) -> None:
    pytest.importorskip("llguidance")
    texts = []
    for asks in (False, True):
        result = served.generate(
            text="Here is the information of the capital of France in the JSON format.\n",
            sampling_params={
                "temperature": 0,
                "max_new_tokens": 256,
                "json_schema": json.dumps(CAPITAL),
            },
            return_logprob=asks,
        )
        meta = result["meta_info"]
        texts.append(result["text"])
        assert result["text"].strip().endswith("}")
        assert set(json.loads(result["text"])) == set(CAPITAL["required"])
        if served.shape != "plain":
            assert meta["spec_verify_ct"] > 0
        if asks:
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert texts[0] == texts[1]


@pytest.mark.exhaustive  # of a tiny pair: test_compile_at_start.py
def test_c18_hidden_states(served: Served) -> None:
    params = {"temperature": 0, "max_new_tokens": 32}
    results = served.generate(text=FOUR[:2], sampling_params=params, return_hidden_states=True)
    plain = served.generate(text=FOUR[:2], sampling_params=params)
    for result, other in zip(results, plain, strict=True):
        meta = result["meta_info"]
        prompt, *rows = meta["hidden_states"]
        assert len(meta["hidden_states"]) == meta["completion_tokens"]
        assert len(prompt) == meta["prompt_tokens"]
        assert len({len(row) for row in (*prompt, *rows)}) == 1
        assert result["output_ids"] == other["output_ids"]
        assert "hidden_states" not in other["meta_info"]
    ids = served.engine.encode(FOUR[0]) + results[0]["output_ids"][:-1]
    again = served.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 0}, return_hidden_states=True
    )
    prompt, *rows = results[0]["meta_info"]["hidden_states"]
    np.testing.assert_allclose(
        [*prompt, *rows], again["meta_info"]["hidden_states"][0], atol=TOLERANCE
    )


@pytest.mark.exhaustive  # with every drafter: tests/speculative/test_engine_laws.py
def test_c20_retraction_leaks_nothing(served: Served) -> None:
    """4 rows of 850 tokens need more than the pool's 2,400."""
    params = {"temperature": 0, "max_new_tokens": 800, "ignore_eos": True}
    before = served.engine.stats.num_retractions
    results = served.generate(text=[*FOUR, *FOUR[:2]], sampling_params=params)
    assert [r["meta_info"]["completion_tokens"] for r in results] == [800] * 6
    assert served.engine.stats.num_retractions > before
    assert results[0]["output_ids"] == results[4]["output_ids"]
    wait_idle(served.engine)


def test_c22_one_stream(served: Served) -> None:
    speeds = []
    for _ in range(3):
        assert served.client.post("/flush_cache").status_code == 200
        result = served.generate(text=ONE, sampling_params={"temperature": 0, "max_new_tokens": 64})
        meta = result["meta_info"]
        assert meta["cached_tokens"] == 0
        speeds.append(meta["completion_tokens"] / meta["e2e_latency"])
    assert min(speeds) > 1


def test_the_official_client_on_every_route(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)
    (name,) = [model.id for model in client.models.list()]
    assert client.models.retrieve(name).id == name
    whole = client.completions.create(model=name, prompt=PARITY, max_tokens=8, temperature=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = client.completions.create(
        model=name, prompt=PARITY[0], max_tokens=8, temperature=0, stream=True
    )
    assert "".join(e.choices[0].text for e in streamed) == whole.choices[0].text
    messages: Any = [{"role": "user", "content": "def fib(n):"}]
    params: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": 8, "seed": 1}
    chat = client.chat.completions.create(**params)
    events = client.chat.completions.create(**params, stream=True)
    text = "".join(e.choices[0].delta.content or "" for e in events)
    assert text == chat.choices[0].message.content


@pytest.mark.exhaustive  # fast on a tiny pair
def test_c15_who_waits_too_long_is_refused(cache: Path) -> None:
    """With one slot and a limit of 1 ms, each request that cannot run at once gets a 503."""
    own = {**arguments("chain", cache), "max_running_requests": 1, "queue_time_limit": 0.001}
    with Engine(**{**own, "disable_logprobs": True}) as engine, serving(engine) as base:
        url = f"{base}/generate"
        body = {"text": FOUR[0], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(httpx.post, url, json=body, timeout=300)
            while not engine.stats.num_running:
                time.sleep(0.005)
            second = pool.submit(httpx.post, url, json=body, timeout=300)
            answers = [first.result().json(), second.result().json()]
    refused = [a for a in answers if a.get("object") == "error"]
    assert [a["code"] for a in refused] == [503]


@pytest.mark.exhaustive
def test_c23_drafts_are_as_deep_as_they_pay(cache: Path, tmp_path: Path) -> None:
    """The depth goes from 1 to 3 levels for a text that repeats itself, and from 3 to 1 for one
    that no draft can guess: only the target has a bias. By hand, since it depends on this machine's
    step costs.
    """
    levels = tmp_path / "levels.json"
    levels.write_text('{"candidate_steps": [1, 3]}')
    own = {
        **arguments("chain", cache),
        "max_running_requests": 1,
        "disable_logprobs": True,
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(levels),
    }
    endless: dict[str, Any] = {"max_new_tokens": 1600, "ignore_eos": True}
    ready = {"text": "x = [" + "0, " * 64, "sampling_params": {**endless, "temperature": 0}}
    bias = {str(token_id): 100 for token_id in range(700, 4000, 12)}
    poem = {"text": "a", "sampling_params": {**endless, "temperature": 8, "logit_bias": bias}}
    with (
        Engine(**own) as engine,
        serving(engine) as url,
        httpx.Client(base_url=url, timeout=300, trust_env=False) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def live() -> dict[str, Any]:
            info: dict[str, Any] = client.get("/server_info").json()
            return info

        while live()["num_programs"] < live()["num_programs_wanted"]:
            time.sleep(0.5)
        for body, expected in ((poem, 1), (ready, 3), (poem, 1)):
            answer, seen = pool.submit(client.post, "/generate", json=body), []
            while not answer.done():
                seen.append(live()["internal_states"][0]["speculative_num_steps"])
                time.sleep(0.1)
            assert answer.result().status_code == 200
            late = seen[len(seen) // 2 :]
            assert late.count(expected) > len(late) / 2, seen
