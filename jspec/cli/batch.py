"""`jspec batch IN.jsonl OUT.jsonl`: answer a file of requests without a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from jspec.cli.batch_files.batch_file import AnswerFile, count_lines, read_lines
from jspec.cli.flag_table import GROUPS
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.server.server_args import Settings
from jspec.serving.batch_progress import BatchProgress

ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")
# Server arguments that affect answers.
ANSWER_ARGUMENTS = ("served_model_name", "tool_call_parser", "reasoning_parser")


def run_batch_command(argv: Sequence[str]) -> int:
    """Answer a file, continuing after an interruption; return 0 if any line succeeded, else 1."""
    parser = FlagParser(
        prog="jspec batch",
        allow_abbrev=False,
        description="Answers OpenAI's batch lines (custom_id, method, url, body) from one file "
        "into another, in order. The same command continues after an interruption.",
        epilog="A line without a seed gets one from --random-seed (0) and its number. Exit status: "
        "0 if at least one line was answered (others have their error), 1 if none was or the run "
        "failed, 2 for invalid arguments, 130 after Ctrl-C.",
    )
    parser.add_argument("requests", metavar="IN.jsonl", help="One request per line")
    parser.add_argument("answers", metavar="OUT.jsonl", help="One answer per line")
    add_flags(parser, groups=ENGINE_GROUPS, also=ANSWER_ARGUMENTS)
    options, settings = parse_flags(parser, argv)
    for warning in settings.warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)
    requests, path = Path(options.requests), Path(options.answers)
    total = count_lines(requests)
    answers = AnswerFile(path, requests)
    with closing(answers):
        if answers.num_written:
            print(f"{path}: {_there(answers, total)}", file=sys.stderr)
        if answers.num_written < total:
            _answer(settings, requests, answers, total=total, created=_created(path))
    if total and not answers.num_well:
        print(f"jspec: failed: {path}: no line was answered; each has its error", file=sys.stderr)
        return 1
    return 0


def _there(answers: AnswerFile, total: int) -> str:
    lines, count = "line" if total == 1 else "lines", answers.num_written
    said = f"{count} of {total} {lines} {'is' if count == 1 else 'are'} there"
    if answers.first_error is None:
        return said
    errors = "an error" if answers.num_errors == 1 else "errors"
    return (
        f"{said}, {answers.num_errors} of them {errors}, the first in line {answers.first_error}; "
        "they are kept: to run them again, cut the file before that line and repeat the command"
    )


def _created(path: Path) -> int:
    with path.open(encoding="utf-8") as file:
        for text in file:
            response = json.loads(text).get("response")
            body = response.get("body") if isinstance(response, dict) else None
            if isinstance(body, dict) and isinstance(body.get("created"), int):
                return int(body["created"])
    return int(time.time())


def _answer(
    settings: Settings, requests: Path, answers: AnswerFile, *, total: int, created: int
) -> None:
    os.environ.update(share_for_server(os.environ))
    with interruptible():
        from jspec.cli.batch_files.batch_run import BatchSettings, run_batch, window_of
        from jspec.engine.gc_control import freeze_heap
        from jspec.serving.engine import Engine

        engine = Engine(**settings.engine)
        freeze_heap()
    with engine:
        progress = BatchProgress(
            sys.stderr,
            total=total,
            before=answers.num_written,
            errors_before=answers.num_errors,
            read_stats=lambda: engine.stats,
        )
        of_run = BatchSettings(
            seed=settings.engine_args.random_seed or 0,
            created=created,
            window=window_of(engine),
            server=settings.server,
        )
        with closing(progress), closing(read_lines(requests)) as lines:
            left = itertools.islice(lines, answers.num_written, None)
            asyncio.run(run_batch(engine, left, answers, of_run, on_answer=progress.add))
