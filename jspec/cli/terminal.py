"""Streaming text to a terminal, shared by `jspec generate` and `jspec chat`."""

from __future__ import annotations

import argparse
import enum
import io
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jspec.cli.flag_table import GROUPS
from jspec.engine.interrupts import interruptible
from jspec.engine.memory.device_memory import share_for_server
from jspec.messages.request import Request, SamplingParams, SpecCounters
from jspec.server.server_args import Settings
from jspec.text.spec_tokens import SpecToken, SpecTokenTracker

if TYPE_CHECKING:
    from jspec.engine.programs.compilation import Progress
    from jspec.serving.engine import Engine

SEED_BITS = 32  # of a random seed: enough to avoid repeats, few enough to type
ENGINE_GROUPS = tuple(title for title in GROUPS if title != "Server")
# Flags' names in argparse, and the sampling parameters that they set.
SAMPLED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "seed": "sampling_seed",
    "max_new_tokens": "max_new_tokens",
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, most_tokens: str) -> None:
    section = parser.add_argument_group("Sampling")
    section.add_argument(
        "--temperature",
        type=float,
        help="Temperature; 0 is greedy; unset: the model's own, 0.7 for the bundled pair "
        "(generation_config.json), 1 if it has none",
    )
    section.add_argument(
        "--top-p", type=float, help="Sample from the most likely tokens with this total probability"
    )
    section.add_argument("--top-k", type=int, help="Sample from the k most likely tokens")
    section.add_argument(
        "--min-p",
        type=float,
        help="Sample from tokens with at least this probability relative to the most likely one",
    )
    section.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="Stop string, which is left out of the text; may be repeated",
    )
    section.add_argument("--max-new-tokens", type=int, help=f"Maximum new tokens ({most_tokens})")
    section.add_argument(
        "--seed", type=int, help="Sampling seed; the same seed gives the same text"
    )
    section.add_argument(
        "--plain-marks",
        action="store_true",
        help="Mark accepted drafts with ‹ and › instead of colour",
    )


def sampling_asked(options: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(options, flag) for flag, name in SAMPLED.items()}
    SamplingParams.from_mapping(asked)  # raises before anything loads
    return asked


class Style(enum.Enum):
    COLOR = "color"
    MARKS = "marks"
    NONE = "none"


_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Painter:
    """Formats text: accepted drafts are green (COLOR), or enclosed in ‹ and › (MARKS)."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._is_open = False

    def prompt(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self._style is Style.COLOR else text

    def paint(self, pieces: Iterable[SpecToken]) -> str:
        out = []
        for piece in pieces:
            if piece.accepted != self._is_open:
                out.append(self._switch())
            out.append(piece.text)
        return "".join(out)

    def close(self) -> str:
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
    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    num_tokens: int
    seconds: float  # total, prompt included
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
        if self.counters.full_verify_ct:
            line += f", acceptance length {self.counters.acceptance_length:.2f}"
        seed = f", seed {self.seed}" if self.temperature else ""
        return f"{line}, temperature {self.temperature:g}{seed}"


def start_one_stream(settings: Settings) -> Engine:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for warning in settings.warnings:
        print(f"jspec: warning: {warning}", file=sys.stderr)
    os.environ.update(share_for_server(os.environ))  # jax reads these when its backend starts
    with interruptible():
        from jspec.server.serve import measurement_warnings
        from jspec.serving.engine import Engine

        for warning in measurement_warnings(settings.engine_args):
            print(f"jspec: warning: {warning}", file=sys.stderr)
        return Engine(progress=_show_progress(sys.stderr), **one_stream(settings.engine))


def seeded(asked: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    if asked["sampling_seed"] is not None or settings.engine_args.random_seed is not None:
        return dict(asked)
    return {**asked, "sampling_seed": secrets.randbits(SEED_BITS)}


def one_stream(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine arguments that compile the minimum for one sequence, overridden by `given`."""
    small = {"max_running_requests": 1, "chunked_prefill_size": 32, "disable_logprobs": True}
    return {**small, **given}


def choose_style(out: Screen, *, plain_marks: bool) -> Style:
    if plain_marks:
        return Style.MARKS
    return Style.COLOR if out.isatty() and not os.environ.get("NO_COLOR") else Style.NONE


def _show_progress(out: Screen) -> Progress:
    def progress(done: int, total: int, what: str, how: str) -> None:
        if out.isatty():
            out.write(f"\r\x1b[K{how} {done}/{total}: {what}" if done < total else "\r\x1b[K")
            out.flush()

    return progress


async def stream_answer(
    engine: Engine,
    request: Request,
    *,
    painter: Painter,
    out: Screen,
    notes: Screen,
    texts: list[str] | None = None,
) -> Summary:
    """Stream an answer to `out` and append it to `texts`; summary to `notes`, even if cancelled."""
    tracker = SpecTokenTracker(engine.tokenizer)
    started, num_tokens, counters = time.monotonic(), 0, SpecCounters()
    first, stream = started, None
    try:
        (stream,) = await engine.submit((request,))
        async for chunk in stream:
            first = time.monotonic() if num_tokens == 0 else first
            num_tokens += len(chunk.new_ids)
            counters = chunk.counters
            if texts is not None:
                texts.append(chunk.text)
            out.write(painter.paint(tracker.push(chunk)))
            out.flush()
    finally:
        if stream is not None:
            await stream.aclose()
        summary = Summary(
            num_tokens=num_tokens,
            seconds=time.monotonic() - started,
            first_seconds=first - started,
            counters=counters,
            temperature=request.sampling.temperature,
            seed=request.seed,
        )
        out.write(painter.close() + "\n")
        out.flush()
        notes.write(f"{summary}\n")
    return summary
