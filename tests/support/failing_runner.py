"""A fake runner with a device that fails on demand and can be restarted.

After a restart it has no rows and pages: a plan that names earlier ones is a PlanError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jspec.config.limits import ServeLimits
from jspec.messages.plan import StepPlan, StepResult
from tests.support.fake_pages import FakePages
from tests.support.fake_rows import FakeWindows
from tests.support.fake_runner import FakeRunner, Handle, TokenAt, hash_token

Fails = Callable[[StepPlan], bool]


class FailingRunner(FakeRunner):
    """A FakeRunner that fails.

    fails_at_dispatch, fails_at_collect: called for each plan
    num_bad_restarts: this many restarts fail, too
    may_restart: awaited by each restart
    num_restarts: counts successful restarts
    """

    def __init__(
        self,
        limits: ServeLimits,
        *,
        fails_at_dispatch: Fails = lambda _: False,
        fails_at_collect: Fails = lambda _: False,
        num_bad_restarts: int = 0,
        may_restart: threading.Event | None = None,
        token_at: TokenAt = hash_token,
        step_seconds: float = 0.0,
        accepted_at: TokenAt | None = None,
    ) -> None:
        super().__init__(
            limits, token_at=token_at, step_seconds=step_seconds, accepted_at=accepted_at
        )
        self._may_restart = may_restart
        self._fails_at_dispatch = fails_at_dispatch
        self._fails_at_collect = fails_at_collect
        self._num_bad_restarts = num_bad_restarts
        self.num_restarts = 0

    def dispatch(self, plan: StepPlan) -> Handle:
        handle = super().dispatch(plan)
        if self._fails_at_dispatch(plan):
            raise RuntimeError(f"the fake device failed at step {plan.step}")
        return handle

    def collect(self, dispatched: Handle) -> StepResult:
        plan, _ = dispatched
        if self._fails_at_collect(plan):
            raise RuntimeError(f"the fake device failed at step {plan.step}")
        return super().collect(dispatched)

    def restart(self) -> None:
        self._check_thread()
        if self._may_restart is not None:
            self._may_restart.wait()
        if self._num_bad_restarts:
            self._num_bad_restarts -= 1
            raise RuntimeError("the fake device does not come back")
        self.num_restarts += 1
        self._rows.clear()
        self._in_flight.clear()
        self._pages = FakePages(self._limits)
        self._windows = FakeWindows(self._limits)
