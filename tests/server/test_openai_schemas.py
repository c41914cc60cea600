"""The fields of POST /v1/completions, under OpenAI's names."""

from __future__ import annotations

from typing import Any

import pytest

from jspec.errors import RequestError
from jspec.messages.request import SamplingParams, StreamChunk
from jspec.messages.response import Completion
from jspec.server.openai.answers import spec_details, usage_of
from jspec.server.openai.chat_schema import parse_chat
from jspec.server.openai.completion_schema import (
    NEUTRAL_COMPLETION,
    parse_completion,
)
from jspec.server.openai.responses_schema import parse_response


def test_names_are_translated() -> None:
    call = parse_completion(
        {
            "prompt": "x",
            "max_tokens": 9,
            "min_tokens": 2,
            "seed": 5,
            "top_k": 4,
            "min_p": 0.1,
            "stop": "\n",
            "stop_token_ids": [7],
            "ignore_eos": True,
            "n": 2,
            "user": "someone",
        }
    )
    (prompt,) = call.prompts
    assert prompt.sampling == SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        sampling_seed=5,
        top_k=4,
        min_p=0.1,
        stop=("\n",),
        stop_token_ids=(7,),
        ignore_eos=True,
        n=2,
    )


def test_fields_that_describe_a_call_are_checked_and_change_nothing() -> None:
    fields = {"prompt_cache_key": "k", "metadata": {"a": "b"}}
    assert parse_completion({"prompt": "x", **fields}) == parse_completion({"prompt": "x"})
    messages = [{"role": "user", "content": "x"}]
    assert parse_chat({"messages": messages, **fields}) == parse_chat({"messages": messages})
    for name in (*fields, "user", "safety_identifier"):
        with pytest.raises(RequestError, match=f"{name} is 17; expected"):
            parse_chat({"messages": messages, name: 17})


@pytest.mark.parametrize("name", ["return_logprob", "return_hidden_states", "return_draft_trees"])
def test_what_only_meta_info_tells_needs_it(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is true without return_meta_info"):
        parse_completion({"prompt": "x", name: True})
    call = parse_completion({"prompt": "x", name: True, "return_meta_info": True})
    assert getattr(call.prompts[0].sampling, name) is True
    with pytest.raises(RequestError, match=f"the unknown field '{name}'"):
        parse_response({"input": "x", name: True})


def test_defaults_are_openais() -> None:
    sampling = parse_completion({"prompt": "x"}).prompts[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.n) == (16, 1.0, 1)


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("x", ["x"], [None]),
        (["x", "y"], ["x", "y"], [None, None]),
        ([1, 2], [None], [[1, 2]]),
        ([[1], [2, 3]], [None, None], [[1], [2, 3]]),
    ],
)
def test_four_kinds_of_prompts(prompt: Any, texts: list[Any], ids: list[Any]) -> None:
    prompts = parse_completion({"prompt": prompt}).prompts
    assert [p.text for p in prompts] == texts
    assert [p.input_ids for p in prompts] == ids


@pytest.mark.parametrize("name", sorted(NEUTRAL_COMPLETION))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    for value in (*NEUTRAL_COMPLETION[name], None):
        assert len(parse_completion({"prompt": "x", name: value}).prompts) == 1
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        parse_completion({"prompt": "x", name: 17})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is null"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": ["x", 1]}, "prompt is 1; expected text"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens is -1; expected"),
        (
            {"prompt": "x", "min_tokens": 20},
            "min_tokens is 20; expected at most max_tokens, which is 16",
        ),
        ({"prompt": "x", "seed": -(2**63) - 1}, "seed is -9223372036854775809; expected"),
        ({"prompt": "x", "max_new_tokens": 3}, "did you mean 'max_tokens'?"),
        ({"prompt": "x", "max_completion_tokens": 3}, "did you mean 'max_tokens'?"),
        ({"prompt": "x", "sampling_seed": 3}, "did you mean 'seed'?"),
        ({"prompt": "x", "sampling_params": {}}, "did you mean its fields at the top level?"),
        ({"text": "x"}, "unknown field 'text'; did you mean 'prompt'?"),
        ({"messages": []}, "did you mean 'prompt'?"),
        ({"prompt": "x", "model": 3}, "model is 3"),
        ({"prompt": "x", "echo": 1}, "echo is 1; expected true or false"),
        ({"prompt": "x", "best_of": 2}, "best_of is 2; expected n, which is 1, or leave it out"),
        ({"prompt": "x", "best_of": "2"}, "best_of is '2'; expected n, which is 1"),
        ({"prompt": "x", "logit_bias": {"5": "1"}}, "logit_bias of token 5 is '1'"),
        ({"prompt": "x", "logprobs": 21}, "logprobs is 21; expected an integer of at least 0 and"),
        ({"prompt": "x", "logprobs": True}, "logprobs is true; expected an integer"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "expected stream true"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": 1}}, "unknown field 'usage'"),
        ({"prompt": "x", "stream": True, "stream_options": []}, "stream_options is []"),
    ],
)
def test_a_bad_request_names_its_field(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(body)
    assert message in str(caught.value)


def test_usage_counts_a_prompt_once() -> None:
    # Two prompts of 3 and 5 tokens, two choices each, of 1, 2, 3 and 4 tokens.
    completions = [Completion("r") for _ in range(4)]
    for i, completion in enumerate(completions):
        completion.add(
            StreamChunk(
                request_id="r",
                new_ids=(0,) * (i + 1),
                num_accepted=0,
                text="",
                prompt_tokens=3 if i < 2 else 5,
            )
        )
    usage = usage_of(completions, [0, 0, 1, 1])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 10)
    assert usage["total_tokens"] == 18


def test_no_details_without_a_verification() -> None:
    assert spec_details([Completion("r")]) == [None]
