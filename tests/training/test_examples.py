"""Training examples from JSON lines: kinds of lines, learnt tokens, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import ConfigError
from jspec.text.template.chat_template import ChatTemplate
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.tokenizer import Tokenizer
from jspec.training.data.examples import Example, LossOn, Reader, held_out_from, rows_of
from tests.support.tiny_models import END, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hé?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "né"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    words = json.dumps({"eos_token": END, "bos_token": END})
    (folder / "tokenizer_config.json").write_text(words)
    return Tokenizer.from_directory(folder)


def reader(
    tokenizer: Tokenizer, *, loss_on: LossOn = LossOn.ALL, template: str | None = TEMPLATE
) -> Reader:
    made = None if template is None else ChatTemplate(source=template, where="the test")
    found = None if made is None else ChatTemplates(default=made)
    return Reader(tokenizer=tokenizer, template=found, vocab_size=320, loss_on=loss_on)


def learnt(tokenizer: Tokenizer, example: Example) -> bytes:
    ids = example.ids[example.is_learnt]
    return tokenizer.backend.decode(ids.tolist()).encode()


def test_a_text_is_learnt_whole(tokenizer: Tokenizer) -> None:
    (example,) = reader(tokenizer).examples(b'{"text": "abc", "source": "somewhere"}')
    assert example.ids.tolist() == list(tokenizer.encode("abc"))
    assert example.is_learnt.all()


NAMES = {"user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[m["role"]], "value": m["content"]} for m in CHAT]


@pytest.mark.parametrize(
    "chat", [{"messages": CHAT}, {"conversations": CHAT}, {"conversations": SHAREGPT}]
)
def test_of_a_chat_what_the_assistant_says_is_learnt(tokenizer: Tokenizer, chat: Any) -> None:
    line = json.dumps(chat).encode()
    (example,) = reader(tokenizer, loss_on=LossOn.ASSISTANT).examples(line)
    text = "<user>Hé?\n<assistant>yes\n<user>so\n<assistant>né\n"
    assert example.ids.tolist() == list(tokenizer.encode(text, add_special_tokens=False))
    assert learnt(tokenizer, example) == "yes\nné\n".encode()
    (whole,) = reader(tokenizer).examples(line)
    assert whole.ids.tolist() == example.ids.tolist()
    assert whole.is_learnt.all()


REASONS = (  # as Qwen3's: of the last reply alone, and never left out there
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{{ tools[0] }}{% endif %}"
)


def test_a_reply_that_is_written_differently_later_is_learnt_as_it_was_made(
    tokenizer: Tokenizer,
) -> None:
    chat = [CHAT[0], CHAT[1] | {"reasoning_content": "a"}, CHAT[2], CHAT[3]]
    own = reader(tokenizer, loss_on=LossOn.ASSISTANT, template=REASONS)
    first, last = own.examples(json.dumps({"messages": chat}).encode())
    assert learnt(tokenizer, first) == b"<think>a</think>yes;"
    text = "<user>Hé?;<assistant><think>a</think>yes;"
    assert tokenizer.backend.decode(first.ids.tolist()) == text
    assert learnt(tokenizer, last) == "<think></think>né;".encode()
    assert b"so" in tokenizer.backend.decode(last.ids.tolist()).encode()


def test_parts_of_a_line_are_held_out_together(tokenizer: Tokenizer) -> None:
    own = reader(tokenizer, loss_on=LossOn.ASSISTANT, template=REASONS)
    lines = [(number, json.dumps({"messages": CHAT}).encode()) for number in range(1, 4)]
    train, held_out = held_out_from(own.read_lines(lines, where="x"))
    assert [each.line for each in train] == [1, 1, 2, 2]
    assert [each.line for each in held_out] == [3, 3]
    with pytest.raises(ConfigError, match="at least 2"):
        held_out_from(own.read_lines(lines[:1], where="x"))


def test_calls_and_tools_are_shown_as_the_template_has_them(tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    line = {"messages": [CHAT[0], call], "tools": ["t"]}
    (example,) = reader(tokenizer, template=REASONS).examples(json.dumps(line).encode())
    text = "<user>Hé?;<assistant><think></think>add;t"
    assert tokenizer.backend.decode(example.ids.tolist()) == text
    with pytest.raises(ConfigError, match="tools is 3; expected a list"):
        reader(tokenizer).examples(json.dumps(line | {"tools": 3}).encode())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", r"has \[1\]; expected an object with one of text, messages"),
        ('{"txt": "a"}', r"has \['txt'\]; expected an object with one of text"),
        ('{"text": "a", "messages": []}', r"has \['text', 'messages'\]; expected"),
        ('{"text": 3}', "text is 3; expected some"),
        ('{"text": ""}', "text is ''; expected some"),
        ('{"text": "\\ud800"}', "expected valid Unicode"),
        ('{"messages": []}', r"has the messages \[\]; expected a list of some"),
        ('{"messages": [{"role": "user"}]}', "expected role and content, or from and value"),
        (
            '{"conversations": [{"from": "alien", "value": "x"}]}',
            "a message of the role 'alien'; expected one of system, .*, human, gpt",
        ),
        ('{"input_ids": [1, "b"]}', "expected a list of token ids"),
        ('{"input_ids": [5, 9223372036854775808]}', "expected a list of token ids"),
        ('{"text": ' + "9" * 5000 + "}", "has an integer of 5000 digits"),
        ("[" * 100_000, "is nested too deeply"),
        (
            json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}),
            "text holds '.*ud800' at character",
        ),
        ('{"input_ids": [5, 320]}', r"has the token id 320; expected ids in \[0, 320\)"),
    ],
)
def test_a_bad_line_is_named_with_its_number(
    tokenizer: Tokenizer, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        reader(tokenizer).read(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


def test_files_without_examples_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.jsonl has no line; expected JSON"):
        reader(tokenizer).read(empty)
    with pytest.raises(ConfigError, match="is no file"):
        reader(tokenizer).read(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('\n{"text": "é"}'.encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"latin.jsonl, line 2: is not UTF-8: byte 0xe9 at off.*10"
    ):
        reader(tokenizer).read(tmp_path / "latin.jsonl")


def test_bad_lines_may_be_left_out_and_are_counted(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"txt": "a"}\n\n{"text": "\xe9"}\n{"text": "b"}\n')
    lenient = replace(reader(tokenizer), skips=True)
    assert [each.line for each in lenient.read(path)] == [1, 5]
    assert capsys.readouterr().out == (
        f"{path}: 2 of 4 lines are skipped, the first: {path}, line 2: has ['txt']; expected an "
        "object with one of text, messages, conversations, input_ids\n"
    )
    path.write_text("[]\n[]\n")
    with pytest.raises(ConfigError, match="line 1: has "):
        lenient.read(path)


@pytest.mark.parametrize(
    ("line", "template", "message"),
    [
        ({"text": "a"}, TEMPLATE, "has text, without an assistant's message"),
        ({"messages": CHAT[:1]}, TEMPLATE, "there is no assistant's message; expected"),
        ({"messages": CHAT}, None, "no chat template"),
        ({"messages": CHAT}, "{{ messages | length }}", "before number 2 with it"),
        ({"messages": CHAT}, "{{ raise_exception('no') }}", "refuses the messages: no"),
    ],
)
def test_what_the_assistant_says_must_be_there(
    tokenizer: Tokenizer, line: dict[str, Any], template: str | None, message: str
) -> None:
    own = reader(tokenizer, loss_on=LossOn.ASSISTANT, template=template)
    with pytest.raises(ConfigError, match=message):
        own.read_lines([(1, json.dumps(line).encode())], where="x")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(3, 9), st.randoms())
def test_every_learnt_token_counts_once_where_it_is_foretold(
    lens: list[int], length: int, random: Any
) -> None:
    examples = [
        Example(
            ids=np.arange(1, n + 1, dtype=np.int32),
            is_learnt=np.asarray([random.random() < 0.5 for _ in range(n)]),
        )
        for n in (*lens, length)
    ]
    examples[-1].is_learnt[1] = True  # so that something is
    table = rows_of(examples, length=length)
    found = []
    for row, n, weights in zip(table.ids, table.lens, table.weights, strict=True):
        assert (row[n:] == 0).all()
        assert (row[:n] == np.arange(row[0], row[0] + n)).all()
        found += [int(row[p]) + 1 for p in np.flatnonzero(weights)]
    expected = []
    for example in examples:
        for start in range(0, len(example.ids), length):
            stop = min(start + length, len(example.ids))
            if stop - start >= 3:
                here = example.ids[start + 1 : stop + 1]
                expected += here[example.is_learnt[start + 1 : stop + 1]].tolist()
    assert found == expected


def test_one_example_in_twenty_is_held_out() -> None:
    examples = [Example(ids=np.asarray([i]), is_learnt=np.ones(1, bool)) for i in range(45)]
    train, held_out = held_out_from(examples)
    assert [int(example.ids[0]) for example in held_out] == [19, 39]
    assert len(train) == 43
    assert [len(part) for part in held_out_from(examples[:3])] == [2, 1]
    with pytest.raises(ConfigError, match="has 1 example; expected at least 2"):
        held_out_from(examples[:1])


def test_nothing_to_learn_is_an_error() -> None:
    short = Example(ids=np.asarray([1, 2]), is_learnt=np.ones(2, bool))
    with pytest.raises(ConfigError, match="1 examples have no token to learn"):
        rows_of([short], length=8)
