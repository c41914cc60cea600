"""The command line: painting, prompts, exit statuses, chats."""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jspec.cli.chat import Chat
from jspec.cli.flags import named_model
from jspec.cli.generate import generate, read_prompt
from jspec.cli.main import main
from jspec.cli.terminal import (
    Painter,
    Style,
    Summary,
    add_sampling_flags,
    choose_style,
    one_stream,
    sampling_asked,
    stream_answer,
)
from jspec.engine.weights.loading import BUNDLED
from jspec.errors import RequestError
from jspec.messages.request import SamplingParams, SpecCounters
from jspec.models.files.checkpoint import load_sampling_defaults
from jspec.serving.engine import Engine
from jspec.text.spec_tokens import SpecToken
from tests.support.one_stream import flags_of_one_stream

OWN, DRAFT = SpecToken(text="a", accepted=False), SpecToken(text="b", accepted=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True, scope="module")
def interruptible() -> None:
    """A shell's background jobs ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of_one_stream(tmp_path_factory.mktemp("pair"))


def test_paint_in_three_styles() -> None:
    steps = [[OWN], [DRAFT], [DRAFT, OWN], [DRAFT]]
    expected = {
        Style.NONE: "abbab",
        Style.MARKS: "a‹bb›a‹b›",
        Style.COLOR: "a\x1b[32mbb\x1b[0ma\x1b[32mb\x1b[0m",
    }
    for style, text in expected.items():
        painter = Painter(style)
        assert "".join(painter.paint(step) for step in steps) + painter.close() == text
        assert painter.close() == ""


def test_style_follows_the_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert choose_style(Terminal(), plain_marks=False) is Style.COLOR
    assert choose_style(io.StringIO(), plain_marks=False) is Style.NONE
    assert choose_style(Terminal(), plain_marks=True) is Style.MARKS
    monkeypatch.setenv("NO_COLOR", "1")
    assert choose_style(Terminal(), plain_marks=False) is Style.NONE


def test_the_prompt_is_the_argument_or_what_is_piped() -> None:
    assert read_prompt("x", Terminal()) == "x"
    assert read_prompt(None, io.StringIO("def f\n\n")) == "def f\n"
    for given, source in ((None, Terminal()), (None, io.StringIO("")), ("", io.StringIO("x"))):
        with pytest.raises(RequestError, match="there is no prompt"):
            read_prompt(given, source)
    with pytest.raises(RequestError, match="on standard input is not UTF-8: byte 0xe9 at offset 2"):
        read_prompt(None, io.TextIOWrapper(io.BytesIO(b"d \xe9"), encoding="utf-8"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a command is missing"),
        (["sreve"], "unknown command 'sreve'"),
        (["serve", "--prot", "1"], "did you mean '--port'?"),
        (["serve", "--pp-size", "2"], "--pp-size '2' is refused"),
        (["serve", "--model-path", "nowhere"], "model_path is 'nowhere'"),
        (
            ["verify", "--model-path", "nowhere", "--speculative-algorithm", "NGRAM"],
            "model_path is 'nowhere'; expected a directory with a checkpoint",
        ),
        (["info", "nowhere"], "DIR is 'nowhere'; expected a directory with a checkpoint"),
        (["convert", "nowhere", "x", "--to", "orbax"], "nowhere is no directory; expected one"),
        (
            ["train-draft", "--model-path", "nowhere", "--data", "x", "--out", "y"],
            "model_path is 'nowhere'; expected a directory with a checkpoint",
        ),
        (["serve", "--model-path", ""], "model_path is ''; expected a directory"),
        (["generate", "x", "--model-path="], "model_path is ''; expected a directory"),
        (["generate", "x", "--port", "1"], "unknown flag '--port'"),
        (["generate", "x", "--regex", "1"], "jspec generate --help lists the flags"),
        (["generate", "x", "--top-p", "2"], "top_p is 2; expected"),
        (["chat", "hello"], "unexpected argument 'hello'"),
        (["generate", "x", "y"], "unexpected argument 'y'; expected flags (quote a prompt"),
        (["batch", "a", "b", "c"], "unexpected argument 'c'; expected flags\n"),
        (
            ["batch", "a", "b", "--tool-call-parser", "x"],
            "tool_call_parser is 'x'",
        ),
        (["flags", "x"], "unexpected argument 'x'; jspec flags takes none"),
        (["version", "x"], "unexpected argument 'x'; jspec version takes none"),
        (["verify", "--engine-process"], "--engine-process is set, but jspec verify reads weights"),
        (["doctor", "--engine-process"], "--engine-process is set, but jspec doctor reads weights"),
        (["info", "--memory", "80"], "--memory is '80'; expected a size such as 80GB"),
        (["bench", "--url", "x"], "url is 'x'; expected http://HOST:PORT"),
        (["serve", "d", "y"], "unexpected argument 'y'; expected flags\n"),
    ],
)
def test_what_was_asked_wrongly_is_one_line_and_a_status(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ["--port", "0"] if argv[:1] == ["serve"] else []
    assert main([*argv, *port]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "failed" not in said


def test_generate_says_when_its_text_will_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "nowhere"]
    flags = ["--model-path", "nowhere", *draft, "--load-format", "dummy"]
    assert main(["generate", "x", *flags, "--simulate-acceptance", "2"]) == 2
    errors = capsys.readouterr().err
    assert "jspec: warning: simulate_acceptance is 2: drafts are accepted whatever" in errors
    assert "jspec: warning: load_format is dummy: the weights are random" in errors


def test_words_that_only_print(capsys: pytest.CaptureFixture[str]) -> None:
    usage = "usage: jspec"
    words = {"version": "jspec 0.", "--help": usage, "help": usage, "flags": "### Model"}
    words |= {"version --help": "jspec 0.", "flags -h": "### Model"}
    words["info"] = f"{BUNDLED / 'target'}: a target, LlamaForCausalLM\n"
    for asked, text in words.items():
        assert main(asked.split()) == 0
        assert text in capsys.readouterr().out


@pytest.fixture
def engine(flags: list[str]) -> Iterator[Engine]:
    names = [word.removeprefix("--").replace("-", "_") for word in flags[::2]]
    values = [int(word) if word.isdigit() else word for word in flags[1::2]]
    arguments: dict[str, Any] = dict(zip(names, values, strict=True))
    with Engine(**one_stream(arguments)) as engine:
        yield engine


def test_one_stream_compiles_four_programs_and_flags_win(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["num_programs"] == 4
    assert info["dtype"] in ("float32", "bfloat16")  # the resolved value of "auto"
    small = {"max_running_requests": 1, "chunked_prefill_size": 32, "disable_logprobs": True}
    assert one_stream({}) == small
    given = {"max_running_requests": 4, "page_size": 64}
    assert one_stream(given) == {**small, **given}


def test_the_first_word_of_serve_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert named_model(["d", "--port", "0"]) == ["--model-path", "d", "--port", "0"]
    assert named_model(["--port", "0"]) == ["--port", "0"]
    assert main(["serve", "d", "--model=e"]) == 2
    assert "the model is 'd' and '--model=e'; expected one" in capsys.readouterr().err
    assert main(["serve", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [*("batch", "bench", "chat", "convert", "doctor", "generate", "info", "serve"), "verify"],
)
def test_the_help_shows_the_flags_and_no_default_that_is_none(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "usage: " in said
    assert len(out.split("\n\n")[0].splitlines()) < 16, "own flags only; shared ones follow"
    for own in ("--retry-errors", "--tool-call-parser", "--system", "--repeats", "--num-prompts"):
        if own in said and "\nModel:" in out and command != "serve":
            assert said.index(own) < said.index(" Model: ")
    assert "default: None" not in said
    assert "default: False" not in said
    if command in ("doctor", "serve", "verify"):  # the others of these refuse it
        assert "--mem-fraction-static" in said
        assert ("--engine-process" in said) == (command == "serve")
    if command == "generate":
        assert "0 is greedy; unset: the model's own, 0.7 for the bundled pair" in said
        assert load_sampling_defaults(BUNDLED / "target") == {"temperature": 0.7}
        assert f"Maximum new tokens ({SamplingParams().wanted_tokens})" in said


def test_generate_streams_marks_and_sums_up(engine: Engine) -> None:
    out, notes = io.StringIO(), io.StringIO()
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, sampling_seed=1)
    summary = asyncio.run(
        generate(engine, "def fib(", params, painter=Painter(Style.MARKS), out=out, notes=notes)
    )
    text = out.getvalue()
    assert text.startswith("def fib(")
    assert text.endswith("\n")
    assert text.count("‹") == text.count("›") > 3
    assert "‹›" not in text
    assert summary.num_tokens == 200
    assert notes.getvalue() == f"{summary}\n"
    assert re.fullmatch(
        r"200 tokens in \d+\.\d\d s, \d+\.\d tokens/s after the first, acceptance length \d\.\d\d, "
        r"temperature 1, seed 1",
        str(summary),
    )
    assert engine.is_closed


class Talk:
    """Lines typed into a chat; an exception is raised in place of a line."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = iter(lines)

    def __call__(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


class Interrupted(io.StringIO):
    """Raise SIGINT once, after this many characters."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after: int | None = after

    def write(self, text: str, /) -> int:
        written = super().write(text)
        if self._after is not None and len(self.getvalue()) > self._after:
            self._after = None
            signal.raise_signal(signal.SIGINT)
        return written


def test_a_chat_remembers_forgets_and_outlives_what_is_stopped(engine: Engine) -> None:
    sampling = {"sampling_seed": 3, "max_new_tokens": 24, "ignore_eos": True, "top_k": 8}
    out, notes = io.StringIO(), io.StringIO()
    chat = Chat(
        engine=engine,
        sampling=lambda: sampling,
        painter=Painter(Style.NONE),
        out=out,
        notes=notes,
        system="short",
    )
    chat.run(Talk("one", "", KeyboardInterrupt, "two", "/help", "/wat"))
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    for end in (2, 4):  # each answer follows all messages before it
        answer = engine.chat(chat.messages[:end], sampling)
        assert answer["text"] == chat.messages[end]["content"]
        assert f"{answer['text']}\n" in out.getvalue()
    assert "unknown command '/wat': /reset forgets" in notes.getvalue()
    assert notes.getvalue().count("24 tokens in ") == 2
    chat.run(Talk("/reset", "x " * 20000, "/quit", "never read"))
    assert chat.messages == []
    assert "the message is left out (/reset forgets" in notes.getvalue()

    chat.out = screen = Interrupted(after=40)
    sampling |= {"max_new_tokens": 12000}
    chat.run(Talk("three", "/quit"))
    stopped = chat.messages[-1]
    assert (stopped["role"], stopped["content"] + "\n") == ("assistant", screen.getvalue())
    assert 40 < len(stopped["content"]) < 4000
    assert "stopped; the text so far stays" in notes.getvalue()
    sampling |= {"max_new_tokens": 8}
    chat.run(Talk("four"))
    assert len(chat.messages) == 5


def test_a_chat_needs_a_template_before_anything_loads(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((Path(flags[1]) / "config.json").read_text())
    assert main(["chat", "--model-path", str(bare)]) == 2
    assert "bare' has no chat template (chat_template.jinja" in capsys.readouterr().err


def test_what_generate_is_asked_is_what_it_samples_with() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, most_tokens="128")
    words = "--top-p .9 --top-k 5 --min-p .1 --stop a --stop bc --seed 4 --max-new-tokens 7"
    asked = sampling_asked(parser.parse_args([*words.split(), "--temperature", "0.5"]))
    assert SamplingParams.from_mapping(asked) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        stop=("a", "bc"),
        sampling_seed=4,
        max_new_tokens=7,
    )
    assert set(sampling_asked(parser.parse_args([])).values()) == {None}


def test_the_rate_leaves_the_prompt_out() -> None:
    summary = Summary(
        num_tokens=21,
        seconds=12.0,
        first_seconds=10.0,
        counters=SpecCounters(),
        temperature=0,
        seed=7,
    )
    assert str(summary) == "21 tokens in 12.00 s, 10.0 tokens/s after the first, temperature 0"
    alone = replace(summary, num_tokens=1, seconds=10.0)
    assert str(alone) == "1 token in 10.00 s, temperature 0"


def test_a_summary_is_written_though_the_interrupt_came_before_a_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(engine, "submit", interrupted)
    (request,) = engine.requests(prompt="a", sampling_params=SamplingParams(sampling_seed=2))
    out, notes = io.StringIO(), io.StringIO()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            stream_answer(engine, request, painter=Painter(Style.NONE), out=out, notes=notes)
        )
    assert notes.getvalue().endswith("temperature 1, seed 2\n")
