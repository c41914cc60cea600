"""What a server says to the process that runs its model, and what that answers.

Two pipes: over one go steps, each as one i32 array, and one back; over the other everything that is
rare. It knows neither side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.programs.program_keys import ProgramKey
from jspec.errors import JspecError

MODULE = "jspec.engine.process.engine_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """The first message. settings: jax's, as the starting thread has them. log_level: of what the
    process logs to the common standard error; None: as Python does."""

    args: EngineArgs
    settings: dict[str, Any]
    log_level: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What was built. programs: with the seconds of a step, where measured. num_wanted: programs
    there will be in the end."""

    config: ResolvedConfig
    limits: ServeLimits
    vocab_size: int
    programs: dict[ProgramKey, float | None]
    num_wanted: int
    device_kind: str
    has_draft: bool
    draft_is_in_target: bool


class Progressed(NamedTuple):
    """A program is there: the arguments of `compilation.Progress`."""

    done: int
    total: int
    what: str
    how: str


class Enqueue(NamedTuple):
    """Run a program. number: of its output, by which that is asked for, if it is (is_read), or is
    an operand of later programs (is_kept), the last of which drops it."""

    number: int
    program: str
    operands: tuple[np.ndarray | int, ...]
    is_read: bool
    is_kept: bool = False
    drops: tuple[int, ...] = ()


class Read(NamedTuple):
    """Wait for the output of that number, and send it."""

    number: int


class Output(NamedTuple):
    """programs: as Started's, if they are others than when the last output was sent."""

    array: np.ndarray
    programs: dict[ProgramKey, float | None] | None


class Call(NamedTuple):
    """Something rare, by its name in `engine_process.Calls`."""

    name: str
    args: tuple[Any, ...]


class Failed(NamedTuple):
    """What went wrong. error: where it was raised on purpose, as it was raised."""

    text: str
    error: JspecError | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        known = error if isinstance(error, JspecError) else None
        return cls(f"{type(error).__name__}: {error}", known)
