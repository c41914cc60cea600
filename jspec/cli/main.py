"""The command line: `jspec serve`, `generate`, `chat`, `batch`, `bench` and the others. Errors
become one line and an exit status: 2 for wrong usage, 1 for a failure, 130 after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jspec import __version__
from jspec.cli.batch import run_batch_command
from jspec.cli.bench import run_bench
from jspec.cli.chat import run_chat
from jspec.cli.convert import run_convert
from jspec.cli.doctor import run_doctor
from jspec.cli.flags import FlagParser, add_flags, markdown_table, named_model, parse_flags
from jspec.cli.generate import run_generate
from jspec.cli.info import run_info
from jspec.cli.verify import run_verify
from jspec.engine.gc_control import collect_seldom
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.errors import (
    ConfigError,
    JspecError,
    NoCheckpointError,
    RequestError,
    reason_of,
)

INTERRUPTED = 130  # exit status after Ctrl-C
USAGE = """usage: jspec COMMAND [flags]

  serve       serve a model pair over HTTP; jspec serve --help lists the flags
  generate    complete a prompt in the terminal; jspec generate --help
  chat        chat in the terminal; jspec chat --help
  batch       answer a file of requests (OpenAI batch format); jspec batch --help
  bench       measure plain and speculative decoding, or a server under load; jspec bench --help
  info        describe a checkpoint and how to serve it; jspec info --help
  convert     write a checkpoint's weights as safetensors or orbax; jspec convert --help
  train-draft train a draft head for a target on JSON lines; jspec train-draft --help
  verify      replay prompts with and without speculation; jspec verify --help
  doctor      explain why speculation does not pay; jspec doctor --help
  flags       print every flag of serve as Markdown, including refused ones
  version     print the version
  help        print this
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("", [])
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "serve": run_serve,
        "generate": run_generate,
        "chat": run_chat,
        "batch": run_batch_command,
        "bench": run_bench,
        "info": run_info,
        "convert": run_convert,
        "train-draft": run_train_draft,
        "verify": run_verify,
        "doctor": run_doctor,
        "flags": lambda words: _alone("flags", words) or _say(markdown_table()),
        "version": lambda words: _alone("version", words) or _say(f"jspec {__version__}"),
        "--version": lambda _: _say(f"jspec {__version__}"),
        "help": lambda _: _say(USAGE.rstrip()),
        "--help": lambda _: _say(USAGE.rstrip()),
        "-h": lambda _: _say(USAGE.rstrip()),
    }
    if command not in commands:
        what = f"unknown command {command!r}" if command else "a command is missing"
        print(f"jspec: {what}\n{USAGE}", end="", file=sys.stderr)
        return 2
    collect_seldom()
    return _guarded(lambda: commands[command](rest))


def _alone(command: str, words: Sequence[str]) -> int:
    if words and words[0] not in ("-h", "--help"):
        raise ConfigError(f"unexpected argument {words[0]!r}; jspec {command} takes none")
    return 0


def _say(text: str) -> int:
    print(text)
    return 0


def _guarded(run: Callable[[], int]) -> int:
    try:
        status = run()
        sys.stdout.flush()  # here, where an error can still be reported
        return status
    except (ConfigError, NoCheckpointError, RequestError) as error:
        print(f"jspec: error: {error}", file=sys.stderr)
        return 2
    except JspecError as error:
        print(f"jspec: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()  # the reader is gone
        return 1
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"jspec: failed: {where}{reason_of(error)}", file=sys.stderr)
        _forget_output()
        return 1


def _forget_output() -> None:
    """Discard buffered output that has no reader, so that flushing at exit raises no error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_serve(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="jspec serve",
        allow_abbrev=False,
        description="Serve a model pair over HTTP. Without --model-path, the bundled pair.",
        epilog="jspec flags lists SGLang's flags that are accepted or refused.",
    )
    add_flags(parser)
    _, settings = parse_flags(parser, named_model(argv))
    os.environ.update(share_for_server(os.environ))  # jax reads these when its backend starts
    with interruptible():
        from jspec.server.serve import serve

    serve(settings)
    return 0


def run_train_draft(argv: Sequence[str]) -> int:
    with interruptible():
        from jspec.cli.train_draft import run_train_draft as run

    return run(argv)


def run(argv: Sequence[str] | None = None) -> NoReturn:
    status = main(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another would print a traceback
    if status == INTERRUPTED:
        # After an interrupt XLA may still compile in a thread and crash while jax shuts down.
        # Children end with their pipes.
        with contextlib.suppress(OSError):  # the reader is gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
