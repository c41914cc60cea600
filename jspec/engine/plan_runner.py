"""Plans into packed arrays, and those into results: the half of a runner that needs no device.

Whoever runs the programs, in this process or another, is given one flat array a step and gives one
back; so nothing else crosses between the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.engine.programs.program_keys import (
    ProgramKey,
    nearest_program,
    program_for,
    ready_shapes,
    recall_programs,
    scored_for,
)
from jspec.engine.transfer import pack, pack_catch_up, pack_recalls, unpack_result
from jspec.messages.features import PLAIN, StepFeatures
from jspec.messages.plan import StepKind, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ReadyPrograms:
    """Executables by key, and which of them runs what: replaced as a whole by each addition, so
    that whoever dispatches sees both of one moment. seconds: of a step, where it was measured."""

    executables: Mapping[ProgramKey, Any]
    seconds: Mapping[ProgramKey, float] = field(default_factory=dict)
    _nearest: dict[ProgramKey, ProgramKey] = field(default_factory=dict)
    _costs: dict[tuple[int, StepFeatures], dict[SpeculativeConfig, float]] = field(
        default_factory=dict
    )

    def nearest(self, needed: ProgramKey) -> ProgramKey:
        """As nearest_program, searched for once a size and set of features."""
        found = self._nearest.get(needed)
        if found is None:
            found = self._nearest[needed] = nearest_program(needed, self.executables)
        return found

    def step_costs(
        self, limits: ServeLimits, num_rows: int, features: StepFeatures
    ) -> dict[SpeculativeConfig, float]:
        """Seconds of a decode by the shapes that are ready (ready_shapes) and measured; searched
        for once a number of rows and set of features."""
        asked = num_rows, features
        if asked not in self._costs and self.executables:
            found = self._costs[asked] = {}
            for shape in ready_shapes(
                limits, self.executables, num_rows=num_rows, features=features
            ):
                other = None if shape == limits.spec else shape
                key = self.nearest(ProgramKey(StepKind.DECODE, num_rows, features, other))
                if key in self.seconds:
                    found[shape] = self.seconds[key]
        return self._costs.get(asked, {})

    @property
    def measured(self) -> dict[ProgramKey, float | None]:
        """Every program, with the seconds of a step if they were measured."""
        return {key: self.seconds.get(key) for key in self.executables}

    @classmethod
    def of_measured(cls, measured: Mapping[ProgramKey, float | None]) -> ReadyPrograms:
        """From another process's `measured`: without the executables themselves."""
        seconds = {key: each for key, each in measured.items() if each is not None}
        return cls(dict.fromkeys(measured), seconds)

    def with_program(
        self, key: ProgramKey, executable: Any, seconds: float | None = None
    ) -> ReadyPrograms:
        measured = {} if seconds is None else {key: seconds}
        return ReadyPrograms({**self.executables, key: executable}, {**self.seconds, **measured})


class PlanRunner(ABC):
    """Dispatches and collects by `_enqueue` and `_read`, which run programs somewhere."""

    def __init__(
        self, *, limits: ServeLimits, vocab_size: int, programs: Mapping[ProgramKey, Any]
    ) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._programs = ReadyPrograms(programs)  # never changed: the caller may share it
        self._in_flight: deque[tuple[StepPlan, ProgramKey, Any]] = deque()

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def ready_programs(self) -> tuple[ProgramKey, ...]:
        """What can be dispatched now; none after close()."""
        return tuple(self._programs.executables)

    @property
    def programs(self) -> ReadyPrograms:
        """A snapshot; another object once a program was added."""
        return self._programs

    def step_costs(
        self, num_rows: int, features: StepFeatures
    ) -> Mapping[SpeculativeConfig, float]:
        """Seconds of a decode of so many rows, by the shapes that it can have now; from any thread.
        Empty where shapes are not chosen: nothing is measured then."""
        return self._programs.step_costs(self._limits, num_rows, features)

    @property
    @abstractmethod
    def device_kind(self) -> str:
        """As jax names the devices."""

    @property
    @abstractmethod
    def num_programs(self) -> int:
        """How many are there, or were before close()."""

    @property
    @abstractmethod
    def num_programs_wanted(self) -> int:
        """How many there will be if all that is still being built succeeds."""

    @abstractmethod
    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        """Makes what is missing of `keys`, while others serve; from any thread but the engine's.

        Raises BuildError for what cannot be made.
        """

    @abstractmethod
    def restart(self) -> None:
        """core.protocols.Runner.restart."""

    @abstractmethod
    def give_up(self) -> None:
        """core.protocols.Runner.give_up."""

    @abstractmethod
    def close(self) -> None:
        """core.protocols.Runner.close."""

    @abstractmethod
    def _enqueue(
        self,
        key: ProgramKey,
        *operands: Any,
        is_read: bool = True,
        is_kept: bool = False,
        drops: tuple[Any, ...] = (),
    ) -> Any:
        """Begins a program without waiting; returns what stands for its output.

        operands: arrays of the host, or what stands for kept outputs. is_read: `_read` will be
        asked for it. is_kept: it will be an operand, until a program `drops` it.
        """

    @abstractmethod
    def _read(self, output: Any) -> np.ndarray:
        """Waits for a program's output, i32."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raises EngineClosedError after close()."""

    def dispatch(self, plan: StepPlan) -> None:
        """Enqueues one step; never waits for the device, but for the tree that a grammar is to see.

        Raises EngineClosedError after close().

        The program may be larger than the plan, or have more features. Raises InvariantError if
        none serves it.
        """
        self._check_open()
        programs = self._programs
        if plan.admissions:
            self._recall(plan)
        if plan.owed:
            self._catch_up(plan)
        if plan.constraints and plan.kind is StepKind.DECODE:
            key, output = self._run_cut(plan)
        else:
            key = program_for(plan, programs.nearest, programs.executables)
            output = self._enqueue(key, self._packed(plan, key))
        self._in_flight.append((plan, key, output))

    def _packed(
        self, plan: StepPlan, key: ProgramKey, tree: np.ndarray | None = None
    ) -> np.ndarray:
        return pack(plan, key, self._limits, vocab_size=self._vocab_size, tree=tree)

    def _run_cut(self, plan: StepPlan) -> tuple[ProgramKey, Any]:
        """A decode in three programs, and the one of its output. The host reads the trees, and
        makes the masks, while the device scores them; rows without a grammar go along."""
        nearest, size = self._programs.nearest, len(plan.rows)
        propose = nearest(ProgramKey(StepKind.PROPOSE, size, PLAIN))
        settle = nearest(ProgramKey(StepKind.SETTLE, propose.bucket, plan.features))
        score = nearest(scored_for(settle))
        batch = self._packed(plan, propose)
        tree = self._enqueue(propose, batch, is_kept=True)
        scored = self._enqueue(score, batch, tree, is_read=False, is_kept=True)
        masks = self._packed(plan, settle, self._read(tree))
        return settle, self._enqueue(settle, masks, tree, scored, drops=(tree, scored))

    def _recall(self, plan: StepPlan) -> None:
        """Tells rows with a cached prefix its ids, as far as they use them."""
        for flat in pack_recalls(plan, self._limits):
            (key,) = recall_programs(self._limits)
            self._enqueue(key, flat, is_read=False)

    def _catch_up(self, plan: StepPlan) -> None:
        """Tells the drafter what plain steps did not."""
        key = self._programs.nearest(ProgramKey(StepKind.CATCH_UP, len(plan.rows), PLAIN))
        self._enqueue(key, pack_catch_up(plan, key, self._limits), is_read=False)

    def collect(self) -> StepResult:
        """Waits for the oldest dispatched step. Raises IndexError if none is in flight."""
        plan, key, output = self._in_flight.popleft()
        return unpack_result(plan, self._read(output), self._limits, features=key.features)
