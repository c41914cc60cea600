"""`jspec chat`: chat in the terminal with the checkpoint's own chat template."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.cli.terminal import (
    ENGINE_GROUPS,
    Painter,
    Screen,
    add_sampling_flags,
    choose_style,
    sampling_asked,
    seeded,
    start_one_stream,
    stream_answer,
)
from jspec.engine.interrupts import interruptible
from jspec.errors import ConfigError, RequestError
from jspec.files.json_files import utf8_fault
from jspec.server.server_args import Settings

if TYPE_CHECKING:
    from jspec.serving.engine import Engine

HELP = """/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"""
YOU = "> "


def run_chat(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="jspec chat",
        allow_abbrev=False,
        description="Chat in the terminal with the checkpoint's chat template; accepted draft "
        "tokens are highlighted. " + HELP + ".",
    )
    parser.add_argument("--system", metavar="TEXT", help="System message")
    add_sampling_flags(parser, most_tokens="what the context leaves")
    add_flags(parser, groups=ENGINE_GROUPS)
    options, settings = parse_flags(parser, argv)
    asked = sampling_asked(options)
    check_template(settings)
    with start_one_stream(settings) as engine:
        painter = Painter(choose_style(sys.stdout, plain_marks=options.plain_marks))
        chat = Chat(
            engine=engine,
            sampling=lambda: seeded(asked, settings),
            painter=painter,
            out=sys.stdout,
            notes=sys.stderr,
            system=options.system,
        )
        sys.stderr.write(f"{HELP}\n")
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (the import gives `input` history and editing)
        chat.run(lambda: input(YOU if is_terminal else ""))
    return 0


def check_template(settings: Settings) -> None:
    """Raise ConfigError for a model without a chat template, before its weights are read."""
    with interruptible():
        from jspec.engine.weights.loading import resolve_paths
        from jspec.text.template.chat_templates import ChatTemplates

    args = settings.engine_args
    directory: Path = resolve_paths(args).tokenizer
    if ChatTemplates.find(directory, named=args.chat_template) is None:
        raise ConfigError(
            f"{str(directory)!r} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); expected one, or --chat-template FILE; jspec generate needs "
            "none"
        )


class Chat:
    """One conversation. sampling: returns a turn's sampling parameters."""

    def __init__(
        self,
        *,
        engine: Engine,
        sampling: Callable[[], Mapping[str, Any]],
        painter: Painter,
        out: Screen,
        notes: Screen,
        system: str | None = None,
    ) -> None:
        self.engine, self.sampling, self.system = engine, sampling, system
        self.painter, self.out, self.notes = painter, out, notes
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[], str]) -> None:
        while True:
            try:
                line = read()
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise RequestError(f"standard input {utf8_fault(error)}") from error
            except KeyboardInterrupt:  # no answer in progress: only the input line is dropped
                self._note(f"\n{HELP}")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if line.strip() == "/quit":
                    return
                self._command(line.strip())
            else:
                self.turn(line)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.messages.clear()
            self._note("the conversation is forgotten")
        else:
            self._note(HELP if line == "/help" else f"unknown command {line!r}: {HELP}")

    def turn(self, text: str) -> None:
        """Send one message and stream its answer. Ctrl-C stops it and keeps its text so far."""
        said: list[dict[str, str]] = []
        if not self.messages and self.system is not None:
            said.append({"role": "system", "content": self.system})
        said.append({"role": "user", "content": text})
        texts: list[str] = []
        try:
            asyncio.run(self._answer([*self.messages, *said], texts))
        except RequestError as error:  # too long, or refused by the template
            self._note(f"{error}; the message is left out (/reset forgets the conversation)")
            return
        except KeyboardInterrupt:
            self._note("stopped; the text so far stays in the conversation")
        self.messages += [*said, {"role": "assistant", "content": "".join(texts)}]

    async def _answer(self, messages: list[dict[str, str]], texts: list[str]) -> None:
        engine = self.engine
        given = {name: value for name, value in self.sampling().items() if value is not None}
        ids, sampling = engine.chat_prompt(messages, given)
        (request,) = engine.requests(input_ids=ids, sampling_params=sampling)
        await stream_answer(
            engine, request, painter=self.painter, out=self.out, notes=self.notes, texts=texts
        )

    def _note(self, text: str) -> None:
        self.notes.write(f"{text}\n")
        self.notes.flush()
