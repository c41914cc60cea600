"""The fake runner's model of recurrent states: a row starts from a snapshot of its own prefix."""

from __future__ import annotations

from jspec.config.limits import ServeLimits
from jspec.messages.plan import StepPlan
from tests.support.fake_rows import FakeRow, fingerprint, require


class FakeSnapshots:
    """The content of each snapshot slot. A prefill restores before it runs, and saves
    afterwards."""

    def __init__(self, limits: ServeLimits) -> None:
        self._count = 0 if limits.pool.snapshots is None else limits.pool.snapshots.count
        self._states: dict[int, int] = {}

    def restore(self, plan: StepPlan, rows: dict[int, FakeRow]) -> None:
        """Check that exactly the rows with a cached prefix are restored, from their own prefix."""
        cached = [a.row.slot for a in plan.admissions if a.cached_len] if self._count else []
        slots = [copy.slot for copy in plan.restores]
        require(slots == cached, f"states of {slots} restored; expected {cached}")
        for copy in plan.restores:
            row = rows[copy.slot]
            state = self._state(row, row.admission.cached_len)
            require(self._states.get(copy.snapshot) == state, f"{copy} of another text")

    def save(self, plan: StepPlan, rows: dict[int, FakeRow]) -> None:
        """Save states after the chunks of a plan."""
        slots = {chunk.row.slot for chunk in plan.chunks}
        saved = [copy.snapshot for copy in plan.saves]
        require(len(set(saved)) == len(saved), f"{plan.saves} to one slot")
        for copy in plan.saves:
            require(copy.slot in slots, f"{copy} of a row that does not run")
            require(1 <= copy.snapshot <= self._count, f"{copy} of {self._count} snapshots")
            row = rows[copy.slot]
            self._states[copy.snapshot] = self._state(row, row.num_filled)

    def _state(self, row: FakeRow, length: int) -> int:
        return fingerprint(row, row.text, length - 1, lookahead=0)
