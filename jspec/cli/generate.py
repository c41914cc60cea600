"""`jspec generate [PROMPT]`: complete a prompt in the terminal, with accepted drafts marked."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.cli.terminal import (
    ENGINE_GROUPS,
    Painter,
    Screen,
    Summary,
    add_sampling_flags,
    choose_style,
    sampling_asked,
    seeded,
    start_one_stream,
    stream_answer,
)
from jspec.errors import RequestError
from jspec.files.json_files import utf8_fault
from jspec.messages.request import SamplingParams

if TYPE_CHECKING:
    from jspec.serving.engine import Engine


def run_generate(argv: Sequence[str]) -> int:
    parser = FlagParser(
        prog="jspec generate",
        allow_abbrev=False,
        description="Complete a prompt in the terminal; accepted draft tokens are highlighted.",
    )
    parser.add_argument("prompt", nargs="?", help="Text to continue; unset: standard input")
    add_sampling_flags(parser, most_tokens="128")
    add_flags(parser, groups=ENGINE_GROUPS)
    options, settings = parse_flags(parser, argv)
    asked = sampling_asked(options)
    prompt = read_prompt(options.prompt, sys.stdin)
    with start_one_stream(settings) as engine:
        sampling = SamplingParams.from_mapping(
            seeded(asked, settings), defaults=engine.sampling_defaults
        )
        painter = Painter(choose_style(sys.stdout, plain_marks=options.plain_marks))
        asyncio.run(
            generate(engine, prompt, sampling, painter=painter, out=sys.stdout, notes=sys.stderr)
        )
    return 0


def read_prompt(given: str | None, source: io.TextIOBase | Screen) -> str:
    """Return the prompt, or `source` without a final newline. Raises RequestError if empty."""
    if given is None and not source.isatty():
        try:
            given = source.read().removesuffix("\n")  # type: ignore[union-attr]
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt on standard input {utf8_fault(error)}") from error
    if not given:
        raise RequestError("there is no prompt; expected text as an argument or on standard input")
    return given


async def generate(
    engine: Engine,
    prompt: str,
    sampling: SamplingParams,
    *,
    painter: Painter,
    out: Screen,
    notes: Screen,
) -> Summary:
    """Stream one completion after its prompt and close the engine, even if cancelled."""
    (request,) = engine.requests(prompt=prompt, sampling_params=sampling)
    out.write(painter.prompt(prompt))
    out.flush()
    try:
        return await stream_answer(engine, request, painter=painter, out=out, notes=notes)
    finally:
        await engine.close()
