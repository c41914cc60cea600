"""The package's template for DeepSeek-V3.2: exact texts by the format of the vendor's encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import RequestError
from jspec.text.calls.events import CallArguments, CallBegin, Content, Reasoning, join
from jspec.text.calls.registry import AnswerFormat
from jspec.text.template.chat_messages import check_messages
from jspec.text.template.chat_templates import ChatTemplates

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOL = {"type": "function", "function": {"name": "f", "description": "é"}}
USER = {"role": "user", "content": "Go"}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "Ok",
    "reasoning_content": "Hm",
    "tool_calls": [
        {"function": {"name": "f", "arguments": '{"s": "a\\n\\"b\\"", "x": [1, null]}'}},
        {"function": {"name": "f", "arguments": "{}"}},
    ],
}
CALLED = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="s" string="true">a\n"b"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="x" string="false">[1, null]</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
RESULTS = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
RESULTED = (
    "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>\n\n"
)


@pytest.fixture
def templates(tmp_path: Path) -> ChatTemplates:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = ChatTemplates.from_directory(tmp_path)
    assert found is not None
    return found


def render(templates: ChatTemplates, *messages: dict[str, Any], **options: Any) -> str:
    variables = {key: options.pop(key) for key in ("thinking", "reasoning_effort") & options.keys()}
    return templates.render(check_messages(messages), variables=variables, **options)


def test_only_a_checkpoint_of_this_type_and_without_template_gets_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert ChatTemplates.from_directory(tmp_path) is None
    config.write_text(json.dumps({"model_type": "deepseek_v32"}))
    (tmp_path / "chat_template.jinja").write_text("own")
    found = ChatTemplates.from_directory(tmp_path)
    assert found is not None
    assert found.render([USER]) == "own"


def test_turns(templates: ChatTemplates) -> None:
    """Reasoning before the last user's message is dropped."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"},
        USER,
    ]
    before = f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}<｜User｜>Go"
    assert render(templates, *chat) == f"{before}<｜Assistant｜></think>"
    assert render(templates, *chat, thinking=True) == f"{before}<｜Assistant｜><think>"
    assert render(templates, *chat, add_generation_prompt=False) == before
    begun = {"role": "assistant", "content": "It", "reasoning_content": "So"}
    text = render(templates, *chat, begun, thinking=True, continue_final_message=True)
    assert text == f"{before}<｜Assistant｜><think>So</think>It"


def test_calls_and_results_without_thinking(templates: ChatTemplates) -> None:
    text = render(templates, USER, CALLS, *RESULTS, tools=[TOOL])
    tools, chat = text.split("</functions>\n")
    assert tools.startswith(f"{BOS}\n\n## Tools\n\n")
    assert tools.endswith('\n<functions>\n{"name": "f", "description": "é"}\n')
    said = f"<｜User｜>Go<｜Assistant｜></think>Ok{CALLED}{EOS}"
    assert chat == f"{said}{RESULTED}</think>"
    system = {"role": "system", "content": "Be brief."}
    text = render(templates, system, USER, tools=[TOOL])
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\n")
    assert text.count("## Tools") == 1


def test_thinking_goes_on_after_results(templates: ChatTemplates) -> None:
    """Reasoning since the last user message is rendered, also between calls."""
    text = render(templates, USER, CALLS, *RESULTS, thinking=True)
    head = f"{BOS}<｜User｜>Go<｜Assistant｜>"
    assert text == f"{head}<think>Hm</think>Ok{CALLED}{EOS}{RESULTED}<think>"
    done = {"role": "assistant", "content": "Done", "reasoning_content": "Aha"}
    later = render(templates, USER, CALLS, *RESULTS, done, USER, thinking=True)
    ended = f"</think>Ok{CALLED}{EOS}{RESULTED}</think>Done{EOS}"
    assert later == f"{head}{ended}<｜User｜>Go<｜Assistant｜><think>"


def test_the_parser_reads_what_the_template_writes(templates: ChatTemplates) -> None:
    format = AnswerFormat(calls="deepseekv32", reasoning="qwen3")
    prompt = render(templates, USER, thinking=True)
    text = render(templates, USER, CALLS, thinking=True)
    answer = text.removeprefix(prompt).removesuffix(EOS)
    parser = format.parser({"f": None}, splits_reasoning=True, prompt_end=prompt)
    first = CallArguments('{"s": "a\\n\\"b\\"", "x": [1, null]}')
    assert join([*parser.push(answer), *parser.flush()]) == [
        *(Reasoning("Hm"), Content("Ok"), CallBegin("f"), first),
        *(CallBegin("f"), CallArguments("{}")),
    ]


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "developer", "content": "a"}], {}, "role is developer, .* expected system"),
        ([USER, RESULTS[0]], {}, "a tool message has no call"),
        ([USER, CALLS, *RESULTS, RESULTS[0]], {}, "a tool message has no call"),
        ([USER, CALLS, RESULTS[0]], {}, "made 2 calls, and 1 have results"),
        ([USER, CALLS, RESULTS[0], USER], {}, "made 2 calls, and 1 have results"),
        ([USER, {"role": "assistant", "content": "a"}], {"thinking": True}, "no reasoning_content"),
        ([USER], {"reasoning_effort": "high"}, "reasoning_effort is .* never names it"),
    ],
)
def test_what_the_format_cannot_express_is_refused(
    templates: ChatTemplates,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(RequestError, match=message):
        render(templates, *messages, **options)
