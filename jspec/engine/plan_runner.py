"""The device-independent half of a runner: one packed array per step to the programs, one back.

Both have a leading axis with one entry for each data rank, of which there is one.
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
from jspec.engine.transfer import pack, pack_draft_prefill, pack_recalls, unpack_result
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.messages.step_options import PLAIN, StepOptions


@dataclass(frozen=True, slots=True)
class ReadyPrograms:
    """Executables by key, and which of them runs what: replaced as a whole by each addition, so
    that whoever dispatches sees both of one moment. seconds: of a step, where it was measured."""

    executables: Mapping[ProgramKey, Any]
    seconds: Mapping[ProgramKey, float] = field(default_factory=dict)
    _nearest: dict[ProgramKey, ProgramKey] = field(default_factory=dict)
    _costs: dict[tuple[int, StepOptions], dict[SpeculativeConfig, float]] = field(
        default_factory=dict
    )

    def nearest(self, needed: ProgramKey) -> ProgramKey:
        """Return `nearest_program`, cached per size and set of features."""
        found = self._nearest.get(needed)
        if found is None:
            found = self._nearest[needed] = nearest_program(needed, self.executables)
        return found

    def step_costs(
        self, limits: ServeLimits, num_rows: int, features: StepOptions
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
    """Dispatch and collect on top of `_enqueue` and `_read`, which subclasses implement."""

    def __init__(
        self, *, limits: ServeLimits, vocab_size: int, programs: Mapping[ProgramKey, Any]
    ) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._programs = ReadyPrograms(programs)  # never mutated: the caller may share it
        self._in_flight: deque[tuple[StepPlan, ProgramKey, Any]] = deque()

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
        """A snapshot; another object once a program was added."""
        return self._programs

    def step_costs(self, num_rows: int, features: StepOptions) -> Mapping[SpeculativeConfig, float]:
        """Return the seconds of a decode of num_rows rows, by available shape; from any thread.

        Empty unless shapes are adaptive: nothing is measured then.
        """
        return self._programs.step_costs(self._limits, num_rows, features)

    @property
    @abstractmethod
    def device_kind(self) -> str:
        """The device kind, as jax names it."""

    @property
    @abstractmethod
    def num_programs(self) -> int:
        """Number of ready programs; after close(), the number before it."""

    @property
    @abstractmethod
    def num_programs_wanted(self) -> int:
        """Number of programs once all pending builds have succeeded."""

    @abstractmethod
    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        """Build the missing programs of `keys` while others serve; not from the engine's thread.
        Raises BuildError for a program that cannot be made."""

    @abstractmethod
    def restart(self) -> None:
        """Implement `messages.protocols.Runner.restart`."""

    @abstractmethod
    def give_up(self) -> None:
        """Implement `messages.protocols.Runner.give_up`."""

    @abstractmethod
    def close(self) -> None:
        """Implement `messages.protocols.Runner.close`."""

    @abstractmethod
    def _enqueue(
        self,
        key: ProgramKey,
        *operands: Any,
        is_read: bool = True,
        is_kept: bool = False,
        drops: tuple[Any, ...] = (),
    ) -> Any:
        """Start a program without waiting; return a handle of its output.

        operands: host arrays, or handles of kept outputs.
        is_read: `_read` will be called for the output.
        is_kept: the output will be an operand, until a program lists it in `drops`.
        """

    @abstractmethod
    def _read(self, output: Any) -> np.ndarray:
        """Wait for a program's output, i32[data, ...]."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineClosedError after close()."""

    def dispatch(self, plan: StepPlan) -> None:
        """Enqueue one step. Waits for the device only if a grammar needs the draft tree.

        The program may be larger than the plan, or have more features. Raises InvariantError if no
        ready program fits, EngineClosedError after close().
        """
        self._check_open()
        programs = self._programs
        if plan.admissions:
            self._recall(plan)
        if plan.pending:
            self._draft_prefill(plan)
        if plan.constraints and plan.kind is StepKind.DECODE:
            key, output = self._run_cut(plan)
        else:
            key = program_for(plan, programs.nearest, programs.executables)
            output = self._enqueue(key, self._packed(plan, key))
        self._in_flight.append((plan, key, output))

    def _packed(
        self, plan: StepPlan, key: ProgramKey, tree: np.ndarray | None = None
    ) -> np.ndarray:
        return pack(plan, key, self._limits, vocab_size=self._vocab_size, tree=tree)[None]

    def _run_cut(self, plan: StepPlan) -> tuple[ProgramKey, Any]:
        """Run a decode as PROPOSE, SCORE and SETTLE; return the last key and its output.

        The host reads the trees and computes the grammar masks while the device scores them. Rows
        without a grammar take part.
        """
        nearest, size = self._programs.nearest, len(plan.rows)
        propose = nearest(ProgramKey(StepKind.PROPOSE, size, PLAIN))
        settle = nearest(ProgramKey(StepKind.SETTLE, propose.bucket, plan.features))
        score = nearest(scored_for(settle))
        batch = self._packed(plan, propose)
        tree = self._enqueue(propose, batch, is_kept=True)
        scored = self._enqueue(score, batch, tree, is_read=False, is_kept=True)
        masks = self._packed(plan, settle, self._read(tree)[0])
        return settle, self._enqueue(settle, masks, tree, scored, drops=(tree, scored))

    def _recall(self, plan: StepPlan) -> None:
        """Replay the ids of cached prefixes for admitted rows that need them."""
        for flat in pack_recalls(plan, self._limits):
            (key,) = recall_programs(self._limits)
            self._enqueue(key, flat[None], is_read=False)

    def _draft_prefill(self, plan: StepPlan) -> None:
        """Advance the drafter over tokens that plain steps left pending."""
        key = self._programs.nearest(ProgramKey(StepKind.DRAFT_PREFILL, len(plan.rows), PLAIN))
        self._enqueue(key, pack_draft_prefill(plan, key, self._limits)[None], is_read=False)

    def collect(self) -> StepResult:
        """Wait for the oldest dispatched step. Raises IndexError if none is in flight."""
        plan, key, output = self._in_flight.popleft()
        (own,) = self._read(output)
        return unpack_result(plan, own, self._limits, features=key.features)
