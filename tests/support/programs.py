"""The programs that would run a plan, and its packed arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.engine.plan_runner import programs_for
from jspec.engine.programs.program_keys import nearest_program, program_keys
from jspec.engine.steps.step_def import Host, ProgramKey
from jspec.engine.transfer import Packer
from jspec.messages.plan import StepPlan


def programs_of(
    plan: StepPlan, limits: ServeLimits, ready: Sequence[ProgramKey] | None = None
) -> list[ProgramKey]:
    """The program of each run; ready: all that an engine builds by itself."""
    every = program_keys(limits) if ready is None else ready
    return programs_for((plan,), limits, lambda needed: nearest_program(needed, every), every)


def packed(
    plan: StepPlan, key: ProgramKey, limits: ServeLimits, *, vocab_size: int, run: int = -1
) -> np.ndarray:
    """One run of a plan for the program `key`."""
    return Packer(Host(limits, vocab_size)).pack((plan,), run, key)[0]
