"""The runner calls of a turn, on the engine's thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from jspec.errors import RunnerError
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.protocols import Runner
from jspec.serving.request_trace import FirstTokens
from jspec.serving.trace import TraceEvent, TraceKind


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A planned step until its result is read. The engine's thread sets the other fields."""

    plan: StepPlan
    handle: Any = None  # the runner's
    dispatched_at: float = 0.0
    seconds: float = 0.0  # from dispatch, or the previous result if later, to the result


class RunnerCalls:
    """Calls a runner and appends each call to `trace`. `first_tokens` may be set at any time."""

    def __init__(self, runner: Runner, trace: list[TraceEvent] | None) -> None:
        self._runner = runner
        self._trace = trace
        self.first_tokens: FirstTokens | None = None
        self._collected_at = 0.0

    def run(self, new: StepInFlight | None, oldest: StepInFlight | None) -> StepResult | None:
        """Dispatch `new`, then wait for `oldest`, maybe the same; errors become RunnerError."""
        try:
            return self._run(new, oldest)
        except RunnerError:
            raise
        except Exception as error:
            raise RunnerError(f"the runner failed: {type(error).__name__}: {error}") from error

    def lose_steps(self) -> None:
        if self.first_tokens is not None:
            self.first_tokens.lose_steps()

    def _run(self, new: StepInFlight | None, oldest: StepInFlight | None) -> StepResult | None:
        if new is not None:
            new.dispatched_at = time.monotonic()
            new.handle = self._runner.dispatch(new.plan)
            self._record(TraceKind.DISPATCH, new.plan.step, new.dispatched_at)
        if oldest is None:
            return None
        started = time.monotonic()
        result = self._runner.collect(oldest.handle)
        now = time.monotonic()
        oldest.seconds = now - max(oldest.dispatched_at, self._collected_at)
        self._collected_at = now
        self._record(TraceKind.COLLECT, result.step, started)
        return result

    def _record(self, kind: TraceKind, step: int, started: float) -> None:
        ended = time.monotonic()
        if self._trace is not None:
            self._trace.append(TraceEvent(kind=kind, step=step, started=started, ended=ended))
        if self.first_tokens is not None:
            is_dispatch = kind is TraceKind.DISPATCH
            ran = self.first_tokens.dispatched if is_dispatch else self.first_tokens.collected
            ran(step, started, ended)
