"""The runner calls of a turn, on the engine's thread.

It knows no request and no event loop.
"""

from __future__ import annotations

import time

from jspec.errors import RunnerError
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.protocols import Runner
from jspec.serving.request_trace import FirstTokens
from jspec.serving.trace import StepClock, TraceEvent, TraceKind


class RunnerCalls:
    """Calls a runner and appends each call to `trace`. `first_tokens` may be set at any time."""

    def __init__(self, runner: Runner, trace: list[TraceEvent] | None) -> None:
        self._runner = runner
        self._trace = trace
        self.first_tokens: FirstTokens | None = None
        self.steps = StepClock()

    def run(self, plan: StepPlan | None, collects: bool) -> StepResult | None:
        """Dispatch `plan`, then, if `collects`, wait for the oldest step.

        Raises RunnerError for any error, since a restart may fix it.
        """
        try:
            return self._run(plan, collects)
        except RunnerError:
            raise
        except Exception as error:
            raise RunnerError(f"the runner failed: {type(error).__name__}: {error}") from error

    def lose_steps(self) -> None:
        """Forget the steps in flight, lost with the runner. Call it while the thread is idle."""
        self.steps.lose_steps()
        if self.first_tokens is not None:
            self.first_tokens.lose_steps()

    def _run(self, plan: StepPlan | None, collects: bool) -> StepResult | None:
        if plan is not None:
            started = time.monotonic()
            self._runner.dispatch(plan)
            self.steps.dispatched(plan.step, started)
            self._record(TraceKind.DISPATCH, plan.step, started)
        if not collects:
            return None
        started = time.monotonic()
        result = self._runner.collect()
        self.steps.collected(result.step, time.monotonic())
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
