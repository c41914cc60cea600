"""Chat templates: where they are found, what they render, and the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import CheckpointError, ConfigError, RequestError
from jspec.text.template.chat_messages import check_messages
from jspec.text.template.chat_template import ChatTemplate
from jspec.text.template.chat_templates import ChatTemplates

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source=source, where="here", special_tokens=special_tokens)


def test_a_published_kind_of_template() -> None:
    messages = [{"role": "system", "content": "s"}, USER]
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    chatml = template(CHATML)
    assert chatml.render(messages, add_generation_prompt=False) == expected
    assert chatml.render(messages) == expected + "<|im_start|>assistant\n"


def test_blocks_leave_no_white_space() -> None:
    """Published templates rely on trim_blocks and lstrip_blocks."""
    source = "{% for m in messages %}\n  {% if 1 %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert template(source).render([USER, USER]) == "hi\nhi\n"


def test_the_names_that_templates_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}{{ strftime_now('%%') }}{{ mood }}"
    )
    text = template(source, bos_token="<s>").render([USER] * 4, variables={"mood": "!"})
    assert text == '<s>"hi""hi"{\n "b": "<é>",\n "a": 1\n}%!'


def test_what_the_template_raises_is_the_requests_error() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="refuses the messages: roles must alternate"):
        template(source).render([USER])
    with pytest.raises(RequestError, match=r"refuses the messages: .*no attribute"):
        template("{{ messages[0].nothing.more }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ range(10000000) | list }}",
        "{{ raise_exception.__globals__.json }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses"):
        template(source).render([USER])


@pytest.mark.parametrize("call", ["'<' + a + '>'", "'<' ~ a ~ '>'", "'<' }}{{ a }}{{ '>'"])
def test_arguments_may_be_added_to_text(call: str) -> None:
    """DeepSeek's templates expect arguments as text."""
    called = [{"function": {"name": "f", "arguments": '{"x": "é"}'}}]
    messages = check_messages([{"role": "assistant", "tool_calls": called}])
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ " + call + " }}"
    assert template(source).render(messages) == '<{"x": "é"}>'
    listed = template("{{ messages[0].tool_calls | tojson }}").render(messages)
    assert listed == '[{"function": {"name": "f", "arguments": {"x": "é"}}}]'


def test_a_message_is_continued_where_it_ends() -> None:
    begun = [USER, {"role": "assistant", "content": "The answer "}]
    text = template(CHATML).render(begun, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer ")
    trims = template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trims.render(begun, continue_final_message=True) == "[hi][The answer "
    with pytest.raises(RequestError, match="leaves the last message out"):
        template("{{ messages[0].content }}").render(begun, continue_final_message=True)
    assert begun[-1]["content"] == "The answer "


def test_where_a_checkpoint_keeps_its_template(tmp_path: Path) -> None:
    assert ChatTemplates.find(tmp_path, named=None) is None
    config = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "chat_template": "config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def found() -> str:
        chosen = ChatTemplates.find(tmp_path, named=None)
        assert chosen is not None
        return chosen.render([USER])

    assert found() == "config"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "several"}]
    for value, expected in ((several, "several"), ("{{ bos_token }}{{ eos_token }}", "<b><e>")):
        config["chat_template"] = value
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert found() == expected
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja{{ bos_token }}")
    assert found() == "jinja<b>"
    named = tmp_path / "other.jinja"
    named.write_text("named{{ eos_token }}")
    chosen = ChatTemplates.find(tmp_path, named=str(named))
    assert chosen is not None
    assert chosen.render([USER]) == "named<e>"


def write_named(directory: Path, way: str, sources: dict[str, str]) -> None:
    """Write several templates in one of a checkpoint's layouts."""
    if way == "config":
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        config = {"chat_template": listed, "bos_token": "<b>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return
    config = {"chat_template": "never this", "bos_token": "<b>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    folder = directory / "additional_chat_templates"
    folder.mkdir()
    for name, source in sources.items():
        file = directory / "chat_template.jinja" if name == "default" else folder / f"{name}.jinja"
        file.write_text(source)


@pytest.mark.parametrize("way", ["config", "files"])
def test_a_chat_with_tools_gets_the_template_for_tools(tmp_path: Path, way: str) -> None:
    sources = {
        "default": "plain",
        "tool_use": "{{ bos_token }}{{ tools | length }}",
        "rag": "{% if",
    }
    write_named(tmp_path, way, sources)
    found = ChatTemplates.find(tmp_path, named=None)
    assert found is not None
    assert found.render([USER]) == found.render([USER], tools=[]) == "plain"
    assert found.render([USER], tools=[{}, {}]) == "<b>2"


@pytest.mark.parametrize("way", ["config", "files"])
def test_without_a_template_for_tools_or_for_others(tmp_path: Path, way: str) -> None:
    for name in ("tools", "plain"):
        (tmp_path / name).mkdir()
    write_named(tmp_path / "plain", way, {"default": "plain", "rag": "x"})
    found = ChatTemplates.find(tmp_path / "plain", named=None)
    assert found is not None
    with pytest.raises(RequestError, match="the chat template never names `tools`"):
        found.render([USER], tools=[{}])
    write_named(tmp_path / "tools", way, {"tool_use": "{{ tools | length }}"})
    found = ChatTemplates.find(tmp_path / "tools", named=None)
    assert found is not None
    assert found.render([USER], tools=[{}]) == "1"
    with pytest.raises(RequestError, match=r"tools is left out, and the only .* is 'tool_use'"):
        found.render([USER])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "chat_template in .* is 5; expected text, or a list"),
        ([{"name": "rag", "template": "x"}], r"has \['rag'\]; expected one named 'default'"),
        ([], r"has \[\]; expected one named 'default'"),
        (["x"], r"is \['x'\]; expected text, or a list"),
        ([{"name": "default"}], "expected text, or a list"),
        ("{% if %}", "the chat template in .*: Expected an expression"),
    ],
)
def test_a_template_that_is_none_is_a_checkpoint_error(
    tmp_path: Path, value: Any, message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=message):
        ChatTemplates.find(tmp_path, named=None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "nested too deeply"),
        ("{{ 1" + " + 1" * 5000 + " }}", "nested too deeply"),
        ("{{ " + "7" * 5000 + " }}", "ValueError"),
        ("x" * 100_001, "it has 100001 characters; expected at most"),
    ],
    ids=["parentheses", "sum", "digits", "long"],
)
def test_a_template_that_python_cannot_compile_is_a_checkpoint_error(
    source: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"the chat template in here: .*{message}"):
        template(source)


@pytest.mark.parametrize(
    "expression",
    [
        "10**5000",
        "10**(10**8)",
        "(10**100)**100",
        "'x'*(10**10)",
        "(10**10)*'x'",
        "[1]*(10**10)",
        "(10**2000)*(10**2000)",
        "'x'|center(10000000000)",
        "'x'.ljust(10000000000)",
        "'x'.zfill(width)",
        "'x'|indent(10000000000, true)",
        "['x']|map('center', 10000000000)|list",
        "1|round(-10000000000)",
        "(1).to_bytes(10000000000, 'big')",
        "'\\t'.expandtabs(10000000000)",
        "'%10000000000d' % 1",
        "'%*d' % (10000000000, 1)",
        "'%10000000000d'|format(1)",
        "'{:>10000000000}'.format(1)",
        "'{:>{}}'.format(1, 10000000000)",
        "[1]|batch(10000000000, 0)|list",
        "[1]|slice(10000000000)|list",
        "1|tojson(10000000000)",
    ],
)
def test_an_expression_without_end_is_computed_neither_at_the_start_nor_in_a_prompt(
    expression: str,
) -> None:
    """Jinja evaluates constants at compile time, and Python bounds none of these."""
    for source in ("{{ E }}", "{% set x = E %}", "{% if E %}{% endif %}"):
        made = template(source.replace("E", expression))
        with pytest.raises(RequestError, match=r"chat template refuses the messages: .*expect"):
            made.render([USER], variables={"width": 10**10})


def test_what_is_small_is_computed() -> None:
    source = (
        "{{ '-' * 3 }}{{ 2 * '=' }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ [0] * 2 }}"
        "{{ '%03d' % 7 }}{{ 7 % 4 }}{{ 'x'|center(3) }}{{ 'x'.ljust(2) }}{{ '{:>2}'.format(1) }}"
        "{{ '%s: 123456 %%' % 'year' }}"
    )
    text = "---==10240.5123.0[0, 0]0073 x x  1year: 123456 %"
    assert template(source).render([USER]) == text


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template is .*expected a file"):
        ChatTemplates.find(tmp_path, named=str(tmp_path / "none.jinja"))
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    with pytest.raises(CheckpointError, match="has no chat_template"):
        ChatTemplates.find(tmp_path, named=str(empty))


def test_what_was_only_thought_goes_back_without_content() -> None:
    thought: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    assert check_messages([thought]) == ({**thought, "content": ""},)


def test_messages_become_plain() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    assert check_messages(messages) == (
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    )


BAD: list[tuple[Any, str]] = [
    (None, "messages is null; expected a list"),
    ([], r"messages is \[\]; expected a list"),
    ("hi", "messages is 'hi'; expected a list"),
    (["hi"], r"messages\[0\] is 'hi'; expected an object"),
    ([USER, {"role": "robot", "content": "x"}], r"messages\[1\].role is 'robot'; expected one of"),
    ([{"content": "x"}], r"messages\[0\].role is null"),
    ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]"),
    ([{"role": "user"}], r"messages\[0\].content is null"),
    ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
    ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is .*type text"),
    ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x'; expected a part"),
    ([{"role": "user", "content": "x", "tool_calls": []}], "unknown field 'tool_calls'"),
    (
        [{"role": "user", "content": "x", "audio": {}}],
        r"\[0\].audio is {}, which is not im",
    ),
    ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] is {}; expected"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
        r"function.arguments is '\['; expected a JSON object",
    ),
]


@pytest.mark.parametrize(("messages", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_message_is_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_messages(messages)
