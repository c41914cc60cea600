"""Unknown fields of requests: ignored with one warning a name, or with --strict-requests a 400."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.applications import Starlette

from jspec.errors import RequestError
from jspec.messages.unknown_fields import MAX_REPORTED, IgnoredFields, ignoring, refuse_or_ignore
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import ask

USER = {"role": "user", "content": "a"}
CHAT = {"messages": [USER], "max_tokens": 1}
PARAMS = {"max_new_tokens": 1, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parmeters": {}}}
# By route: a body with one unknown field, its name, and what is suggested in its place.
UNKNOWN: list[tuple[str, dict[str, Any], str, str]] = [
    ("/generate", {"text": "a", "sampling_params": PARAMS, "streem": True}, "streem", "'stream'"),
    (
        "/generate",
        {"text": "a", "sampling_params": {**PARAMS, "temprature": 0}},
        "temprature",
        "'temperature'",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": PARAMS, "min_p": 0.5},
        "min_p",
        "'min_p' in sampling_params",
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "a\nb": 1}, r"a\nb", ""),
    (
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usages": True},
        },
        "include_usages",
        "'include_usage'",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "max_new_tokens": 3},
        "max_new_tokens",
        "'max_completion_tokens'",
    ),
    ("/v1/chat/completions", {"messages": [{**USER, "cache_control": {}}]}, "cache_control", ""),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "none"},
        "parmeters",
        "'parameters'",
    ),
    (
        "/v1/responses",
        {"input": "a", "max_tokens": 9},
        "max_tokens",
        "'max",
    ),
    ("/v1/responses", {"input": "a", "text": {"formt": {}}}, "formt", "'format'"),
    ("/v1/messages", {**CHAT, "stop": "x"}, "stop", "'stop_sequences'"),
    ("/v1/messages/count_tokens", {**CHAT, "systm": "x"}, "systm", "'system'"),
    (
        "/v1/score",
        {"query": "a", "items": ["b"], "label_token_ids": [1], "itms": "b"},
        "itms",
        "'items'",
    ),
    ("/tokenize", {"prompt": "a", "text": "b"}, "text", "'prompt'"),
    ("/tokenize", {"messages": [{**USER, "nam": "b"}]}, "nam", "'name'"),
    ("/detokenize", {"tokens": [65], "token": [65]}, "token", "'tokens'"),
    ("/abort_request", {"rid": "none", "id": "none"}, "id", "'rid'"),
    ("/update_weight_version", {"new_version": "default", "version": "x"}, "version", "'new_v"),
]


@pytest.fixture(scope="module")
def lenient(engine: Engine) -> Starlette:
    return create_app(engine)


@pytest.fixture(scope="module")
def strict(engine: Engine) -> Starlette:
    return create_app(engine, ServerArgs(strict_requests=True))


@pytest.mark.parametrize(
    ("path", "body", "name", "meant"), UNKNOWN, ids=[f"{row[0]} {row[2]}" for row in UNKNOWN]
)
def test_an_unknown_field_is_ignored_with_one_warning_or_refused(
    lenient: Starlette,
    strict: Starlette,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    name: str,
    meant: str,
) -> None:
    refused = ask(strict, "POST", path, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]["message"]
    assert f"the unknown field '{name}'; " in error
    with caplog.at_level(logging.WARNING, "jspec.server"):
        for _ in range(2):
            assert ask(lenient, "POST", path, json=body).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "jspec.server"]
    assert f"the unknown field '{name}', which was ignored" in line
    assert "\n" not in line
    for text in (error, line):
        assert ("did you mean" in text) == bool(meant)
        assert f"did you mean {meant}" in text or not meant


def test_an_ignored_field_changes_nothing(lenient: Starlette) -> None:
    plain = {"text": "def f(", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    odd = {**plain, "temperature": 2, "sampling_params": {**plain["sampling_params"], "topk": 1}}
    answers = [ask(lenient, "POST", "/generate", json=body).json() for body in (plain, odd)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_a_known_field_that_is_not_honoured_is_refused_by_name(lenient: Starlette) -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        (
            "/generate",
            {"text": "a", "lora_id": "x"},
            "lora_id is 'x', which is not imp",
        ),
        (
            "/generate",
            {"text": "a", "sampling_params": {"max_tokens": 5}},
            "max_tokens is 5, which is not implemented; did you mean 'max_new_tokens'? expected",
        ),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is 'b', which is not implem"),
        ("/v1/chat/completions", {**CHAT, "functions": [1]}, "functions is [1], which is not imp"),
        (
            "/v1/chat/completions",
            {"messages": [{**USER, "audio": {}}]},
            "messages[0].audio is {}, ",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background is true, which is not"),
        ("/v1/messages", {**CHAT, "container": "x"}, "container is 'x', which is not implemented"),
    ]
    for path, body, message in rows:
        answer = ask(lenient, "POST", path, json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_a_call_in_python_and_a_query_are_strict(engine: Engine, lenient: Starlette) -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        engine.generate("a", {"temprature": 1})
    with pytest.raises(RequestError, match="unknown field 'nam'; did you mean 'name'"):
        engine.chat([{**USER, "nam": "x"}], PARAMS)
    answer = ask(lenient, "GET", "/get_weights_by_name?nam=x")
    assert "the unknown field 'nam'; did you mean 'name'" in answer.json()["message"]


def test_a_client_that_invents_names_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    fields, num_suggested = IgnoredFields(), 0

    def suggest() -> str:
        nonlocal num_suggested
        num_suggested += 1
        return "x" * 10**6

    with caplog.at_level(logging.WARNING, "jspec.server"), ignoring(fields):
        for index in range(20 * MAX_REPORTED):
            refuse_or_ignore("the body", f"{index}{'k' * 10**5}", {"a"}, suggest=suggest)
            if index == 2:
                suggest = str
    assert len(caplog.records) == MAX_REPORTED + 1
    assert num_suggested == 3
    assert "further unknown fields" in caplog.records[-1].getMessage()
    assert max(len(record.getMessage()) for record in caplog.records[3:]) < 400
