"""The requests that public benchmark clients send, and the parts of the answers that they read.

Written from the clients' public request code: sglang.bench_serving (SGLang 0.5), vLLM's
`bench serve` (0.25), guidellm (0.4) and lm-eval's local-completions (0.4). Each row is one body as
it is sent; the readers below read exactly the fields that those clients read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from .helpers import events_of

NEW_TOKENS = 12
Events = list[dict[str, Any]]


def bench_serving_native(events: Events) -> int:
    """SGLang's reader: cumulative text, and its count of tokens."""
    counts = [e["meta_info"]["completion_tokens"] for e in events if e.get("text")]
    assert counts == sorted(counts)
    texts = [e["text"] for e in events]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    return int(counts[-1])


def usage_at_the_end(events: Events) -> int:
    """vLLM's reader: text while there are choices; else the usage."""
    assert any(e["choices"][0].get("text") for e in events if e["choices"])
    (usage,) = [e["usage"] for e in events if not e["choices"] and e.get("usage")]
    assert usage["prompt_tokens"] == 8
    return int(usage["completion_tokens"])


def chat_usage_at_the_end(events: Events) -> int:
    choices = [e["choices"][0]["delta"].get("content") for e in events if e["choices"]]
    assert "".join(text or "" for text in choices)
    (usage,) = [e["usage"] for e in events if not e["choices"] and e.get("usage")]
    return int(usage["completion_tokens"])


def usage_in_every_event(events: Events) -> int:
    """guidellm's reader: the last usage counts, and it requests one in each event."""
    found = [e["usage"] for e in events]
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in found)
    assert all("choices" in e and "id" in e for e in events)
    return counts[-1]


def text_alone(events: Events) -> int:
    """SGLang's client of completions requests no usage: it assumes the requested length."""
    assert "".join(e["choices"][0]["text"] for e in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return NEW_TOKENS


SGLANG_NATIVE = {
    "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    "stream": True,
    "lora_path": None,
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}
VLLM = {
    "model": "target",
    "repetition_penalty": 1.0,
    "max_tokens": NEW_TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
GUIDELLM = {
    "model": "target",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
TEXT_PART = [{"type": "text", "text": "def fib("}]
STREAMS: dict[str, tuple[str, dict[str, Any], Callable[[Events], int]]] = {
    "bench_serving, text": (
        "/generate",
        {"text": "def fib(", **SGLANG_NATIVE},
        bench_serving_native,
    ),
    "bench_serving, ids": (
        "/generate",
        {"input_ids": [11, 12, 13], **SGLANG_NATIVE},
        bench_serving_native,
    ),
    "bench_serving, completions": (
        "/v1/completions",
        {
            "model": "target",
            "prompt": "def fib(",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": NEW_TOKENS,
            "stream": True,
            "ignore_eos": True,
        },
        text_alone,
    ),
    "vllm bench serve": ("/v1/completions", {"prompt": "def fib(", **VLLM}, usage_at_the_end),
    "vllm bench serve, chat": (
        "/v1/chat/completions",
        {
            "model": "target",
            "messages": [{"role": "user", "content": TEXT_PART}],
            "max_completion_tokens": NEW_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
        chat_usage_at_the_end,
    ),
    "guidellm": (
        "/v1/completions",
        {**GUIDELLM, "max_tokens": NEW_TOKENS, "prompt": "def fib("},
        usage_in_every_event,
    ),
    "guidellm, chat": (
        "/v1/chat/completions",
        {
            **GUIDELLM,
            "max_completion_tokens": NEW_TOKENS,
            "messages": [{"role": "user", "content": TEXT_PART}],
        },
        usage_in_every_event,
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_what_the_client_reads(client: httpx.Client, name: str) -> None:
    path, body, read = STREAMS[name]
    answer = client.post(path, json=body, headers={"x-request-id": "bench-1"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert read(events_of(answer.text)) == NEW_TOKENS


def test_usage_in_every_event_is_of_its_own_sequence(client: httpx.Client) -> None:
    body = {**GUIDELLM, "max_tokens": NEW_TOKENS, "prompt": ["a", "def fib("]}
    events = events_of(client.post("/v1/completions", json=body).text)
    last = {e["choices"][0]["index"]: e["usage"] for e in events if e["choices"]}
    assert [last[i]["prompt_tokens"] for i in (0, 1)] == [1, 8]
    assert [last[i]["completion_tokens"] for i in (0, 1)] == [NEW_TOKENS] * 2
    assert events[-1]["usage"]["total_tokens"] == 9 + 2 * NEW_TOKENS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continuous_usage_stats": True}, "expected include_usage true"),
        ({"continuous_usage_stats": 1, "include_usage": True}, "continuous_usage_stats is 1"),
    ],
)
def test_usage_that_cannot_be_is_refused(
    client: httpx.Client, options: dict[str, Any], message: str
) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": options}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_vllm_reads_acceptance_off_the_metrics(client: httpx.Client) -> None:
    """It sums the samples of these names before and after a load."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("vllm:spec_decode"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            position = labels.partition('position="')[2].partition('"')[0]
            found[name + position] = float(value)
    assert found["vllm:spec_decode_num_drafts_total"] >= 0
    assert {f"vllm:spec_decode_num_accepted_tokens_per_pos_total{i}" for i in range(3)} <= set(
        found
    )


# sgl.select of SGLang's frontend language

CHOICES = ["def fib", "import os", "x"]


def select(client: httpx.Client, text: str, choices: list[str]) -> dict[str, list[float]]:
    """Score the choices like sgl.select, by the name of each of its three methods."""
    nothing = {"max_new_tokens": 0, "temperature": 0}

    def generate(**body: Any) -> Any:
        return client.post("/generate", json=body).raise_for_status().json()

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    num_prompt = generate(text=text, sampling_params=nothing)["meta_info"]["prompt_tokens"]
    answers = generate(
        text=[text + choice for choice in choices],
        sampling_params=nothing,
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=max(num_prompt - 2, 0),
    )
    tokens = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert all(answer["meta_info"]["output_token_logprobs"] == [] for answer in answers)
    tokens = [row[1:] if text.endswith(row[0][-1]) else row for row in tokens]  # token healing
    answers = generate(
        input_ids=[[token_id for _, token_id, _ in row] for row in tokens],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
    )
    alone = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert [len(row) for row in alone] == [len(row) for row in tokens]
    own = [[value for value, *_ in row] for row in tokens]
    return {
        "token_length_normalized": [mean(row) for row in own],
        "greedy_token_selection": [row[0] for row in own],
        "unconditional_likelihood_normalized": [
            mean([value - (other[0] or 0) for value, other in zip(row, others, strict=True)])
            for row, others in zip(own, alone, strict=True)
        ],
    }


def test_sgl_select_scores_choices(client: httpx.Client) -> None:
    text, choice = "The answer is ", "def fib"
    found = select(client, text, CHOICES)
    scored = client.post(
        "/generate",
        json={
            "text": text + choice,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
        },
    ).json()["meta_info"]["input_token_logprobs"]
    tail = scored[client.post("/tokenize", json={"prompt": text}).json()["count"] - 2 :]
    tail = tail[text.endswith(tail[0][-1]) :]
    expected = sum(value for value, *_ in tail) / len(tail)
    assert found["token_length_normalized"][0] == pytest.approx(expected, abs=1e-4)
    assert all(len(scores) == len(CHOICES) for scores in found.values())
