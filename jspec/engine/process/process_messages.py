"""Messages between a server and its engine process, over two pipes: one i32 array per step and
direction, and rare calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import JspecError

MODULE = "jspec.engine.process.engine_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """The first message.

    settings: jax's, as the starting thread sees them.
    log_level: of the process's log on the shared standard error; None: Python's default.
    """

    args: EngineArgs
    settings: dict[str, Any]
    log_level: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The built runner.

    programs: with the seconds of a step, where measured.
    num_wanted: number of programs once all are built.
    """

    config: ResolvedConfig
    limits: ServeLimits
    vocab_size: int
    programs: dict[ProgramKey, float | None]
    num_wanted: int
    device_kind: str
    has_draft: bool
    draft_is_in_target: bool


class Progressed(NamedTuple):
    """A program is ready: the arguments of `compilation.Progress`."""

    done: int
    total: int
    what: str
    how: str


class Enqueue(NamedTuple):
    """Run a program.

    number: id of its output, for a Read (is_read) or as an operand of later programs (is_kept), the
    last of which lists it in `drops`.
    """

    number: int
    program: str
    operands: tuple[np.ndarray | int, ...]
    is_read: bool
    is_kept: bool = False
    drops: tuple[int, ...] = ()


class Read(NamedTuple):
    """Wait for the output of that number and send it."""

    number: int


class Output(NamedTuple):
    """programs: as Started's, if they are others than when the last output was sent."""

    array: np.ndarray
    programs: dict[ProgramKey, float | None] | None


class Call(NamedTuple):
    """A rare call, by method name of `engine_process.Calls`."""

    name: str
    args: tuple[Any, ...]


class Failed(NamedTuple):
    """A failure. error: the exception itself if it is a JspecError."""

    text: str
    error: JspecError | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        known = error if isinstance(error, JspecError) else None
        return cls(f"{type(error).__name__}: {error}", known)
