"""Slots are shared between callers: users whom clients name, or else calls."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jspec.errors import RequestError
from jspec.server.anthropic.schema import parse_message
from jspec.server.native.generate_schema import MAX_CALLER_CHARS
from jspec.server.openai.chat_schema import parse_chat
from jspec.server.openai.completion_schema import parse_completion
from jspec.server.openai.responses_schema import parse_response
from jspec.serving.engine import Engine

from .helpers import wait_idle, wait_taken

CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("fields", "caller"),
    [
        ({}, None),
        ({"user": None, "prompt_cache_key": "k"}, None),
        ({"user": "", "safety_identifier": "s"}, "s"),
        ({"user": "u", "safety_identifier": "s"}, "u"),
        ({"user": "u" * 5000}, "u" * MAX_CALLER_CHARS),
    ],
)
def test_a_client_names_its_caller(fields: dict[str, Any], caller: str | None) -> None:
    call = parse_completion({"prompt": ["a", "b"], **fields})
    assert [prompt.caller for prompt in call.prompts] == [caller, caller]
    assert parse_chat({"messages": CHAT, **fields}).prompt.caller == caller
    assert parse_response({"input": CHAT, **fields}).chat.prompt.caller == caller


def test_anthropics_name_of_the_caller() -> None:
    body = {"messages": CHAT, "max_tokens": 1}
    assert parse_message({**body, "metadata": {"user_id": "u"}}).prompt.caller == "u"
    for metadata in (None, {}, {"user_id": None}):
        assert parse_message({**body, "metadata": metadata}).prompt.caller is None
    with pytest.raises(RequestError, match=r"metadata.user_id is 3; expected text"):
        parse_message({**body, "metadata": {"user_id": 3}})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "user": "other"}),
    ],
)
def test_a_call_of_many_prompts_does_not_keep_others_waiting(
    client: httpx.Client, engine: Engine, path: str, fields: dict[str, Any]
) -> None:
    """Two slots and thirty prompts of one caller; the other caller's is among the next to run."""
    body = {"prompt": ["x"] * 30, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json={**body, "user": "one"}) as many:
        assert many.status_code == 200
        wait_taken(engine, 30)
        assert client.post(path, json=fields).status_code == 200
        assert engine.stats.num_queued > 20
        assert b"jspec:num_callers_waiting{" in client.get("/metrics").content
    wait_idle(engine)
