"""Parsers of answers: each format, malformed calls, and laws for any text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.messages.grammar import ReasoningMarks
from jspec.text.calls.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    join,
)
from jspec.text.calls.registry import AnswerFormat

# A parser that needs no schemas takes the names alone.
SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            **{name: {"type": kind} for name, kind in (("x", "integer"), ("on", "boolean"))},
            **{"s": {"type": "string"}, "any": {"anyOf": [{"type": "array"}, {"type": "null"}]}},
            "id": {"type": ["string", "null"]},
        },
    },
    "get_weather": None,
}
LLAMA, QWEN = AnswerFormat(calls="llama3"), AnswerFormat(calls="qwen", reasoning="qwen3")
MISTRAL = AnswerFormat(calls="mistral")
GPT_OSS = AnswerFormat(calls="gpt-oss", reasoning="gpt-oss")
R1 = AnswerFormat(reasoning="deepseek-r1")
DEEPSEEK = AnswerFormat(calls="deepseekv3")
DEEPSEEK_31 = AnswerFormat(calls="deepseekv31", reasoning="qwen3")
DEEPSEEK_R1 = AnswerFormat(calls="deepseekv3", reasoning="deepseek-r1")
DSML = AnswerFormat(calls="deepseekv32", reasoning="qwen3")
KIMI = AnswerFormat(calls="kimi_k2")
GEMMA = AnswerFormat(calls="gemma4", reasoning="gemma4")
MAGISTRAL = AnswerFormat(calls="mistral", reasoning="mistral")
FORCED = AnswerFormat()
MINIMAX = AnswerFormat(calls="minimax-m2")
CODER, GLM = AnswerFormat(calls="qwen3_coder"), AnswerFormat(calls="glm45", reasoning="qwen3")
STYLES = {
    "llama3": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gpt-oss": GPT_OSS,
    "deepseek-r1": R1,
    "forced": FORCED,
    "qwen3_coder": CODER,
    "glm45": GLM,
    "minimax-m2": MINIMAX,
    "deepseekv3": DEEPSEEK,
    "deepseekv31": DEEPSEEK_31,
    "deepseekv32": DSML,
    "deepseekv3 and r1": DEEPSEEK_R1,
    "kimi_k2": KIMI,
    "gemma4": GEMMA,
    "mistral, reasoning": MAGISTRAL,
}


def parser_of(style: AnswerFormat, **options: Any) -> AnswerParser:
    names = () if style is R1 else SCHEMAS
    options = {"splits_reasoning": True, "is_forced": style is FORCED, **options}
    return style.parser(names, **options)


def read(style: AnswerFormat, pieces: Sequence[str], **options: Any) -> list[Event]:
    parser = parser_of(style, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return join([*events, *parser.flush()])


def short(events: Sequence[Event]) -> list[str]:
    """Write events as text: 'content', '?reasoning', 'name({...})' with the id after #."""
    said: list[str] = []
    for event in events:
        if isinstance(event, CallBegin):
            said.append(event.name + (f"#{event.call_id}" if event.call_id else "") + "(")
        elif isinstance(event, CallArguments):
            said[-1] += event.text
        else:
            said.append(("?" if isinstance(event, Reasoning) else "") + event.text)
    return said


CALL = '{"name": "f", "arguments": {"x": 1}}'
TWO = '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Pa{ris"}}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
DS_ALL, DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
DS_BEGIN, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
DS_END, DS_ALL_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DSML_ALL, DSML_ALL_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
DSML_F, DSML_END = '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"
DSML_X = '<｜DSML｜parameter name="x" string="false">'
DSML_S, DSML_VALUE_END = '<｜DSML｜parameter name="s" string="true">', "</｜DSML｜parameter>"
KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_BEGIN, KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_SEP = "<|tool_call_argument_begin|>"
GEMMA_CALL = '<|tool_call>call:f{x:1,s:<|"|>a "b" <|<|"|>}<tool_call|>'
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CASES: list[tuple[AnswerFormat, str, list[str]]] = [
    (QWEN, "Hello < world", ["Hello < world"]),
    (QWEN, f"So:\n<tool_call>\n{CALL}\n</tool_call>", ["So:\n", 'f({"x": 1}']),
    (
        QWEN,
        f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        ['f({"x": 1}', 'f({"x": 1}'],
    ),
    (QWEN, '<tool_call>{"arguments": {"x": [1]}, "name": "f"}', ['f({"x": [1]}']),
    (QWEN, '<tool_call>{"id": "a1", "name": "f"}</tool_call>', ["f#a1({}"]),
    (QWEN, '<think>\nWhy?\n</think>\n\n<tool_call>{"name": "f"}</tool_call>', ["?Why?", "f({}"]),
    (QWEN, f"<tool_call>{CALL}</tool_call> done", ['f({"x": 1}', " done"]),
    (GEMMA, GEMMA_CALL, ['f({"x":1,"s":"a \\"b\\" <|"}']),
    (
        GEMMA,
        f"<|channel>thought\nHm.\n<channel|>\n{GEMMA_CALL}\nok",
        [*("?Hm.", 'f({"x":1,"s":"a \\"b\\" <|"}', "\nok")],
    ),
    (GEMMA, "<|channel>thought\n<channel|>Hello", ["Hello"]),
    (GEMMA, "<|channel>Hm<channel|>Hello", ["?Hm", "Hello"]),
    (
        GEMMA,
        'a<|tool_call>call: get_weather{any:[{},[],-1.5e3, null],<|"|>k y<|"|> : {b:true}}',
        ["a", 'get_weather({"any":[{},[],-1.5e3,null],"k y":{"b":true}}'],
    ),
    (
        GEMMA,
        f"{GEMMA_CALL}<|tool_call>call:get_weather{{}}<tool_call|>",
        [*('f({"x":1,"s":"a \\"b\\" <|"}', "get_weather({}")],
    ),
    (GEMMA, "<|tool_call>call:f{x:1,}", ['f({"x":1,', "}"]),
    (GEMMA, "<|tool_call>call:f{x:}", ['f({"x":', "}"]),
    (MAGISTRAL, '[THINK]Hm.[/THINK]Yes[TOOL_CALLS]f[ARGS]{"x": 1}', ["?Hm.", "Yes", 'f({"x": 1}']),
    (
        CODER,
        "Ok\n<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n<parameter=s>\na\n"
        '"b"</para\n\n</parameter>\n</function>\n</tool_call>\n',
        ["Ok\n", 'f({"x": 3, "s": "a\\n\\"b\\"</para\\n"}'],
    ),
    (
        CODER,
        "<tool_call><function=f><parameter=on>True</parameter><parameter=s>7</parameter>"
        "<parameter=any>[1]</parameter><parameter=id>12</parameter></function></tool_call>"
        "<tool_call><function=get_weather></function></tool_call>",
        ['f({"on": true, "s": "7", "any": [1], "id": "12"}', "get_weather({}"],
    ),
    (
        CODER,
        "<tool_call><function=f><parameter=x>many</parameter></function></tool_call> done",
        ['f({"x": "many"}', " done"],
    ),
    (
        MINIMAX,
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">3</parameter>\n'
        '<parameter name="s">a < b</parameter>\n</invoke>\n<invoke name="get_weather">\n</invoke>\n'
        "</minimax:tool_call>\n",
        ['f({"x": 3, "s": "a < b"}', "get_weather({}"],
    ),
    (
        DSML,
        f"<think>Hm</think>Ok\n\n{DSML_ALL}\n{DSML_F}\n{DSML_X}3{DSML_VALUE_END}\n"
        f'{DSML_S}\n"a" </\n{DSML_VALUE_END}\n{DSML_END}\n'
        f'<｜DSML｜invoke name="get_weather">\n\n{DSML_END}\n{DSML_ALL_END}',
        ["?Hm", "Ok", 'f({"x": 3, "s": "\\n\\"a\\" </\\n"}', "get_weather({}"],
    ),
    (  # the attribute decides; the schema (of s) keeps a number as text, as does what is no JSON
        DSML,
        f"{DSML_ALL}{DSML_F}"
        + "".join(
            f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}{DSML_VALUE_END}'
            for name, is_text, value in [
                *(("x", "true", "3"), ("s", "false", "7"), ("on", "false", "yes")),
                *(("any", "false", '[{"a": null}]'), ("new", "false", "1.5")),
            ]
        )
        + f'<｜DSML｜parameter name="id">12{DSML_VALUE_END}{DSML_END}{DSML_ALL_END} done',
        [
            'f({"x": "3", "s": "7", "on": "yes", "any": [{"a": null}], "new": 1.5, "id": "12"}',
            " done",
        ],
    ),
    (
        GLM,
        "<think>Hm</think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>-2</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>é\n</arg_value>\n</tool_call>",
        ["?Hm", 'f({"x": -2, "s": "é"}'],
    ),
    (
        GLM,
        "<tool_call>get_weather</tool_call>\n<tool_call>f<arg_key>id</arg_key>"
        "<arg_value>null</arg_value></tool_call>",
        ["get_weather({}", 'f({"id": null}'],
    ),
    (
        DEEPSEEK,
        f'Ok.\n{DS_ALL}{DS}f\n```json\n{{"x": 1}}\n```{DS_END}\n{DS}get_weather\n'
        f"```json\n{{}}\n```{DS_END}{DS_ALL_END}\n",
        ["Ok.\n", 'f({"x": 1}', "get_weather({}"],
    ),
    (DEEPSEEK, f"{DS}f\n{{}}{DS_END} done ```", ["f({}", " done ```"]),
    (DEEPSEEK, f"{DS_ALL}{DS}f\n```\n{{}}\n```{DS_ALL_END}", ["f({}"]),
    (
        DEEPSEEK_31,
        f'Ok.{DS_ALL}{DS_BEGIN}f{DS_SEP}{{"x": 1}}{DS_END}{DS_BEGIN}get_weather{DS_SEP}{{}}'
        f"{DS_END}{DS_ALL_END}",
        ["Ok.", 'f({"x": 1}', "get_weather({}"],
    ),
    (
        DEEPSEEK_31,
        f"<think>Hm</think>\n{DS_ALL}\n{DS_BEGIN}f{DS_SEP}\n{{}}{DS_END}\n{DS_ALL_END} ```",
        ["?Hm", "f({}", " ```"],
    ),
    (DEEPSEEK_31, f"{DS_BEGIN}f{DS_SEP}{{}}``` done", ["f({}", "``` done"]),
    (
        KIMI,
        f'Ok.{KIMI_ALL}{KIMI_BEGIN}functions.f:0{KIMI_SEP}{{"x": 1}}{KIMI_END}'
        f"{KIMI_BEGIN}get_weather:12 {KIMI_SEP} {{}}{KIMI_END}{KIMI_ALL_END}",
        ["Ok.", 'f#functions.f:0({"x": 1}', "get_weather#get_weather:12({}"],
    ),
    (LLAMA, TWO, ["f({}", 'get_weather({"city": "Pa{ris"}']),
    (LLAMA, f"<|python_tag|>{TWO}", ["f({}", 'get_weather({"city": "Pa{ris"}']),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {}}', ["f({}"]),
    (LLAMA, 'Use <|python_tag|>{"name": "f", "parameters": {}}', ["Use ", "f({}"]),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", ['f({"x": 1}', 'f({"x": 1}']),
    (MISTRAL, 'a[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', ["a", 'f#abcdefghi({"x": 1}']),
    (MISTRAL, '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]get_weather{}', ['f({"x": 1}', "get_weather({}"]),
    (GPT_OSS, ANALYSIS + TO_F + '{"x": 1}<|call|>', ["?Hm.", 'f({"x": 1}']),
    (
        GPT_OSS,
        " to=functions.f<|channel|>commentary json<|message|>{}<|end|><|start|>assistant"
        "<|channel|>final<|message|>ok",
        ["f({}", "ok"],
    ),
    (GPT_OSS, ANALYSIS + "<|channel|>final<|message|>Yes <|return|>", ["?Hm.", "Yes "]),
    (GPT_OSS, "no channel at all", ["no channel at all"]),
    (R1, "Well\n\n</think>\n\nYes", ["?Well", "Yes"]),
    (R1, "<think>Well</think>Yes", ["?Well", "Yes"]),
    (
        DEEPSEEK_R1,
        f'<think>Hm, {DS}f\n{{}}{DS_END}</think>Ok. {DS_ALL}{DS}f\n```json\n{{"x": 1}}\n```{DS_END}'
        f"{DS_ALL_END}",
        [f"?Hm, {DS}f\n{{}}{DS_END}", "Ok. ", 'f({"x": 1}'],  # reasoning is no call
    ),
    (FORCED, f"[{CALL},\n {CALL}]", ['f({"x": 1}', 'f({"x": 1}']),
    (FORCED, CALL, ['f({"x": 1}']),
]
# Text that is no call comes back as written; of a call that started, the rest does.
MALFORMED: list[tuple[AnswerFormat, str, list[str] | None]] = [
    (QWEN, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None),
    (QWEN, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
    (QWEN, '<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
    (QWEN, '<tool_call>{"arguments": {"x": 1}}</tool_call>', None),
    (QWEN, "<tool_call>f(1)</tool_call>", None),
    (QWEN, '<tool_call>{"name": "f", "argum', None),
    (QWEN, "a <tool_", None),
    (QWEN, f"<tool_call>{{<tool_call>{CALL}", ["<tool_call>{", 'f({"x": 1}']),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"x": 01}} x', ['f({"x": 01', "}} x"]),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"x": "a', ['f({"x": "a']),
    (CODER, "<tool_call><function=nobody></function></tool_call>", None),
    (CODER, "<tool_call>\n<func", None),
    (CODER, "<tool_call>f()</tool_call>", None),
    (CODER, "<tool_call><function=f><parameter=x>1</parameter> x", ['f({"x": 1', " x"]),
    (CODER, "<tool_call><function=f><parameter=s>Par\n</pa", ['f({"s": "Par\\n</pa']),
    (CODER, "<tool_call><function=f><parameter=x>1", ['f({"x": 1']),
    (CODER, "<tool_call><function=f><para", ["f("]),
    (MINIMAX, '<minimax:tool_call><invoke name="nobody"></invoke></minimax:tool_call>', None),
    (MINIMAX, "a <minimax:tool", None),
    (
        MINIMAX,
        '<minimax:tool_call><invoke name="f"></invoke><invoke name="nobody"></invoke>',
        ["f({}", '<invoke name="nobody"></invoke>'],
    ),
    (GLM, "<tool_call>nobody<arg_key>x</arg_key>", None),
    (GLM, "<tool_call>f is a function", None),
    (GLM, "<tool_call>f", None),
    (DSML, f'a\n\n{DSML_ALL}\n<｜DSML｜invoke name="nobody">\n{DSML_END}', None),
    (DSML, "a\n\n<｜DSML｜function_ca", None),
    (DSML, f"\n\n{DSML_ALL} and", None),
    (DSML, f"a\n{DSML_ALL}{DSML_F}{DSML_S}cut", ["a\n", 'f({"s": "cut']),
    (DSML, f"{DSML_ALL}{DSML_F}{DSML_X}1{DSML_VALUE_END} so", ['f({"x": 1', " so"]),
    (DEEPSEEK, f"{DS_ALL}{DS}nobody\n```json\n{{}}\n```", None),
    (DEEPSEEK, f"{DS_ALL} and then", None),
    (DEEPSEEK, f"{DS}f\njson{{}}", None),
    (DEEPSEEK, f"{DS}f\n```js", None),
    (DEEPSEEK, f"{DS}f", None),
    (DEEPSEEK, "a <｜tool▁calls▁be", None),
    (DEEPSEEK, f'{DS}f\n{{"x": 01}} x', ['f({"x": 01', "} x"]),
    (DEEPSEEK_31, f"{DS_ALL}{DS_BEGIN}nobody{DS_SEP}{{}}{DS_END}", None),
    (DEEPSEEK_31, f"{DS_ALL}{DS}f\n```json\n{{}}\n```{DS_END}", None),
    (DEEPSEEK_31, f"{DS_BEGIN}get_weather<｜tool▁s", None),
    (DEEPSEEK_31, f"{DS_BEGIN}f{DS_SEP}f(1)", None),
    (DEEPSEEK_31, f'{DS_BEGIN}f{DS_SEP}{{"x": "a', ['f({"x": "a']),
    (KIMI, f"{KIMI_ALL}{KIMI_BEGIN}functions.nobody:0{KIMI_SEP}{{}}", None),
    (KIMI, f"{KIMI_BEGIN}functions.f{KIMI_SEP}{{}}{KIMI_END}", None),
    (KIMI, f"{KIMI_BEGIN}functions.f:1x", None),
    (KIMI, f"{KIMI_BEGIN}functions.f:1 {KIMI_SEP[:9]}", None),
    (LLAMA, '{"city": "Paris"}', None),
    (LLAMA, "<|python_tag|>search.call(query='x')", None),
    (LLAMA, 'Say {"name": "f", "parameters": {}}', None),
    (MISTRAL, '[TOOL_CALLS]nobody[ARGS]{"x": 1}', None),
    (MISTRAL, "[TOOL_CALLS] []", None),
    (MISTRAL, "[TOOL_CALLS]f(1)", None),
    (GEMMA, "<|tool_call>call:nobody{x:1}<tool_call|>", None),
    (GEMMA, "<|tool_call>f{x:1}<tool_call|>", None),
    (GPT_OSS, "<|channel|>other<|message|>x", None),
    (GPT_OSS, "<|channel|>commentary to=python<|message|>x", None),
    (GPT_OSS, TO_F + "x = 1", None),
    (GPT_OSS, "<|channel|>" + "a" * 400, None),
    (FORCED, "[1, 2]", None),
    (FORCED, "No.", None),
]


@pytest.mark.parametrize(("style", "text", "expected"), CASES, ids=[c[1] for c in CASES])
def test_an_answer_is_told_apart(style: AnswerFormat, text: str, expected: list[str]) -> None:
    assert short(read(style, [text])) == expected
    assert short(read(style, list(text))) == expected


@pytest.mark.parametrize(("style", "text", "expected"), MALFORMED, ids=[c[1] for c in MALFORMED])
def test_what_is_no_call_comes_back(
    style: AnswerFormat, text: str, expected: list[str] | None
) -> None:
    assert short(read(style, [text])) == ([text] if expected is None else expected)
    assert read(style, list(text)) == read(style, [text])


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]"),
        *("<function=f>", "<parameter=s>", "<parameter=x>", "</parameter>", "</function>"),
        *(DS_ALL, DS, DS[:21], DS_BEGIN, DS_SEP, DS_END, DS_ALL_END, "```json", "```"),
        *(DSML_ALL, f"\n\n{DSML_ALL}{DSML_F}", DSML_F, DSML_X, DSML_S, DSML_S[:12]),
        *(DSML_VALUE_END, DSML_END, DSML_ALL_END, "\n\n"),
        *(KIMI_ALL, KIMI_BEGIN, "functions.f:", "1", KIMI_SEP, KIMI_SEP[:9], KIMI_END),
        *(
            "<|tool_call>",
            "call:f{",
            "s:",
            '<|"|>',
            "<tool_call|>",
            "<|channel>thought",
            "<channel|>",
        ),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>"),
        *("<|call|>", "analysis", "final", "commentary to=functions.f", CALL, CALL[:9], CALL[9:]),
        *(
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            " ",
            "\n",
            "f",
            '"name": "f"',
            '{"x": "\\u00e9"}',
            "<",
            "é",
        ),
    ]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(STYLES)), TEXTS, st.lists(st.integers(1, 9), max_size=30))
def test_no_split_of_the_text_makes_a_difference(name: str, text: str, sizes: list[int]) -> None:
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(text[begin : begin + size])
        begin += size
    style = STYLES[name]
    assert read(style, [*pieces, text[begin:]]) == read(style, [text])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [
            *("qwen", "llama3", "mistral", "forced", "qwen3_coder", "glm45", "minimax-m2"),
            *(
                "deepseekv3",
                "deepseekv31",
                "deepseekv32",
                "kimi_k2",
                "gemma4",
                "mistral, reasoning",
            ),
        ]
    ),
    TEXTS,
)
def test_no_word_is_lost(name: str, text: str) -> None:
    """No mark contains an é, so each é of the text must come back."""
    events = read(STYLES[name], [text])
    said = "".join(e.name if isinstance(e, CallBegin) else e.text for e in events)
    assert said.count("é") == text.count("é")
    if not any(isinstance(event, CallBegin) for event in events) and "think>" not in text:
        assert events == ([Content(text)] if text else [])


HOLDS = [
    (QWEN, "a < b", "a < b"),
    (QWEN, "a <tool_", "a "),
    (DSML, "a\n\n", "a"),
    (DSML, f"{DSML_ALL}{DSML_F}{DSML_S}long\n", '{"s": "long\\n'),
    (LLAMA, "Hi {", "Hi {"),
    (GPT_OSS, "<|channel|>final<|message|>a <|b", "a <|b"),
    (GPT_OSS, "<|channel|>final<|message|>a <|en", "a "),
    (R1, "<think>a \n", "a"),
]


@pytest.mark.parametrize(("style", "text", "said"), HOLDS)
def test_only_what_may_be_a_mark_waits(style: AnswerFormat, text: str, said: str) -> None:
    events = join(parser_of(style).push(text))
    assert [e.text for e in events if not isinstance(e, CallBegin)] == [said]


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of(QWEN)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"x"') == [CallBegin("f"), CallArguments('{"x"')]
    assert parser.push(': "long') == [CallArguments(': "long')]


def test_the_prompt_may_have_begun_or_ended_the_reasoning() -> None:
    text = "Hm.</think>Yes"
    assert short(read(QWEN, [text], prompt_end="<think>\n")) == ["?Hm.", "Yes"]
    assert short(read(QWEN, [text])) == [text]
    assert short(read(R1, ["Yes"], prompt_end="<think>\n\n</think>\n\n")) == ["Yes"]
    assert short(read(QWEN, [f"<think>{text}"], splits_reasoning=False)) == [f"<think>{text}"]


def test_reasoning_stays_in_the_content_where_it_is_not_split_off() -> None:
    text = ANALYSIS + "<|channel|>final<|message|>Yes"
    assert short(read(GPT_OSS, [text], splits_reasoning=False)) == ["Hm.Yes"]


def test_marks_are_those_of_the_format() -> None:
    """A template opens or ends Gemma 4's reasoning in the prompt, with its header."""
    empty, inside = "<|channel>thought\n<channel|>", "<|channel>thought\n"
    assert GEMMA.reasoning_marks("x") == ReasoningMarks("<channel|>", open="<|channel>")
    assert GEMMA.reasoning_marks(inside) == ReasoningMarks("<channel|>")
    assert GEMMA.reasoning_marks(empty) is None
    assert [GEMMA.may_reason(end) for end in ("x", inside, empty)] == [True, True, False]
    assert short(read(GEMMA, ["Hm.<channel|>Hi"], prompt_end=inside)) == ["?Hm.", "Hi"]
    assert MAGISTRAL.reasoning_marks("x") == ReasoningMarks("[/THINK]", open="[THINK]")
    assert set(GEMMA.markers(calls=True, reasoning=True)) == {
        *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    }
