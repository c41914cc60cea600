"""Tools and reasoning over HTTP: OpenAI's own client, and an engine that answers with given
text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jspec.errors import ConfigError
from jspec.messages.grammar import GrammarKind, ReasoningMarks
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .speaking import ARGUMENTS, CALLS, CLOCK, SPECIAL, TEMPLATES, WEATHER
from .speaking_client import ASK, Speaker
from .test_flags import parse

REASONING = {"qwen": "qwen3", "glm45": "qwen3", "gpt-oss": "gpt-oss"}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Speaker]]:
    """Return the Speaker for a format, made once; `reasons` turns on its --reasoning-parser."""
    engines: dict[str, SpeakingEngine] = {}

    def make(name: str, *, reasons: bool = False, **args: Any) -> Speaker:
        if name not in engines:
            directory = tmp_path_factory.mktemp("text") / name
            write_text_files(directory, special=SPECIAL[name], template=TEMPLATES[name])
            engines[name] = SpeakingEngine(directory)
        reasoning = REASONING.get(name) if reasons else None
        args = {"tool_call_parser": name, "reasoning_parser": reasoning, **args}
        return Speaker(engines[name], ServerArgs(**args))

    yield make
    for engine in engines.values():
        engine.shutdown()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_comes_back_in_openais_shape(speaker: Callable[..., Speaker], name: str) -> None:
    speak = speaker(name)
    (choice,) = speak(CALLS[name], tools=[WEATHER, CLOCK]).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris é"}
    assert "The weather of a city" in speak.engine.prompts[-1] or name == "gpt-oss"
    assert "get_weather" in speak.engine.prompts[-1]
    if name == "mistral":
        assert len(call.id) == 9
        assert call.id.isalnum()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_is_streamed_in_pieces(speaker: Callable[..., Speaker], name: str) -> None:
    """While it is written. A slow reader gets what was written meanwhile in one piece, so on a busy
    machine it is called again."""
    counts = (check_pieces(speaker(name), name) for _ in range(20))
    assert any(count > 1 for count in counts)


def check_pieces(speak: Speaker, name: str) -> int:
    """Return the number of pieces of a call."""
    chunks = speak(CALLS[name], tools=[WEATHER], stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
    assert len([piece.id for piece in pieces if piece.id]) == 1
    assert pieces[0].function.name
    assert "".join(piece.function.arguments for piece in pieces) == ARGUMENTS
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]
    return len(pieces)


def test_text_and_two_calls(speaker: Callable[..., Speaker]) -> None:
    second = '\n<tool_call>\n{"name": "clock"}\n</tool_call>'
    said = "Let me see." + CALLS["qwen"] + second
    speak, tools = speaker("qwen"), [WEATHER, CLOCK]
    message = speak(said, tools=tools).choices[0].message
    assert message.content == "Let me see."
    calls = message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "clock"]
    assert calls[0].id != calls[1].id
    chunks = speak(said, tools=tools, stream=True)
    pieces = [p for chunk in chunks for p in chunk.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0, 1}
    one = speak(said, tools=tools, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["get_weather"]


def test_what_is_no_call_is_content(speaker: Callable[..., Speaker]) -> None:
    speak = speaker("qwen")
    for said in ("Sunny.", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'):
        (choice,) = speak(said, tools=[WEATHER]).choices
        assert (choice.message.content, choice.finish_reason) == (said, "stop")
        assert choice.message.tool_calls is None
        chunks = speak(said, tools=[WEATHER], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
    # Without tools, or with tool_choice none, nothing is looked for and the model sees no tools.
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert speak(CALLS["qwen"], **more).choices[0].message.content == CALLS["qwen"]
        assert "get_weather" not in speak.engine.prompts[-1]


def test_an_answer_that_is_cut_says_length(speaker: Callable[..., Speaker]) -> None:
    (choice,) = speaker("llama3")(CALLS["llama3"], tools=[WEATHER], max_tokens=50).choices
    assert choice.finish_reason == "length"
    assert ARGUMENTS.startswith(choice.message.tool_calls[0].function.arguments)


def test_log_probabilities_or_usage_do_not_disturb(speaker: Callable[..., Speaker]) -> None:
    chunks = speaker("qwen")(
        CALLS["qwen"], tools=[WEATHER], stream=True, stream_options={"include_usage": True}, n=2
    )
    assert chunks[-1].usage.completion_tokens == 2 * (len(CALLS["qwen"].encode()) + 1)
    by_choice = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        for piece in choice.delta.tool_calls or ():
            by_choice[choice.index] += piece.function.arguments
    assert by_choice == {0: ARGUMENTS, 1: ARGUMENTS}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_result_of_a_tool_goes_back(speaker: Callable[..., Speaker], name: str) -> None:
    speak = speaker(name)
    first = speak(CALLS[name], tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 degrees"}
    messages = [*ASK, first.model_dump(), result]
    final = "<|channel|>final<|message|>Warm." if name == "gpt-oss" else "Warm."
    (choice,) = speak(final, messages=messages, tools=[WEATHER]).choices
    assert (choice.message.content, choice.finish_reason) == ("Warm.", "stop")
    prompt = speak.engine.prompts[-1]
    assert "21 degrees" in prompt
    assert ARGUMENTS in prompt or name == "mistral"  # an object again, not text in text


THOUGHTS = {
    "qwen": "<think>\nIt is é\n</think>\n\nWarm.",
    "gpt-oss": "<|channel|>analysis<|message|>It is é<|end|><|start|>assistant<|channel|>final"
    "<|message|>Warm.",
}


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_reasoning_is_split_off(speaker: Callable[..., Speaker], name: str) -> None:
    speak, said = speaker(name, reasons=True), THOUGHTS[name]
    message = speak(said).choices[0].message
    assert (message.content, message.reasoning_content) == ("Warm.", "It is é")
    deltas = [chunk.choices[0].delta for chunk in speak(said, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "It is é"
    assert "".join(delta.content or "" for delta in deltas) == "Warm."
    whole = speak(said, extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == (said if name == "qwen" else "It is éWarm.")
    assert "reasoning_content" not in whole.model_dump()


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_tokens_of_reasoning_are_counted(speaker: Callable[..., Speaker], name: str) -> None:
    """A token is a byte here; the marks and the blanks around them are not reasoning."""
    speak, said, count = speaker(name, reasons=True), THOUGHTS[name], len("It is é".encode())
    answer = speak(said, n=2, extra_body={"return_meta_info": True})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * count
    assert answer.usage.reasoning_tokens == 2 * count  # SGLang's place for it
    assert answer.choices[1].meta_info["reasoning_tokens"] == count
    chunks = speak(said, stream=True, stream_options={"include_usage": True})
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == count
    plain = speaker(name)(said).usage
    assert (plain.completion_tokens_details, plain.reasoning_tokens) == (None, 0)


def test_how_much_to_reason_is_the_templates_variable(
    speaker: Callable[..., Speaker], tmp_path: Path
) -> None:
    template = "Reasoning: {{ reasoning_effort or 'medium' }}. {{ messages[0].content }}"
    write_text_files(tmp_path / "effort", template=template)
    engine = SpeakingEngine(tmp_path / "effort")
    with engine:
        speak = Speaker(engine, ServerArgs())
        speak("x", reasoning_effort="low")
        assert engine.prompts[-1] == "Reasoning: low. Weather?"
        speak.run("x", "responses", input="Hi", reasoning={"effort": "high", "summary": "auto"})
        assert engine.prompts[-1] == "Reasoning: high. Hi"
        with pytest.raises(openai.BadRequestError, match="reasoning_effort is 'much'; expected on"):
            speak("x", reasoning_effort="much")
    with pytest.raises(openai.BadRequestError, match=r"reasoning_effort is 'low', and the chat te"):
        speaker("qwen")("x", reasoning_effort="low")


def test_a_template_may_have_ended_the_reasoning(speaker: Callable[..., Speaker]) -> None:
    speak = speaker("qwen", reasoning_parser="deepseek-r1")
    assert speak("Hm.</think>Yes").choices[0].message.reasoning_content == "Hm."
    kwargs = {"chat_template_kwargs": {"thinking": False}}
    message = speak("Yes", extra_body=kwargs).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes", None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": 3}, "tools is 3; expected a list"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\] is .*expected .type: 'function'"),
    ({"tools": [{"type": "x", "function": {"name": "f"}}]}, r"tools\[0\].type is 'x'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name is 'a b'; expected"),
    ({"tools": [CLOCK, CLOCK]}, r"tools\[1\].function.name is 'clock'; expected each name once"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice is 'any'; expected none, auto"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice names 'x'; expected one of the tools: clock",
    ),
    ({"tool_choice": "required"}, "tool_choice is 'required' without tools"),
    ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls is 1; expected true"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "parameters is .*expected a JSON schema of an object",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
            ]
        },
        "parameters.type is 'string'; expected 'object'",
    ),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_tool_is_a_400(
    speaker: Callable[..., Speaker], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        speaker("qwen")("x", **body)


def test_tools_need_a_parser_and_a_template(
    speaker: Callable[..., Speaker], tmp_path: Path
) -> None:
    speak = speaker("qwen", tool_call_parser=None)
    with pytest.raises(openai.BadRequestError, match="without --tool-call-parser; expected one of"):
        speak("x", tools=[CLOCK])
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_text_files(tmp_path / "plain", template=plain)
    engine = SpeakingEngine(tmp_path / "plain")
    with engine:
        speak = Speaker(engine, ServerArgs(tool_call_parser="qwen"))
        with pytest.raises(openai.BadRequestError, match="never names `tools`"):
            speak("x", tools=[CLOCK])


NAMED = {"type": "function", "function": {"name": "get_weather"}}
LISTED = f'[{{"name":"get_weather","arguments":{ARGUMENTS}}}]'


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_is_a_grammar_and_comes_back_as_a_call(
    speaker: Callable[..., Speaker], choice: object
) -> None:
    speak = speaker("qwen", tool_call_parser=None)
    body: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": choice}
    (answer,) = speak(LISTED, **body).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    source = speak.engine.grammars[-1]
    assert source is not None
    assert source.kind is GrammarKind.JSON_SCHEMA
    names = [item["properties"]["name"]["const"] for item in _items(source.text)]
    assert names == (["get_weather", "clock"] if choice == "required" else ["get_weather"])
    assert "clock" in speak.engine.prompts[-1]
    chunks = speak(LISTED, stream=True, **body)
    pieces = [p for chunk in chunks for p in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def _items(schema: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(schema)["items"]["anyOf"]
    return found


def test_a_call_that_must_be_leaves_no_room_for_anything_else(
    speaker: Callable[..., Speaker],
) -> None:
    forced: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required"}
    json_object = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="tool_choice is 'required' with json_sch"):
        speaker("qwen")("x", response_format=json_object, **forced)
    thinks = speaker("qwen", reasoning_parser="deepseek-r1")
    whole = {"separate_reasoning": False}
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser deepseek-r1: the answer"):
        thinks("x", extra_body=whole, **forced)
    channels = speaker("gpt-oss", reasons=True)
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser gpt-oss: the answer"):
        channels("x", **forced)
    ended = {"chat_template_kwargs": {"thinking": False}}
    (answer,) = thinks('[{"name":"clock","arguments":{}}]', extra_body=ended, **forced).choices
    assert answer.message.tool_calls[0].function.name == "clock"
    assert thinks.engine.reasoning[-1] is None


@pytest.mark.parametrize(
    ("parser", "marks"),
    [
        ("deepseek-r1", ReasoningMarks("</think>")),
        ("qwen3", ReasoningMarks("</think>", open="<think>")),
    ],
)
def test_a_grammar_begins_after_the_reasoning(
    speaker: Callable[..., Speaker], parser: str, marks: ReasoningMarks
) -> None:
    speak = speaker("qwen", reasoning_parser=parser)
    answered = {"response_format": {"type": "json_object"}}
    (answer,) = speak('<think>Why?</think>\n{"a": 1}', **answered).choices
    assert (answer.message.reasoning_content, answer.message.content) == ("Why?", '{"a": 1}')
    assert speak.engine.grammars[-1] is not None
    assert speak.engine.reasoning[-1] == marks
    ended = {"chat_template_kwargs": {"thinking": False}}
    (answer,) = speak('{"a": 1}', extra_body=ended, **answered).choices
    assert answer.message.content == '{"a": 1}'
    assert speak.engine.reasoning[-1:] == [None]
    forced: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required"}
    said = '<think>Now.</think>[{"name":"clock","arguments":{}}]'
    (answer,) = speak(said, **forced).choices
    assert answer.message.reasoning_content == "Now."
    assert answer.message.tool_calls[0].function.name == "clock"
    assert answer.message.content is None
    assert speak.engine.reasoning[-1] == marks


def test_the_flags_know_the_peers_names() -> None:
    args = parse("--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1").server
    assert (args.tool_call_parser, args.reasoning_parser) == ("qwen", "deepseek-r1")
    args = parse("--tool-call-parser", "deepseek_v31", "--reasoning-parser", "deepseek-v3").server
    assert (args.tool_call_parser, args.reasoning_parser) == ("deepseekv31", "qwen3")
    with pytest.raises(ConfigError, match="tool_call_parser is 'x'; expected one of llama3, qwen"):
        parse("--tool-call-parser", "x")
    with pytest.raises(ConfigError, match="expected 'gpt-oss' for both"):
        parse("--tool-call-parser", "gpt-oss", "--reasoning-parser", "qwen3")


@pytest.mark.parametrize(
    ("name", "said", "content", "reasoning"),
    [
        ("llama3", "hello<|eot_id|> world", "hello world", None),
        ("mistral", "hello[INST] world", "hello world", None),
        ("deepseekv3", "hello<｜User｜> world", "hello world", None),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>H<|stray|>m.<|end|><|start|>assistant<|channel|>final"
            "<|message|>hello<|stray|> world",
            "hello world",
            "Hm.",
        ),
        (
            "glm45",
            "<think>H<|im_start|>m.</think>\n\nhello<|im_start|> world",
            "hello world",
            "Hm.",
        ),
    ],
)
def test_special_tokens_that_are_no_marks_of_the_parser_are_left_out(
    speaker: Callable[..., Speaker], name: str, said: str, content: str, reasoning: str | None
) -> None:
    speak = speaker(name, reasons=True)
    body: dict[str, Any] = {"tools": [WEATHER]}
    (choice,) = (answer := speak(said, **body)).choices
    assert choice.message.content == content
    found = getattr(choice.message, "reasoning_content", None)
    assert found == reasoning
    if reasoning is not None:
        assert answer.usage.reasoning_tokens == len(reasoning) + 1  # and the one without text
    deltas = [chunk.choices[0].delta for chunk in speak(said, stream=True, **body)]
    assert "".join(delta.content or "" for delta in deltas) == content
    everything = {"extra_body": {"skip_special_tokens": False}}
    shown = speak(said, **body, **everything).choices[0].message.content
    assert len(shown) > len(content)
    (call,) = speak("<|stray|>" * (name == "gpt-oss") + CALLS[name], **body).choices
    assert call.finish_reason == "tool_calls"
    assert json.loads(call.message.tool_calls[0].function.arguments) == {"city": "Paris é"}
