"""POST /v1/responses with OpenAI's own client: text, stream, calls of tools, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from jspec.errors import RequestError
from jspec.server.openai.responses_schema import NEUTRAL_RESPONSE, RESPONSE_FIELDS, parse_response
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .speaking import ARGUMENTS, CALLS, SPECIAL, TEMPLATES, WEATHER
from .speaking_client import Speaker

FLAT = {"type": "function", **WEATHER["function"]}
SAID = "<think>\nHm.\n</think>\n\nLet me see." + CALLS["qwen"]


@pytest.fixture(scope="module")
def respond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    directory = tmp_path_factory.mktemp("text") / "qwen"
    write_text_files(directory, special=SPECIAL["qwen"], template=TEMPLATES["qwen"])
    engine = SpeakingEngine(directory)
    with engine:
        args = ServerArgs(tool_call_parser="qwen", reasoning_parser="qwen3")
        speaker = Speaker(engine, args)

        def respond(says: str, **body: Any) -> Any:
            answer = speaker.run(says, "responses", **{"input": "Hi", **body})
            return answer, engine.prompts[-1]

        yield respond


def test_a_text_is_answered(respond: Callable[..., Any]) -> None:
    answer, prompt = respond("Hello é.", instructions="Be brief.", max_output_tokens=50)
    assert (answer.output_text, answer.status, answer.object) == (
        "Hello é.",
        "completed",
        "response",
    )
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert answer.usage.output_tokens == len("Hello é.".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.instructions == "Be brief."
    cut, _ = respond("Hello.", max_output_tokens=4)
    assert (cut.status, cut.output_text) == ("incomplete", "Hell")
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_items_come_back_as_items_and_go_in_again(respond: Callable[..., Any]) -> None:
    answer, _ = respond(SAID, tools=[FLAT])
    Response.model_validate(answer.to_dict())  # its own schema, which the client does not check
    thought, message, call = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert thought.content[0].text == "Hm."
    assert message.content[0].text == answer.output_text == "Let me see."
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    again = [*items, *(item.model_dump(mode="json") for item in answer.output), result]
    final, prompt = respond("Warm.", input=again, tools=[FLAT])
    assert final.output_text == "Warm."
    for part in ("user\nWeather?", "Let me see.<tool_call>", ARGUMENTS, "tool\n21 degrees"):
        assert part in prompt


def test_a_stream_tells_the_same(respond: Callable[..., Any]) -> None:
    events, _ = respond(SAID, tools=[FLAT], stream=True)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def joined(kind: str) -> str:
        return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")

    assert joined("output_text") == "Let me see."
    assert joined("reasoning_text") == "Hm."
    assert joined("function_call_arguments") == ARGUMENTS
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert added[1].content == []
    assert [item.id for item in added] == [item.id for item in done]
    assert [item.status for item in done] == ["completed"] * 3
    assert events[-1].response.output_text == "Let me see."
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == len("Hm.")
    assert [item.id for item in events[-1].response.output] == [item.id for item in done]


def test_a_schema_is_asked_for_in_its_own_words(respond: Callable[..., Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer, _ = respond('{"a": 1}', text={"format": form})
    assert answer.output_text == '{"a": 1}'
    call = parse_response({"input": "Hi", "text": {"format": form}})
    assert json.loads(call.chat.sampling.json_schema or "") == schema
    assert parse_response({"input": "Hi", "text": {}}).chat.sampling.grammar is None


def test_store_is_taken_and_the_answer_says_that_nothing_is_stored(
    respond: Callable[..., Any],
) -> None:
    for store in (True, False, None):
        assert respond("Hi", store=store)[0].store is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id is 'resp_1', which is"):
        respond("Hi", previous_response_id="resp_1")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type is 'yaml'; expected text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is null; expected a JSON"),
    ({"input": 3}, "input is 3; expected text or a list of items"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type is 'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "expected a part of typ"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "call_id is null; expected text"),
    ({"max_output_tokens": -1}, "max_output_tokens is -1"),
    ({"temperature": "x"}, "temperature is 'x'"),
    ({"reasoning": {"summary": "detailed"}}, "summary is 'detailed', which is not implemented"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort is 'much'; expected one of none, mini"),
    ({"safety_identifier": 5}, "safety_identifier is 5; expected text"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type is 'web_search'; expected 'function'"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].function.name is null"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_response_is_a_400(
    respond: Callable[..., Any], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        respond("x", **body)


@pytest.mark.parametrize("name", sorted(NEUTRAL_RESPONSE))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    for value in (*NEUTRAL_RESPONSE[name], None):
        parse_response({"input": "Hi", name: value})
    with pytest.raises(RequestError, match=f"{name} is .*not implemented"):
        parse_response({"input": "Hi", name: 17})
    assert name not in RESPONSE_FIELDS
