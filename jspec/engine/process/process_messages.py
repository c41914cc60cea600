"""Messages between a server and its engine process: arrays of steps, and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import JspecError

MODULE = "jspec.engine.process.engine_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    args: EngineArgs
    settings: dict[str, Any]  # jax's, as the starting thread sees them
    log_level: int | None  # of the shared standard error; None: Python's default
    place: HostPlace | None = None  # None: a single host


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    config: ResolvedConfig
    limits: ServeLimits
    vocab_size: int
    programs: dict[ProgramKey, float | None]  # with the seconds of a step, where measured
    num_wanted: int  # number of programs once all are built
    device_kind: str
    has_draft: bool
    draft_is_in_target: bool


class Progressed(NamedTuple):
    """A program is ready; the arguments of `compilation.Progress`."""

    done: int
    total: int
    what: str
    how: str


class Enqueue(NamedTuple):
    number: int  # names the output, for a Read (is_read) or later programs (is_kept)
    program: str
    operands: tuple[np.ndarray | int, ...]
    is_read: bool
    is_kept: bool = False
    drops: tuple[int, ...] = ()  # kept outputs that are not needed after this program


class Read(NamedTuple):
    number: int


class Output(NamedTuple):
    array: np.ndarray
    programs: dict[ProgramKey, float | None] | None  # like Started's; None: not changed


class Call(NamedTuple):
    """A rare call of a method of `engine_process.Calls`."""

    name: str
    args: tuple[Any, ...]


class Failed(NamedTuple):
    text: str
    error: JspecError | None  # the exception itself if it is a JspecError

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        known = error if isinstance(error, JspecError) else None
        return cls(f"{type(error).__name__}: {error}", known)


class Answer(NamedTuple):
    """The answer to a Call that was sent among steps."""

    failed: Failed | None = None
