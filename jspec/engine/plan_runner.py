"""The device-independent half of a runner: one packed array per program and output, both with a
leading axis of data ranks."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.engine.programs.program_keys import nearest_program, ready_shapes
from jspec.engine.rank_plans import plans_by_rank
from jspec.engine.steps.decode import with_sharing
from jspec.engine.steps.step_def import Host, ProgramKey
from jspec.engine.steps.table import STEPS
from jspec.engine.transfer import Packer, unpack_result
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.messages.step_options import StepOption, StepOptions


class Dispatched(NamedTuple):
    plan: StepPlan
    key: ProgramKey
    output: Any


def programs_for(
    plans: Sequence[StepPlan],  # the plan's parts by data rank
    limits: ServeLimits,
    nearest: Callable[[ProgramKey], ProgramKey],  # `nearest_program`, or a cached one
    ready: Container[ProgramKey],
) -> list[ProgramKey]:
    """Return the ready program of each run of a plan, as large as its largest part needs.

    The last runs choose first: a program whose output is taken by another one gets its size and
    options. Of equal sizes, rows that share prefixes prefer the variant that reads them once.
    """
    keys: list[ProgramKey] = []
    takers: dict[StepKind, ProgramKey] = {}
    options_of_plan = plans[0].options
    for runs in reversed(list(zip(*[plan.runs for plan in plans], strict=True))):
        run = runs[0]
        step, taker = STEPS[run.kind], takers.get(run.kind)
        size = max(map(step.size, plans, runs)) if taker is None else taker.bucket
        options = (options_of_plan if taker is None else taker.options).within(step.options)
        shape = None if run.shape == limits.draft_shape else run.shape
        key = nearest(ProgramKey(run.kind, size, options, shape))
        if StepOption.SHARED in step.options and any(plan.shared for plan in plans):
            sharing = key._replace(options=with_sharing(key.options))
            key = sharing if sharing in ready else key
        takers.update(dict.fromkeys(step.takes, key))
        keys.append(key)
    keys.reverse()
    return keys


class Use(NamedTuple):
    is_read: bool
    is_kept: bool  # later programs take the output
    is_result: bool
    is_last: bool


@functools.lru_cache(maxsize=64)
def uses_of(kinds: tuple[StepKind, ...]) -> tuple[Use, ...]:
    steps, found = [STEPS[kind] for kind in kinds], []
    result = max((i for i, step in enumerate(steps) if step.emits), default=len(kinds) - 1)
    for i, kind in enumerate(kinds):
        later = steps[i + 1 :]
        is_read = i == result or kind in {step.reads for step in later}
        is_kept = any(kind in step.takes for step in later)
        found.append(Use(is_read, is_kept, is_result=i == result, is_last=not later))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ReadyPrograms:
    """Executables by key. Each addition replaces the object, so that readers see one state."""

    executables: Mapping[ProgramKey, Any]
    seconds: Mapping[ProgramKey, float] = field(default_factory=dict)  # of a step, if measured
    _nearest: dict[ProgramKey, ProgramKey] = field(default_factory=dict)
    _costs: dict[tuple[int, StepOptions], dict[SpeculativeConfig, float]] = field(
        default_factory=dict
    )

    def nearest(self, needed: ProgramKey) -> ProgramKey:
        found = self._nearest.get(needed)
        if found is None:
            found = self._nearest[needed] = nearest_program(needed, self.executables)
        return found

    def step_costs(
        self, limits: ServeLimits, num_rows: int, options: StepOptions
    ) -> dict[SpeculativeConfig, float]:
        """Return the seconds of a decode by ready, measured shape; cached by rows and options."""
        asked = num_rows, options
        if asked not in self._costs and self.executables:
            found = self._costs[asked] = {}
            for shape in ready_shapes(limits, self.executables, num_rows=num_rows, options=options):
                other = None if shape == limits.draft_shape else shape
                key = self.nearest(ProgramKey(StepKind.DECODE, num_rows, options, other))
                if key in self.seconds:
                    found[shape] = self.seconds[key]
        return self._costs.get(asked, {})

    @property
    def measured(self) -> dict[ProgramKey, float | None]:
        return {key: self.seconds.get(key) for key in self.executables}

    @classmethod
    def of_measured(cls, measured: Mapping[ProgramKey, float | None]) -> ReadyPrograms:
        """Build from another process's `measured`, without the executables themselves."""
        seconds = {key: each for key, each in measured.items() if each is not None}
        return cls(dict.fromkeys(measured), seconds)

    def with_program(
        self, key: ProgramKey, executable: Any, seconds: float | None = None
    ) -> ReadyPrograms:
        measured = {} if seconds is None else {key: seconds}
        return ReadyPrograms({**self.executables, key: executable}, {**self.seconds, **measured})


class PlanRunner(ABC):
    """Dispatch and collect on top of `_enqueue` and `_read`, which subclasses implement."""

    def __init__(
        self, *, limits: ServeLimits, vocab_size: int, programs: Mapping[ProgramKey, Any]
    ) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._programs = ReadyPrograms(programs)  # never mutated: the caller may share it
        self._packer = Packer(Host(limits, vocab_size))

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def ready_programs(self) -> tuple[ProgramKey, ...]:
        """Programs that can be dispatched now; empty after close()."""
        return tuple(self._programs.executables)

    @property
    def programs(self) -> ReadyPrograms:
        return self._programs

    def step_costs(self, num_rows: int, options: StepOptions) -> Mapping[SpeculativeConfig, float]:
        return self._programs.step_costs(self._limits, num_rows, options)

    @property
    @abstractmethod
    def device_kind(self) -> str:
        """The device kind, as jax names it."""

    @property
    @abstractmethod
    def num_programs(self) -> int:
        """Number of ready programs, which close() does not change."""

    @property
    @abstractmethod
    def num_programs_wanted(self) -> int:
        """Number of programs once all pending builds have succeeded."""

    @abstractmethod
    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        """Build missing programs, not on the engine's thread. Raises BuildError."""

    @abstractmethod
    def expert_counts(self) -> np.ndarray:
        """Return i64[L, X], the tokens of each expert since the start. Thread-safe. Raises
        RequestError for an engine that does not count them."""

    @abstractmethod
    def restart(self) -> None:
        """`messages.protocols.Runner.restart`."""

    @abstractmethod
    def give_up(self) -> None:
        """`messages.protocols.Runner.give_up`."""

    @abstractmethod
    def close(self) -> None:
        """`messages.protocols.Runner.close`."""

    @abstractmethod
    def _enqueue(
        self,
        key: ProgramKey,
        *operands: Any,  # host arrays, or handles of kept outputs
        is_read: bool,  # `_read` will be called for the output
        is_kept: bool,  # the output will be an operand of later programs
        drops: tuple[Any, ...],  # kept outputs that no later program takes
    ) -> Any:
        """Start a program without waiting; return a handle of its output."""

    @abstractmethod
    def _read(self, output: Any) -> np.ndarray:
        """Wait for a program's output, i32[data, ...]."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineClosedError after close()."""

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """Enqueue one step. It waits only if a program needs an earlier output on the host. Raises
        InvariantError if no ready program fits, EngineClosedError after close()."""
        self._check_open()
        programs = self._programs
        plans = plans_by_rank(plan, self._limits.pool)
        keys = programs_for(plans, self._limits, programs.nearest, programs.executables)
        outputs: dict[StepKind, Any] = {}
        kept: list[Any] = []
        uses = uses_of(tuple([run.kind for run in plan.runs]))
        for i, (run, key, use) in enumerate(zip(plan.runs, keys, uses, strict=True)):
            step = STEPS[run.kind]
            read = None if step.reads is None else self._read(outputs[step.reads])
            output = self._enqueue(
                key,
                self._packer.pack(plans, i, key, read),
                *[outputs[kind] for kind in step.takes],
                is_read=use.is_read,
                is_kept=use.is_kept,
                drops=tuple(kept) if use.is_last else (),
            )
            outputs[run.kind] = output
            if use.is_kept:
                kept.append(output)
            if use.is_result:
                result = Dispatched(plan, key, output)
        return result

    def collect(self, dispatched: Dispatched) -> StepResult:
        plan, key, output = dispatched
        found = self._read(output)
        if not STEPS[key.kind].emits:
            return StepResult(step=plan.step, rounds=())
        return unpack_result(plan, found, self._limits, options=key.options)
