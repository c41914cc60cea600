"""POST /v1/messages with Anthropic's own client: text, stream, tools, thinking, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx2
import pytest

from jspec.errors import RequestError
from jspec.server.anthropic.schema import MESSAGE_FIELDS, NEUTRAL_MESSAGE, parse_message
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .helpers import ask as call
from .speaking import ARGUMENTS, CALLS, SPECIAL, TEMPLATES, WEATHER

TOOL = {
    "name": WEATHER["function"]["name"],
    "description": "Tell the weather.",
    "input_schema": WEATHER["function"]["parameters"],
}
SAID = "<think>\nHm.\n</think>\n\nLet me see." + CALLS["qwen"]
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]

Client = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Call a method of `client.messages`; return its answer and the prompt that the model saw."""
    directory = tmp_path_factory.mktemp("text") / "qwen"
    write_text_files(directory, special=SPECIAL["qwen"], template=TEMPLATES["qwen"])
    engine = SpeakingEngine(directory)
    with engine:
        app = create_app(engine, ServerArgs(tool_call_parser="qwen", reasoning_parser="qwen3"))

        async def run(says: str, method: str, body: dict[str, Any]) -> Any:
            engine.says = says
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
            async with (
                http,
                anthropic.AsyncAnthropic(
                    base_url="http://test",
                    api_key="-",
                    http_client=cast(Any, http),
                    max_retries=0,
                ) as client,
            ):
                if method == "stream":
                    async with client.messages.stream(**body) as stream:
                        events = [event async for event in stream]
                        return events, await stream.get_final_message()
                answer = await getattr(client.messages, method)(**body)
                return [event async for event in answer] if body.get("stream") else answer

        def ask(says: str, method: str = "create", **body: Any) -> Any:
            given = {"model": "default", "messages": ASK, "max_tokens": 400, **body}
            if method == "count_tokens":
                del given["max_tokens"]
            answer = asyncio.run(run(says, method, given))
            return answer, engine.prompts[-1] if engine.prompts else ""

        yield ask


def test_a_text_is_answered(ask: Client) -> None:
    answer, prompt = ask("Hello é.", system=[{"type": "text", "text": "Be brief."}])
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello é.")]
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?")
    assert answer.usage.output_tokens == len("Hello é.".encode()) + 1
    counted, _ = ask("", "count_tokens", system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_an_answer_says_why_it_ended(ask: Client) -> None:
    cut, _ = ask("Hello.", max_tokens=4)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hell")
    stopped, _ = ask("Hello. And more.", stop_sequences=["And"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "And")
    assert stopped.content[0].text == "Hello. "


def test_blocks_come_back_as_blocks_and_go_in_again(ask: Client) -> None:
    answer, _ = ask(SAID, tools=[TOOL])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    thought, text, call = answer.content
    assert (thought.thinking, text.text, answer.stop_reason) == ("Hm.", "Let me see.", "tool_use")
    assert (call.name, call.input) == ("get_weather", json.loads(ARGUMENTS))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    again = [
        *ASK,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    final, prompt = ask("Warm.", messages=again, tools=[TOOL])
    assert final.content[0].text == "Warm."
    for part in ("Let me see.<tool_call>", ARGUMENTS, "tool\n21 degrees", "user\nSo?"):
        assert part in prompt


def test_a_stream_says_what_the_whole_answer_says(ask: Client) -> None:
    whole, _ = ask(SAID, tools=[TOOL])
    (events, final), _ = ask(SAID, "stream", tools=[TOOL])
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    thought, text, call = whole.content
    assert final.content[0].thinking == thought.thinking
    assert (final.content[1].text, final.content[2].input) == (text.text, call.input)
    assert (final.stop_reason, final.usage.output_tokens) == (
        "tool_use",
        whole.usage.output_tokens,
    )


def test_a_last_message_of_the_assistant_is_continued(ask: Client) -> None:
    answer, prompt = ask("blue.", messages=[*ASK, {"role": "assistant", "content": "The sky is "}])
    assert prompt.endswith("assistant\nThe sky is ")
    assert answer.content[0].text == "blue."


def test_a_schema_and_choices_of_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"messages": ASK, "max_tokens": 5}
    form = {"format": {"type": "json_schema", "schema": schema}}
    call = parse_message({**body, "output_config": form})
    assert json.loads(call.sampling.json_schema or "") == schema
    forced = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    use = parse_message({**body, "tools": [TOOL], "tool_choice": forced}).tools
    assert (use.only, use.is_forced, use.parallel) == ("get_weather", True, False)
    assert parse_message({**body, "tools": [TOOL], "tool_choice": {"type": "any"}}).tools.is_forced
    quiet = parse_message({**body, "thinking": {"type": "disabled"}})
    assert quiet.template_options["variables"] == {"enable_thinking": False}
    bounded = parse_message({**body, "thinking": {"type": "enabled", "budget_tokens": 9}})
    assert bounded.template_options["variables"] == {"enable_thinking": True}
    assert bounded.sampling.max_thinking_tokens == 9


def test_reasoning_in_channels_has_no_budget(tmp_path: Path) -> None:
    """Agents send one with every request; over the other APIs it is refused."""
    write_text_files(tmp_path, special=SPECIAL["gpt-oss"], template=TEMPLATES["gpt-oss"])
    body = {"messages": ASK, "max_tokens": 40}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 9}}
    with SpeakingEngine(tmp_path, says="<|channel|>final<|message|>Warm.") as engine:
        app = create_app(engine, ServerArgs(reasoning_parser="gpt-oss"))
        answer = call(app, "POST", "/v1/messages", json={**body, **thinking})
        assert answer.json()["content"] == [{"type": "text", "text": "Warm."}]
        refused = call(
            app, "POST", "/v1/chat/completions", json={**body, "thinking_token_budget": 9}
        )
    assert refused.status_code == 400
    assert "the model reasons in channels" in refused.json()["error"]["message"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"messages": []}, r"messages is \[\]; expected a list of messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role is 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\] is {'type'"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\].type is 'web_sear"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; expected auto, any"),
    ({"thinking": {"type": "much"}}, "thinking.type is 'much'; expected enabled"),
    ({"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking.budget_tokens is -9"),
    ({"extra_body": {"temperature": -1}}, "temperature is -1"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"extra_body": {"output_config": {"format": {"type": "x"}}}}, "output_config.format.type is"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_message_is_a_400_in_anthropics_form(
    ask: Client, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        ask("x", **body)
    said = cast(Any, caught.value.body)
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")


def test_an_unknown_model_is_a_404(ask: Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model is 'claude'"):
        ask("x", model="claude")


def test_a_missing_length_is_named() -> None:
    with pytest.raises(RequestError, match="max_tokens is missing"):
        parse_message({"messages": ASK})


@pytest.mark.parametrize("name", sorted(NEUTRAL_MESSAGE))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    body = {"messages": ASK, "max_tokens": 5}
    for value in (*NEUTRAL_MESSAGE[name], None):
        parse_message({**body, name: value})
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        parse_message({**body, name: 17})
    assert name not in MESSAGE_FIELDS
