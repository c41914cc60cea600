"""The command line: `jspec serve`, `generate`, `batch`, `bench`, `verify`, `doctor` and the others.

It turns words into settings, and errors into one line and an exit status: 2 for what was asked
wrongly, 1 for what failed, 130 after Ctrl-C. Engine and server load only when a command needs them.
"""

from __future__ import annotations

import asyncio
import enum
import io
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jspec import __version__
from jspec.cli_batch import run_batch_command
from jspec.cli_bench import run_bench
from jspec.cli_convert import run_convert
from jspec.cli_doctor import run_doctor
from jspec.cli_info import run_info
from jspec.cli_verify import run_verify
from jspec.core.errors import ConfigError, JspecError, RequestError
from jspec.core.request import SamplingParams, SpecCounters
from jspec.engine.device_memory import share_for_server
from jspec.engine.interrupts import interruptible
from jspec.server.flag_table import GROUPS
from jspec.server.flags import FlagParser, Settings, add_flags, markdown_table, parse_flags
from jspec.server.spec_tokens import SpecToken, SpecTokenTracker

if TYPE_CHECKING:
    from jspec.api import Engine
    from jspec.engine.compilation import Progress

USAGE = """usage: jspec COMMAND [flags]

  serve       serve a model pair over HTTP; jspec serve --help lists the flags
  generate    complete a prompt in the terminal; jspec generate --help
  batch       answer a file of requests (OpenAI's batch format); jspec batch --help
  bench       plain and speculative speed side by side, or a server under load; jspec bench --help
  info        what a checkpoint is and how it is served; jspec info --help
  convert     write a checkpoint's weights as safetensors or orbax; jspec convert --help
  train-draft train a draft head for a target on JSON lines; jspec train-draft --help
  verify      replay prompts with and without speculation; jspec verify --help
  doctor      say why speculation does not pay; jspec doctor --help
  flags       every flag of serve as Markdown, also those that are refused
  version     print the version
  help        print this
"""
SEED_BITS = 32  # of a seed drawn here: enough not to meet again, few enough to type
ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("", [])
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": run_serve,
        "generate": run_generate,
        "batch": run_batch_command,
        "bench": run_bench,
        "info": run_info,
        "convert": run_convert,
        "train-draft": run_train_draft,
        "verify": run_verify,
        "doctor": run_doctor,
        "flags": lambda _: _say(markdown_table()),
        "version": lambda _: _say(f"jspec {__version__}"),
        "--version": lambda _: _say(f"jspec {__version__}"),
        "help": lambda _: _say(USAGE.rstrip()),
        "--help": lambda _: _say(USAGE.rstrip()),
        "-h": lambda _: _say(USAGE.rstrip()),
    }
    if command not in commands:
        what = f"unknown command {command!r}" if command else "a command is missing"
        print(f"jspec: {what}\n{USAGE}", end="", file=sys.stderr)
        return 2
    return _guarded(lambda: commands[command](rest))


def _say(text: str) -> int:
    print(text)
    return 0


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except (ConfigError, RequestError) as error:
        print(f"jspec: error: {error}", file=sys.stderr)
        return 2
    except JspecError as error:
        print(f"jspec: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jspec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone; without this, Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run_serve(argv: Sequence[str]) -> int:
    """`jspec serve`, the same as `python run_server.py`."""
    parser = FlagParser(
        prog="jspec serve",
        allow_abbrev=False,
        description="Serves a model pair over HTTP. Without --model-path, the bundled pair.",
        epilog="Flags of SGLang that are accepted or refused are listed by: jspec flags",
    )
    add_flags(parser)
    _, settings = parse_flags(parser, named_model(argv))
    os.environ.update(share_for_server(os.environ))  # jax reads it when its backend starts
    with interruptible():
        from jspec.server.serve import serve

    serve(settings)
    return 0


def named_model(argv: Sequence[str]) -> Sequence[str]:
    """A first word that is no flag is the model, as vLLM's users write it.

    In:  DIR --port 0    Out: --model-path DIR --port 0
    """
    if not argv or argv[0].startswith("-"):
        return argv
    for word in argv[1:]:
        if word.split("=", 1)[0] in ("--model-path", "--model"):
            raise ConfigError(f"the model is {argv[0]!r} and {word!r}; expected one of them")
    return ["--model-path", *argv]


def run_train_draft(argv: Sequence[str]) -> int:
    """`jspec train-draft`."""
    with interruptible():
        from jspec.cli_train_draft import run_train_draft as run

    return run(argv)


# generate


class Style(enum.Enum):
    """How accepted draft tokens stand out from the target's own."""

    COLOR = "color"
    MARKS = "marks"
    NONE = "none"


_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Painter:
    """Turns pieces of text into what the terminal shows.

    COLOR: accepted drafts are green. MARKS: ‹ and › stand around runs of them.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._is_open = False

    def prompt(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self._style is Style.COLOR else text

    def paint(self, pieces: Iterable[SpecToken]) -> str:
        """The pieces in the painter's style; a run of accepted pieces is one run."""
        out = []
        for piece in pieces:
            if piece.accepted != self._is_open:
                out.append(self._switch())
            out.append(piece.text)
        return "".join(out)

    def close(self) -> str:
        """What ends an open run."""
        return self._switch() if self._is_open else ""

    def _switch(self) -> str:
        self._is_open = not self._is_open
        match self._style:
            case Style.COLOR:
                return _GREEN if self._is_open else _RESET
            case Style.MARKS:
                return "‹" if self._is_open else "›"
            case Style.NONE:
                return ""


class Screen(Protocol):
    """Where text goes: standard output, or a test's buffer."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one generation came to, and how to repeat it.

    seconds: prompt included; first_seconds: until the prompt was read and its token was there.
    """

    num_tokens: int
    seconds: float
    first_seconds: float
    counters: SpecCounters
    temperature: float
    seed: int

    def __str__(self) -> str:
        plural = "" if self.num_tokens == 1 else "s"
        line = f"{self.num_tokens} token{plural} in {self.seconds:.2f} s"
        if self.num_tokens > 1:
            rate = (self.num_tokens - 1) / (self.seconds - self.first_seconds)
            line += f", {rate:.1f} tokens/s after the first"
        if self.counters.verify_ct:
            line += f", acceptance length {self.counters.acceptance_length:.2f}"
        seed = f", seed {self.seed}" if self.temperature else ""
        return f"{line}, temperature {self.temperature:g}{seed}"


def run_generate(argv: Sequence[str]) -> int:
    """`jspec generate [PROMPT]`."""
    parser = FlagParser(
        prog="jspec generate",
        allow_abbrev=False,
        description="Completes a prompt in the terminal; accepted draft tokens stand out.",
    )
    parser.add_argument("prompt", nargs="?", help="Text to continue; unset: standard input")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 is greedy; unset: the model's own, 0.7 for the bundled pair "
        "(generation_config.json), 1 if it has none",
    )
    parser.add_argument("--max-new-tokens", type=int, help="Most new tokens (128)")
    parser.add_argument("--seed", type=int, help="The same seed gives the same text")
    parser.add_argument(
        "--plain-marks", action="store_true", help="‹ and › around accepted drafts, no colour"
    )
    add_flags(parser, groups=ENGINE_GROUPS)
    options, settings = parse_flags(parser, argv)
    asked = {
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "sampling_seed": options.seed,
    }
    SamplingParams.from_mapping(asked)  # what is wrong is said before anything loads
    prompt = read_prompt(options.prompt, sys.stdin)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for warning in settings.warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)
    os.environ.update(share_for_server(os.environ))
    with interruptible():
        engine, sampling = _start_one_stream(settings, asked)
    with engine:
        style = choose_style(sys.stdout, plain_marks=options.plain_marks)
        asyncio.run(
            generate(
                engine, prompt, sampling, painter=Painter(style), out=sys.stdout, notes=sys.stderr
            )
        )
    return 0


def _start_one_stream(
    settings: Settings, asked: Mapping[str, Any]
) -> tuple[Engine, SamplingParams]:
    """An engine for one stream, and how it samples: as asked, else as the model's defaults."""
    from jspec.api import Engine
    from jspec.server.serve import measurement_warnings

    for warning in measurement_warnings(settings.engine_args):
        print(f"jspec: warning: {warning}", file=sys.stderr)
    if asked["sampling_seed"] is None and settings.engine_args.random_seed is None:
        asked = {**asked, "sampling_seed": secrets.randbits(SEED_BITS)}
    engine = Engine(progress=_show_progress(sys.stderr), **one_stream(settings.engine))
    return engine, SamplingParams.from_mapping(asked, defaults=engine.sampling_defaults)


def one_stream(given: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments with which as little is compiled as one sequence needs, unless `given`.

    One row, and one size of prefill chunk: a first start waits for three programs. A small chunk
    costs a long prompt more steps, which are short beside another compilation.
    """
    small = {"max_running_requests": 1, "chunked_prefill_size": 32, "disable_logprobs": True}
    return {**small, **given}


def read_prompt(given: str | None, source: io.TextIOBase | Screen) -> str:
    """The prompt, or all of `source` less one final newline. Raises RequestError for none."""
    if given is None and not source.isatty():
        given = source.read().removesuffix("\n")  # type: ignore[union-attr]
    if not given:
        raise RequestError("there is no prompt; expected text as an argument or on standard input")
    return given


def choose_style(out: Screen, *, plain_marks: bool) -> Style:
    """Colour on a terminal unless NO_COLOR is set (no-color.org)."""
    if plain_marks:
        return Style.MARKS
    return Style.COLOR if out.isatty() and not os.environ.get("NO_COLOR") else Style.NONE


def _show_progress(out: Screen) -> Progress:
    """One line that is rewritten on a terminal; nothing elsewhere."""

    def progress(done: int, total: int, what: str, how: str) -> None:
        if out.isatty():
            out.write(f"\r\x1b[K{how} {done}/{total}: {what}" if done < total else "\r\x1b[K")
            out.flush()

    return progress


async def generate(
    engine: Engine,
    prompt: str,
    sampling: SamplingParams,
    *,
    painter: Painter,
    out: Screen,
    notes: Screen,
) -> Summary:
    """Streams one completion to `out`, and its summary to `notes`; also when it is cancelled."""
    (request,) = engine.requests(prompt=prompt, sampling_params=sampling)
    tracker = SpecTokenTracker(engine.tokenizer)
    started, num_tokens, counters = time.monotonic(), 0, SpecCounters()
    first = started
    (stream,) = await engine.submit((request,))
    out.write(painter.prompt(prompt))
    out.flush()
    try:
        async for chunk in stream:
            first = time.monotonic() if num_tokens == 0 else first
            num_tokens += len(chunk.new_ids)
            counters = chunk.counters
            out.write(painter.paint(tracker.push(chunk)))
            out.flush()
    finally:
        await stream.aclose()
        summary = Summary(
            num_tokens=num_tokens,
            seconds=time.monotonic() - started,
            first_seconds=first - started,
            counters=counters,
            temperature=sampling.temperature,
            seed=request.seed,
        )
        out.write(painter.close() + "\n")
        out.flush()
        notes.write(f"{summary}\n")
        await engine.close()
    return summary


if __name__ == "__main__":
    sys.exit(main())
