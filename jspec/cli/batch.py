"""`jspec batch IN.jsonl OUT.jsonl`: answer a file of requests without a server."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.cli.batch_files.batch_file import (
    AnswerFile,
    Line,
    count_lines,
    object_in,
    read_lines,
    retried_lines,
)
from jspec.cli.flag_table import GROUPS
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.errors import ConfigError
from jspec.server.server_args import Settings
from jspec.serving.batch_progress import BatchProgress

if TYPE_CHECKING:
    from jspec.serving.engine import Engine

NO_LINE_ANSWERED = 3  # exit status
ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")
REPLICA_FLAGS = ("num_replicas", "num_gpus")  # of ReplicaArgs
# Server arguments that affect answers.
ANSWER_ARGUMENTS = ("served_model_name", "tool_call_parser", "reasoning_parser")


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="jspec batch",
        allow_abbrev=False,
        description="Answers OpenAI's batch lines (custom_id, method, url, body) from one file "
        "into another, in order. The same command continues after an interruption.",
        epilog="A line without a seed gets one from --random-seed (0) and its number. Exit status: "
        "0 if at least one line was answered (others have their error), 1 if the run failed, 2 for "
        "invalid arguments, 3 if every line has an error, 130 after Ctrl-C.",
    )
    parser.add_argument("requests", metavar="IN.jsonl", help="One request per line")
    parser.add_argument("answers", metavar="OUT.jsonl", help="One answer per line")
    parser.add_argument(
        "--retry-errors",
        metavar="EARLIER.jsonl",
        help="Copy the answers of an earlier run over IN.jsonl and run only its errors again",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="Run replicas on a Ray cluster; without an address on this machine's, or a new one",
    )
    parser.add_argument("--num-replicas", type=int, metavar="N", help="Replicas with --ray (1)")
    parser.add_argument("--num-gpus", type=float, metavar="N", help="GPUs of each with --ray")
    add_flags(parser, groups=ENGINE_GROUPS, also=ANSWER_ARGUMENTS)
    return parser


def run_batch_command(argv: Sequence[str]) -> int:
    """Answer a file, continuing after an interruption; return 0 if any line succeeded, else 3."""
    options, settings = parse_flags(_parser(), argv)
    for warning in settings.warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)
    of_replicas = _of_replicas(options)
    requests, path = Path(options.requests), Path(options.answers)
    earlier = None if options.retry_errors is None else Path(options.retry_errors)
    total = count_lines(requests)
    if earlier is not None:
        _check_earlier(earlier, requests, path, total)
    answers = AnswerFile(path, requests)
    with closing(answers):
        if answers.num_written:
            print(f"{path}: {_there(answers, total)}", file=sys.stderr)
        _copy_first(requests, earlier, answers)
        if answers.num_written < total:
            created = _created([path] if earlier is None else [path, earlier])
            run = Run(
                settings=settings,
                requests=requests,
                answers=answers,
                total=total,
                created=created,
                earlier=earlier,
            )
            if options.ray is None:
                run.with_engine()
            else:
                run.on_ray(options.ray or None, of_replicas)
    if total and not answers.num_well:
        print(f"jspec: failed: {path}: no line was answered; each has its error", file=sys.stderr)
        return NO_LINE_ANSWERED
    return 0


def _lines(requests: Path, earlier: Path | None) -> Generator[Line]:
    return read_lines(requests) if earlier is None else retried_lines(requests, earlier)


def _check_earlier(earlier: Path, requests: Path, path: Path, total: int) -> None:
    """Report how many lines are run again. Raises ConfigError before anything is written."""
    if path.exists() and earlier.exists() and path.samefile(earlier):
        raise ConfigError(f"answers would go to {str(path)!r}, the earlier ones; expected another")
    num_again = sum(line.answered is None for line in retried_lines(requests, earlier))
    print(f"{earlier}: {num_again} of {total} lines are run again", file=sys.stderr)


def _copy_first(requests: Path, earlier: Path | None, answers: AnswerFile) -> None:
    """Copy the answers that need no engine, so that none starts if no line is left to run."""
    with closing(_lines(requests, earlier)) as lines:
        for line in itertools.islice(lines, answers.num_written, None):
            if line.answered is None:
                return
            answers.write(line.answered)


def _there(answers: AnswerFile, total: int) -> str:
    lines, count = "line" if total == 1 else "lines", answers.num_written
    said = f"{count} of {total} {lines} {'is' if count == 1 else 'are'} there"
    if answers.first_error is None:
        return said
    errors = "an error" if answers.num_errors == 1 else "errors"
    return (
        f"{said}, {answers.num_errors} of them {errors}, the first in line {answers.first_error}; "
        "they are kept: --retry-errors with this file and another OUT.jsonl runs them again"
    )


def _created(paths: Sequence[Path]) -> int:
    for path in paths:
        with path.open("rb") as file:
            for text in file:
                response = object_in(text).get("response")
                body = response.get("body") if isinstance(response, dict) else None
                if isinstance(body, dict):
                    found = body.get("created", body.get("created_at"))
                    if isinstance(found, int):
                        return found
    return int(time.time())


def _of_replicas(options: Namespace) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in REPLICA_FLAGS}
    given = {name: value for name, value in values.items() if value is not None}
    if given and options.ray is None:
        name, value = next(iter(given.items()))
        raise ConfigError(f"{name} is {value} without --ray; expected --ray with it")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    settings: Settings
    requests: Path
    answers: AnswerFile
    total: int
    created: int
    earlier: Path | None

    def with_engine(self) -> None:
        os.environ.update(share_for_server(os.environ))
        with interruptible():
            from jspec.engine.gc_control import freeze_heap
            from jspec.serving.engine import Engine

            engine = Engine(**self.settings.engine)
            freeze_heap()
        with engine:
            asyncio.run(self._answer(engine))

    def on_ray(self, address: str | None, of_replicas: Mapping[str, Any]) -> None:
        from jspec.distributed.ray_batch import replicas_on_ray
        from jspec.distributed.remote_engine import remote_engine

        engine = self.settings.engine
        with replicas_on_ray({**engine, **of_replicas}, address=address) as replicas:

            async def answer() -> None:
                async with remote_engine(replicas, engine) as remote:
                    await self._answer(remote, num_engines=of_replicas.get("num_replicas", 1))

            asyncio.run(answer())

    async def _answer(self, engine: Engine, *, num_engines: int = 1) -> None:
        from jspec.cli.batch_files.batch_run import BatchSettings, run_batch, window_of

        progress = BatchProgress(
            sys.stderr,
            total=self.total,
            before=self.answers.num_written,
            errors_before=self.answers.num_errors,
            read_stats=lambda: engine.stats,
        )
        of_run = BatchSettings(
            seed=self.settings.engine_args.random_seed or 0,
            created=self.created,
            window=num_engines * window_of(engine),
            server=self.settings.server,
        )
        with closing(progress), closing(_lines(self.requests, self.earlier)) as lines:
            left = itertools.islice(lines, self.answers.num_written, None)
            await run_batch(engine, left, self.answers, of_run, on_answer=progress.add)
