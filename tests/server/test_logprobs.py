"""Log-probabilities over HTTP, in SGLang's form and in OpenAI's: checks C6 to C11 of its servers.

The engine drafts (EAGLE-3, a chain); the values of its output equal those of the same tokens as a
prompt.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jspec.scheduler.pages import budget
from jspec.serving.engine import Engine
from tests.server.helpers import events_of, wait_idle

TOLERANCE = 1e-4
PROMPT = "I have a very good idea on how to"


def generate(client: httpx.Client, **body: Any) -> Any:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def values_of(entries: list[Any]) -> list[float]:
    return [value for value, _, _ in entries]


def test_c6_prompt_from_the_start_asked_for(client: httpx.Client) -> None:
    results = generate(
        client,
        text=["Hello, my name is", "The future of AI is"],
        sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=5,
        logprob_start_len=4,
    )
    for result in results:
        meta = result["meta_info"]
        assert meta["prompt_tokens"] == 4 + len(meta["input_token_logprobs"])
        assert meta["completion_tokens"] == 4 == len(meta["output_token_logprobs"])
        assert [len(top) for top in meta["output_top_logprobs"]] == [5] * 4
        assert [ids for _, ids, _ in meta["output_token_logprobs"]] == result["output_ids"]
        # Temperature 0 takes the most likely token.
        assert [top[0][:2] for top in meta["output_top_logprobs"]] == [
            entry[:2] for entry in meta["output_token_logprobs"]
        ]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "sampling_seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=["c7", "filtered and penalized"],
)
def test_c7_and_c8_output_equals_a_rescoring_of_it(
    client: httpx.Client, sampling: dict[str, Any]
) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [1, 2, 10, 100]}
    first = generate(
        client,
        text=PROMPT,
        sampling_params={**sampling, "max_new_tokens": 40, "ignore_eos": True},
        logprob_start_len=0,
        return_text_in_logprobs=True,
        **asked,
    )
    meta = first["meta_info"]
    prompt = [token_id for _, token_id, _ in meta["input_token_logprobs"]]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == PROMPT
    again = generate(
        client,
        input_ids=prompt + first["output_ids"],
        sampling_params={"max_new_tokens": 0},
        logprob_start_len=0,
        **asked,
    )
    assert (again["text"], again["output_ids"]) == ("", [])
    assert again["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    rescored = again["meta_info"]
    assert rescored["output_token_logprobs"] == []
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        whole = meta[f"input_{name}"] + meta[f"output_{name}"]
        other = rescored[f"input_{name}"]
        assert len(whole) == len(other) == len(prompt) + 40
        assert whole[0] is None or whole[0][0] is None
        for one, two in zip(whole[1:], other[1:], strict=True):
            one_flat, two_flat = ([one], [two]) if name == "token_logprobs" else (one, two)
            np.testing.assert_allclose(values_of(one_flat), values_of(two_flat), atol=TOLERANCE)
            if name != "top_logprobs":
                assert [x[1] for x in one_flat] == [x[1] for x in two_flat]


def test_c9_and_c10_lengths_are_exact_for_ragged_calls_at_once(
    client: httpx.Client, engine: Engine
) -> None:
    def ask(case: tuple[int, int, int, int]) -> None:
        length, start, out, top = case
        meta = generate(
            client,
            input_ids=[i % 250 for i in range(length)],
            sampling_params={"temperature": 0, "max_new_tokens": out, "ignore_eos": True},
            return_logprob=top > 0,
            logprob_start_len=start,
            top_logprobs_num=top,
            token_ids_logprob=list(range(1, 2 + top % 4)),
        )["meta_info"]
        if not top:
            assert "output_token_logprobs" not in meta
            return
        assert len(meta["input_token_logprobs"]) == max(length - start, 0)
        assert len(meta["output_token_logprobs"]) == out
        assert {len(x) for x in meta["output_top_logprobs"]} == {top}
        assert {len(x) for x in meta["output_token_ids_logprobs"]} == {1 + top % 4}

    cases = [(70, 0, 4, 5), (33, 10, 8, 0), (64, 63, 4, 1), (40, 90, 3, 2), (70, 31, 8, 3)]
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(ask, cases))
    wait_idle(engine)


def test_a_stream_says_the_same(client: httpx.Client) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 3,
    }
    whole = generate(client, **body)["meta_info"]
    events = events_of(client.post("/generate", json={**body, "stream": True}).text)
    last = events[-1]["meta_info"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        for one, two in zip(last[name], whole[name], strict=True):
            assert one[1] == two[1]
            assert one[0] == pytest.approx(two[0], abs=TOLERANCE)
    for event in events:
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])


def test_nothing_is_emitted_and_only_then_may_a_prompt_fill_the_context(
    client: httpx.Client, engine: Engine
) -> None:
    meta = generate(client, text="ab", sampling_params={"max_new_tokens": 0})["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 0)
    length = engine.limits.pool.context_length
    (whole,) = engine.requests(input_ids=[5] * length, sampling_params={"max_new_tokens": 0})
    assert budget.check_request(engine.limits, whole) == 0
    for too_long, most in ((length, 1), (length + 1, 0)):
        body = {"input_ids": [5] * too_long, "sampling_params": {"max_new_tokens": most}}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 400
        assert "context length" in answer.text


def test_a_regular_expression_ends_the_text(client: httpx.Client) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    text = generate(client, text=PROMPT, sampling_params=sampling)["text"]
    assert len(text) > 4
    pattern = "(?s)^.{3}"
    result = generate(client, text=PROMPT, sampling_params={**sampling, "stop_regex": pattern})
    assert result["text"] == text[:3]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
    answer = client.post("/generate", json={"text": "x", "sampling_params": {"stop_regex": "a("}})
    assert answer.status_code == 400
    assert "stop_regex holds 'a('" in answer.text


@pytest.fixture
def openai_client(live_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0)


def test_completions_by_the_openai_client(openai_client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "default", "prompt": PROMPT, "temperature": 0}
    (choice,) = openai_client.completions.create(
        **body, max_tokens=6, logprobs=2, echo=True, extra_body={"ignore_eos": True}
    ).choices
    known = choice.logprobs
    assert known is not None
    assert known.tokens is not None
    assert known.token_logprobs is not None
    assert known.top_logprobs is not None
    assert known.text_offset is not None
    assert choice.text.startswith(PROMPT)
    assert "".join(known.tokens[: len(PROMPT)]) == PROMPT
    assert known.token_logprobs[0] is None
    assert known.top_logprobs[0] is None
    assert len(known.tokens) == len(PROMPT) + 6 == len(known.text_offset)
    for token, value, top in zip(
        known.tokens[1:], known.token_logprobs[1:], known.top_logprobs[1:], strict=True
    ):
        assert top[token] == pytest.approx(value) or top[token] > value  # tokens may read alike
        assert 1 <= len(top) <= 3
    streamed = openai_client.completions.create(
        **body, max_tokens=6, logprobs=2, stream=True, extra_body={"ignore_eos": True}
    )
    values: list[float] = []
    for event in streamed:
        (part,) = event.choices
        if part.logprobs is not None:
            values += part.logprobs.token_logprobs or []
    np.testing.assert_allclose(values, known.token_logprobs[-6:], atol=TOLERANCE)
    scored = openai_client.completions.create(**body, max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].text == PROMPT
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_chats_by_the_openai_client(openai_client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"ignore_eos": True},
    }
    (choice,) = openai_client.chat.completions.create(**body).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 5
    for token in content:
        assert token.bytes is not None
        assert [token.token, token.logprob] == [
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        ]
        assert len(token.top_logprobs) == 3
    together = b"".join(bytes(token.bytes or ()) for token in content)
    assert together.decode("utf-8", errors="replace") == choice.message.content
    streamed = [
        token.logprob
        for event in openai_client.chat.completions.create(**body, stream=True)
        for part in event.choices
        if part.logprobs is not None
        for token in part.logprobs.content or []
    ]
    np.testing.assert_allclose(streamed, [token.logprob for token in content], atol=TOLERANCE)
