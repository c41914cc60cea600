"""POST /v1/chat/completions and Engine.chat: the template, the shapes, the refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jspec.errors import RequestError
from jspec.server.openai.chat_schema import CHAT_FIELDS, NEUTRAL_CHAT, parse_chat
from jspec.server.service import INLINE_CHARS
from jspec.serving.engine import Engine
from jspec.text.calls.events import CallBegin
from jspec.text.calls.registry import CALL_FORMATS

from .helpers import events_of

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TEXT = "<|endoftext|><system>Be brief.</>\n<user>Hi</>\n<assistant>"
PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
NATIVE = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def official(live_url: str) -> Iterator[openai.OpenAI]:
    """Return OpenAI's own client."""
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{live_url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


def chat(client: httpx.Client, **body: Any) -> Any:
    body = {"messages": MESSAGES, **PARAMS, **body}
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def test_a_chat_is_the_rendered_prompt_in_openais_shape(
    client: httpx.Client, engine: Engine
) -> None:
    expected = engine.generate(TEXT, NATIVE)
    answer = chat(client, model="target", user="someone", max_completion_tokens=12)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "target")
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected["text"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    num_prompt = len(engine.tokenizer.encode(TEXT))
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["total_tokens"] == num_prompt + 12
    assert engine.chat(MESSAGES, NATIVE)["output_ids"] == expected["output_ids"]


def test_the_official_client_chats(official: openai.OpenAI, engine: Engine) -> None:
    expected = engine.generate(TEXT, NATIVE)["text"]
    params: dict[str, Any] = {
        "model": "default",
        "messages": MESSAGES,
        "temperature": 0,
        "max_completion_tokens": 12,
        "extra_body": {"ignore_eos": True},
    }
    answer = official.chat.completions.create(**params)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    stream = official.chat.completions.create(
        **params, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_official_client_completes_and_lists(official: openai.OpenAI, engine: Engine) -> None:
    expected = engine.generate("def ", NATIVE)["text"]
    answer = official.completions.create(
        model="target",
        prompt="def ",
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == expected
    assert [model.id for model in official.models.list()] == ["target"]
    assert official.models.retrieve("target").id == "target"
    with pytest.raises(openai.NotFoundError, match="model is 'gpt-9'"):
        official.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="temperature is 200"):
        official.completions.create(model="target", prompt="x", temperature=200)


def test_choices_and_seeds(client: httpx.Client, engine: Engine) -> None:
    params = {"n": 3, "seed": 7, "temperature": 1.0}
    answer = chat(client, **params)
    native = {**NATIVE, "n": 3, "sampling_seed": 7, "temperature": 1.0}
    expected = [result["text"] for result in engine.generate(TEXT, native)]
    assert [c["message"]["content"] for c in answer["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == 36
    response = client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, **PARAMS, **params, "stream": True}
    )
    texts, roles = ["", "", ""], [0, 0, 0]
    for event in events_of(response.text):
        (choice,) = event["choices"]
        assert event["object"] == "chat.completion.chunk"
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert texts == expected
    assert roles == [1, 1, 1]


def test_a_stop_string_ends_a_chat(client: httpx.Client, engine: Engine) -> None:
    text = engine.generate(TEXT, NATIVE)["text"]
    stop = text[3:5]
    (choice,) = chat(client, stop=stop)["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)


def test_a_message_is_continued(client: httpx.Client, engine: Engine) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "I am "}]
    answer = chat(client, messages=begun, continue_final_message=True)
    expected = engine.generate(TEXT + "I am ", NATIVE)["text"]
    assert answer["choices"][0]["message"]["content"] == expected


def test_without_a_length_the_context_is_the_bound(engine: Engine) -> None:
    ids, sampling = engine.chat_prompt(MESSAGES)
    assert sampling.max_new_tokens == engine.limits.pool.context_length - len(ids)
    assert engine.chat_prompt(MESSAGES, {"max_new_tokens": 5})[1].max_new_tokens == 5
    long = [{"role": "user", "content": "x" * engine.limits.pool.context_length}]
    with pytest.raises(RequestError, match=r"the prompt has .* maximum context length is 16384"):
        engine.chat_prompt(long)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "developer", "content": "x"}]}, "no role developer"),
    ({"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens is 1 and"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0] is"),
    ({"messages": MESSAGES, "logprobs": 1}, "logprobs is 1; expected true or false"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs is 2 without logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; expected"),
    ({"messages": MESSAGES, "response_format": {"type": "yaml"}}, "response_format.type is 'yaml'"),
    ({"messages": MESSAGES, "chat_template_kwargs": 3}, "chat_template_kwargs is 3"),
    ({"messages": MESSAGES, "continue_final_message": True}, "is the user's; expected the assist"),
    (
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt and continue_final_message are true",
    ),
    ({"messages": MESSAGES, "max_tokens": 16384}, "max_tokens is 16384 after a prompt of"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_chat_is_a_400(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


LONG = "a" * 20_000
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{LONG}"}}'}}


def test_a_prompt_beyond_the_context_has_openais_code(official: openai.OpenAI) -> None:
    """Gateways and agents choose another model, or a shorter prompt, by it."""
    long = [{"role": "user", "content": "y " * 20_000}]
    calls: tuple[Any, ...] = (
        lambda: official.chat.completions.create(model="default", messages=long),
        lambda: official.completions.create(model="default", prompt="y " * 20_000),
        lambda: official.responses.create(model="default", input="y " * 20_000),
        lambda: official.completions.create(model="default", prompt="y", max_tokens=99_999),
    )
    for call in calls:
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 16384"
        ) as found:
            call()
        assert found.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": LONG}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": MESSAGES, "chat_template_kwargs": {"x": [LONG]}},
        {"messages": [{"role": "user", "content": ""}] * 20_000},
    ],
)
def test_whatever_makes_a_prompt_long_counts(body: dict[str, Any]) -> None:
    """So that it is rendered and tokenized off the event loop."""
    assert parse_chat(body).num_chars > INLINE_CHARS
    assert parse_chat({"messages": MESSAGES}).num_chars < 100


@pytest.mark.parametrize("name", sorted(NEUTRAL_CHAT))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    body = {"messages": MESSAGES}
    for value in (*NEUTRAL_CHAT[name], None):
        parse_chat({**body, name: value})
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        parse_chat({**body, name: 17})
    assert name not in CHAT_FIELDS


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "model": "gpt-9"}
    assert client.post("/v1/chat/completions", json=body).status_code == 404


def test_the_bundled_pair_has_a_plain_template() -> None:
    from jspec.engine.weights.loading import BUNDLED
    from jspec.text.template.chat_templates import ChatTemplates

    plain = ChatTemplates.find(BUNDLED / "target", named=None)
    assert plain is not None
    assert plain.render([*MESSAGES, {"role": "assistant", "content": "x"}]) == "Be brief.\nHi\nx"


def test_the_bundled_template_shows_tools_and_its_calls_can_be_parsed() -> None:
    from jspec.engine.weights.loading import BUNDLED
    from jspec.text.template.chat_templates import ChatTemplates

    plain = ChatTemplates.find(BUNDLED / "target", named=None)
    assert plain is not None
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}, "id": "c", "type": "function"}
    said: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    text = plain.render(said, tools=[tool])
    first, *rest = text.split("\n")
    assert json.loads(first.removeprefix("# tool ")) == tool["function"]
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert rest == ["Be brief.", "Hi", written, "3"]
    parser = CALL_FORMATS["qwen"].parser(["add"])
    events = [*parser.push(written), *parser.flush()]
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["add"]
