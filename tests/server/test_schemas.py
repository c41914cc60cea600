"""The fields of POST /generate, and every error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.errors import RequestError
from jspec.messages.request import SamplingParams
from jspec.server.anthropic.schema import MESSAGE_FIELDS, parse_message
from jspec.server.native.generate_schema import (
    GENERATE_FIELDS,
    NEUTRAL_GENERATE,
    NEUTRAL_NATIVE_SAMPLING,
    SAMPLING_NAMES,
    parse_abort,
    parse_generate,
    sampling_params,
)
from jspec.server.native.score_endpoint import SCORE_FIELDS, parse_score
from jspec.server.openai.chat_schema import CHAT_FIELDS, parse_chat
from jspec.server.openai.completion_schema import COMPLETION_FIELDS, parse_completion
from jspec.server.openai.responses_schema import RESPONSE_FIELDS, parse_response

MESSAGES = [{"role": "user", "content": "x"}]


def test_one_text() -> None:
    call = parse_generate({"text": "hi", "sampling_params": {"temperature": 0}, "rid": "r"})
    (prompt,) = call.prompts
    assert (prompt.text, prompt.input_ids, prompt.request_id) == ("hi", None, "r")
    assert prompt.sampling == SamplingParams(temperature=0)
    assert (call.is_list, call.stream, call.return_spec_tokens) == (False, False, False)


def test_a_list_of_ids_with_params_each() -> None:
    call = parse_generate(
        {
            "input_ids": [[1, 2], [3]],
            "sampling_params": [{"max_new_tokens": 4}, {"max_new_tokens": 5}],
            "rid": ["a", "b"],
        }
    )
    assert [p.input_ids for p in call.prompts] == [[1, 2], [3]]
    assert [p.sampling.max_new_tokens for p in call.prompts] == [4, 5]
    assert [p.request_id for p in call.prompts] == ["a", "b"]
    assert call.is_list
    assert call.group is None


def test_one_rid_for_a_list_names_them_all() -> None:
    call = parse_generate({"text": ["x", "y"], "rid": "r"})
    assert [p.request_id for p in call.prompts] == ["r_0", "r_1"]
    assert call.group == "r"


def test_a_list_of_one_is_a_list() -> None:
    assert parse_generate({"text": ["x"]}).is_list
    assert not parse_generate({"input_ids": [1]}).is_list


@pytest.mark.parametrize("name", sorted(NEUTRAL_GENERATE))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    for value in (*NEUTRAL_GENERATE[name], None):
        assert len(parse_generate({"text": "x", name: value}).prompts) == 1
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        parse_generate({"text": "x", name: 17})


@pytest.mark.parametrize("name", sorted(NEUTRAL_NATIVE_SAMPLING))
def test_neutral_sampling_values_pass_and_others_do_not(name: str) -> None:
    for value in (*NEUTRAL_NATIVE_SAMPLING[name], None):
        assert sampling_params({name: value}) == SamplingParams()
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        sampling_params({name: 17})


def test_neutral_values_of_a_list_request() -> None:
    body = {"text": ["x", "y"], "log_metrics": [True, True], "lora_path": [None, None]}
    assert len(parse_generate(body).prompts) == 2
    with pytest.raises(RequestError, match="log_metrics"):
        parse_generate({**body, "log_metrics": [True, False]})


def test_log_probabilities_stand_beside_the_prompts() -> None:
    body = {
        "text": ["x", "y"],
        "sampling_params": {"temperature": 0},
        "return_logprob": [True, False],
        "logprob_start_len": 3,
        "top_logprobs_num": [None, 2],
        "token_ids_logprob": [[1, 2], None],
    }
    first, second = parse_generate(body).prompts
    assert first.sampling == SamplingParams(
        temperature=0, return_logprob=True, logprob_start_len=3, token_ids_logprob=(1, 2)
    )
    assert second.sampling == SamplingParams(temperature=0, logprob_start_len=3, top_logprobs_num=2)
    (one,) = parse_generate({"text": "x", "token_ids_logprob": [5, 6]}).prompts
    assert one.sampling.token_ids_logprob == (5, 6)
    with pytest.raises(RequestError, match="return_logprob is a list of 1; expected one, or a li"):
        parse_generate({**body, "return_logprob": [True]})
    with pytest.raises(RequestError, match=r"top_logprobs_num is a list of 2; expected one$"):
        parse_generate({"text": "x", "top_logprobs_num": [1, 2]})


@pytest.mark.parametrize("depth", [3, 450, 900])
def test_lists_in_lists_are_not_neutral(depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    with pytest.raises(RequestError, match=r"image_data is .*not implemented"):
        parse_generate({"text": "x", "image_data": value})


def test_zero_and_false_are_not_the_same() -> None:
    with pytest.raises(RequestError, match="background is 0, which"):
        parse_generate({"text": "x", "background": 0})
    with pytest.raises(RequestError, match="return_logprob is 0; expected true or false"):
        parse_generate({"text": "x", "return_logprob": 0})


BAD: list[tuple[Any, str]] = [
    ([], "expected a JSON object"),
    ("text", "expected a JSON object"),
    (None, "expected a JSON object"),
    ({}, "exactly one of text and input_ids"),
    ({"text": "x", "input_ids": [1]}, "exactly one of text and input_ids"),
    ({"text": 3}, "text is 3; expected text"),
    ({"text": ["x", 3]}, "text is 3; expected text"),
    ({"text": []}, "text is an empty list"),
    ({"text": "\ud800"}, "lone surrogate"),
    ({"input_ids": "abc"}, "expected a list of token ids"),
    ({"input_ids": []}, "input_ids is an empty list"),
    ({"input_ids": [[1], 2]}, "input_ids is 2; expected a list"),
    ({"txt": "x"}, "did you mean 'text'?"),
    ({"text": "x", "temperature": 0}, "did you mean 'temperature' in sampling_params?"),
    ({"text": "x", "max_tokens": 9}, "did you mean 'max_new_tokens' in sampling_params?"),
    ({"text": "x", "seed": 9}, "did you mean 'sampling_seed' in sampling_params?"),
    ({"prompt": "x"}, "unknown field 'prompt'; did you mean 'text'?"),
    ({"text": "x", "return_logprobs": True}, "did you mean 'return_logprob'?"),
    ({"text": "x", "sampling_params": {"max_tokens": 9}}, "did you mean 'max_new_tokens'?"),
    ({"text": "x", "sampling_params": {"seed": 9}}, "did you mean 'sampling_seed'?"),
    ({"text": "x", "sampling_params": {"stream": True}}, "unknown field 'stream'; expected one of"),
    ({"text": "x", "stream": "yes"}, "stream is 'yes'; expected true or false"),
    ({"text": "x", "stream": 1}, "stream is 1; expected true or false"),
    ({"text": "x", "return_spec_tokens": 1}, "return_spec_tokens is 1"),
    ({"text": "x", "rid": ""}, "rid has 0 characters"),
    ({"text": "x", "rid": "r" * 257}, "rid has 257 characters"),
    ({"text": "x", "rid": 5}, "rid is 5; expected text"),
    ({"text": "x", "rid": ["a"]}, "rid is a list of 1; expected text"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid is a list of 1; expected a list of 2"),
    ({"text": "x", "sampling_params": [{}]}, "sampling_params is a list of 1; expected one object"),
    ({"text": ["x"], "sampling_params": [{}, {}]}, "expected a list of 1"),
    ({"text": "x", "sampling_params": "greedy"}, "sampling_params is 'greedy'"),
    ({"text": "x", "sampling_params": {"temprature": 1}}, "did you mean 'temperature'?"),
    ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature is -1"),
    ({"text": "x", "sampling_params": {"temperature": "0"}}, "temperature is '0'"),
    ({"text": "x", "sampling_params": {"top_p": 0}}, "top_p is 0"),
    ({"text": "x", "sampling_params": {"top_k": -2}}, "top_k is -2"),
    ({"text": "x", "sampling_params": {"no_stop_trim": 1}}, "no_stop_trim is 1; expected true"),
    ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens is -1"),
    ({"text": "x", "sampling_params": {"max_new_tokens": 1e3}}, "max_new_tokens is 1000.0"),
    (
        {"text": "x", "sampling_params": {"min_new_tokens": 200}},
        "min_new_tokens is 200; expected at most max_new_tokens, which is 128",
    ),
    ({"text": "x", "sampling_params": {"n": 0}}, "n is 0"),
    ({"text": "x", "sampling_params": {"sampling_seed": 2**64}}, "sampling_seed is"),
    ({"text": "x", "sampling_params": {"stop": ""}}, "stop holds ''"),
    ({"text": "x", "sampling_params": {"stop": "\udfff"}}, "stop holds a lone surrogate"),
    ({"text": "x", "sampling_params": {"stop": 3}}, "stop is 3"),
    ({"text": "x", "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids is -1"),
    ({"text": "x", "sampling_params": {"ignore_eos": 1}}, "ignore_eos is 1"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_request_names_its_field(body: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_generate(body)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "body", "accepted"),
    [
        (parse_generate, {"text": "x"}, GENERATE_FIELDS),
        (sampling_params, {}, SAMPLING_NAMES),
        (parse_completion, {"prompt": "x"}, COMPLETION_FIELDS),
    ],
)
def test_what_is_listed_for_an_unknown_field_is_what_is_accepted(
    parse: Callable[[Any], object], body: dict[str, Any], accepted: frozenset[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        parse({**body, "qqqq": 1})
    assert str(caught.value).endswith(f"expected one of {sorted(accepted)}")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(GENERATE_FIELDS | COMPLETION_FIELDS | set(NEUTRAL_GENERATE) | {"abort_all"})
PARAMS = st.dictionaries(st.sampled_from(sorted(SAMPLING_NAMES)), ANY_JSON, max_size=3)


@settings(max_examples=50)
@given(
    st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=4),
    st.sampled_from([{}, {"text": "x"}, {"input_ids": [[1], [2]]}, {"prompt": "x"}]),
    st.none() | PARAMS,
)
def test_any_json_is_taken_or_refused_and_nothing_else(
    body: dict[str, Any], base: dict[str, Any], params: dict[str, Any] | None
) -> None:
    whole = {**base, **body} | ({} if params is None else {"sampling_params": params})
    for parse in (parse_generate, parse_completion, parse_abort):
        with contextlib.suppress(RequestError):
            parse(whole)


@pytest.mark.parametrize("value", [True, False, {}, {"a": 1}], ids=str)
@pytest.mark.parametrize("name", ["regex", "ebnf", "structural_tag"])
def test_a_grammar_that_is_no_text_is_refused(name: str, value: Any) -> None:
    """true is not the expression "true". An object may be a structural tag, or a JSON schema, and
    so may true.
    """
    bodies: list[tuple[Callable[[Any], object], dict[str, Any]]] = [
        (sampling_params, {name: value}),
        (SamplingParams.from_mapping, {name: value}),
        (parse_generate, {"text": "x", "sampling_params": {name: value}}),
        (parse_completion, {"prompt": "x", name: value}),
    ]
    for parse, body in bodies:
        if name == "structural_tag" and isinstance(value, dict):
            parse(body)
            continue
        with pytest.raises(RequestError, match=rf"^{name} is .*; expected a text that is not e"):
            parse(body)
    assert sampling_params({"json_schema": True}).json_schema == "true"


PYTHON_WORDS = re.compile(r"\b(True|False|None)\b")
WRONG: tuple[Any, ...] = (
    *(True, False, None, 7, "x", [], {}),
    *([True], [None], [[True], None], {"a": None}, [{"type": True}], {"type": None}),
)
READERS: dict[str, tuple[Callable[[Any], object], dict[str, Any], frozenset[str]]] = {
    "generate": (parse_generate, {"text": "x"}, GENERATE_FIELDS),
    "params": (sampling_params, {}, SAMPLING_NAMES),
    "completion": (parse_completion, {"prompt": "x"}, COMPLETION_FIELDS),
    "chat": (parse_chat, {"messages": MESSAGES}, CHAT_FIELDS),
    "response": (parse_response, {"input": "x"}, RESPONSE_FIELDS),
    "message": (parse_message, {"messages": MESSAGES, "max_tokens": 1}, MESSAGE_FIELDS),
    "score": (parse_score, {"query": "x", "items": ["y"], "label_token_ids": [1]}, SCORE_FIELDS),
    "abort": (parse_abort, {"rid": "x"}, frozenset({"rid", "abort_all"})),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_message_shows_a_value_as_json_has_it(reader: str) -> None:
    parse, base, fields = READERS[reader]
    told = []
    for name in sorted(fields):
        for value in WRONG:
            try:
                parse({**base, name: value})
            except RequestError as error:
                told.append(str(error))
    assert len(told) > len(fields)
    assert not [message for message in told if PYTHON_WORDS.search(message)]


def test_abort() -> None:
    assert parse_abort({"rid": "r"}).rid == "r"
    assert parse_abort({"abort_all": True}).rid is None
    assert parse_abort({"abort_all": True, "rid": ""}).rid is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "expected rid, or abort_all true"),
        ({"rid": ""}, "rid has 0 characters"),
        ({"rid": None, "abort_all": False}, "expected rid, or abort_all true"),
        ({"rid": "a", "abort_all": True}, "expected one of them"),
        ({"abort_all": "true"}, "abort_all is 'true'"),
        ({"id": "a"}, "did you mean 'rid'?"),
    ],
)
def test_a_bad_abort(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_abort(body)
    assert message in str(caught.value)
