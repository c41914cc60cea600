"""extra_key and cache_salt: requests with different ones share no cached prefix, equal ones do."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jspec.errors import RequestError
from jspec.server.http.fields import MAX_EXTRA_KEY_CHARS, get_extra_key

TEXT = " ".join(f"word_{i}" for i in range(40))
CHAT = [{"role": "user", "content": TEXT}]
Cached = Callable[[Any], int]


DOORS: dict[str, tuple[dict[str, Any], Cached]] = {
    "/generate": (
        {"text": TEXT, "sampling_params": {"max_new_tokens": 1}},
        lambda answer: answer["meta_info"]["cached_tokens"],
    ),
    "/v1/completions": (
        {"prompt": TEXT, "max_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "/v1/chat/completions": (
        {"messages": CHAT, "max_completion_tokens": 1},
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "/v1/responses": (
        {"input": CHAT, "max_output_tokens": 1},
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
    ),
}


@pytest.mark.parametrize("path", DOORS)
def test_keys_keep_prefixes_apart(client: httpx.Client, path: str) -> None:
    body, cached = DOORS[path]
    first, second = uuid.uuid4().hex, uuid.uuid4().hex

    def ask(**key: str | None) -> int:
        answer = client.post(path, json={**body, **key})
        assert answer.status_code == 200, answer.text
        return cached(answer.json())

    assert ask(extra_key=first) == 0
    most = ask(extra_key=first)
    assert most > 0
    assert ask(extra_key=second) == 0
    assert ask(cache_salt=second) == most  # another name of the same
    assert ask(cache_salt=first, extra_key=first) == most
    ask()
    assert ask(extra_key=None) == most


@pytest.mark.parametrize("path", DOORS)
def test_what_is_no_key_is_a_400(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={**DOORS[path][0], "cache_salt": ""})
    assert answer.status_code == 400
    assert "cache_salt has 0 characters; expected from 1 to" in answer.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"extra_key": 3}, "extra_key is 3; expected text"),
        ({"cache_salt": ["a"]}, "cache_salt is ['a']; expected text"),
        ({"extra_key": "x" * (MAX_EXTRA_KEY_CHARS + 1)}, "extra_key has 1025 characters"),
        ({"extra_key": "a", "cache_salt": "b"}, "extra_key is 'a' and cache_salt is 'b'"),
        ({"extra_key": "\ud800"}, "extra_key holds a lone surrogate"),
    ],
)
def test_what_is_no_key_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as raised:
        get_extra_key(keys)
    assert said in str(raised.value)
