"""Where the time of a first token goes: when a request passed which border on its way.

Off unless a server is told to keep it. It has no clock: who marks says when.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable

from jspec.messages.plan import StepPlan


class Border(enum.Enum):
    """In the order in which a request passes them. PLANNED: the step that admits it. DISPATCHED and
    ENQUEUED: begin and end of the call that enqueues its last prefill chunk. COLLECTED: its first
    token is on the host. READ: and where it is written. SENT: its first event is on the socket."""

    RECEIVED = "received"
    PARSED = "parsed"
    TOKENIZED = "tokenized"
    SUBMITTED = "submitted"
    PLANNED = "planned"
    DISPATCHED = "dispatched"
    ENQUEUED = "enqueued"
    COLLECTED = "collected"
    COMMITTED = "committed"
    READ = "read"
    SENT = "sent"


class RequestTrace:
    """Gives `write` a line of JSON for each request whose first event was sent.

    {"request_id": ..., "received": seconds of time.monotonic(), ...}
    A border counts once, the first time. Marks come from several threads; no two of them mark the
    same border.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._open: dict[str, dict[str, float]] = {}

    def begin(self, request_id: str) -> None:
        self._open[request_id] = {}

    def mark(self, request_ids: Iterable[str], border: Border, when: float) -> None:
        """Whoever did not begin, or has ended, is left out."""
        for request_id in request_ids:
            times = self._open.get(request_id)
            if times is not None:
                times.setdefault(border.value, when)

    def forget(self, request_ids: Iterable[str]) -> None:
        """They were refused."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Writes the line, if the request passed all borders; it is forgotten."""
        times = self._open.pop(request_id, None)
        if times is not None and len(times) == len(Border):
            ordered = {border.value: round(times[border.value], 6) for border in Border}
            self._write(json.dumps({"request_id": request_id, **ordered}) + "\n")


class FirstTokens:
    """Marks the borders between submission and commit, for requests and the steps that run them."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._names: dict[int, str] = {}  # by slot: whoever was admitted there last
        self._by_step: dict[int, list[str]] = {}  # whose last prefill chunk it has

    def submitted(self, request_id: str, now: float) -> None:
        self._trace.mark((request_id,), Border.SUBMITTED, now)

    def planned(self, plan: StepPlan, now: float) -> None:
        names = {each.row.slot: each.request.request_id for each in plan.admissions}
        self._names |= names
        self._trace.mark(names.values(), Border.PLANNED, now)
        final = [chunk.row for chunk in plan.chunks if chunk.is_final]
        if final:
            self._by_step[plan.step] = [self._names.pop(row.slot, "") for row in final]

    def dispatched(self, step: int, started: float, ended: float) -> None:
        names = self._by_step.get(step, ())
        self._trace.mark(names, Border.DISPATCHED, started)
        self._trace.mark(names, Border.ENQUEUED, ended)

    def collected(self, step: int, _: float, ended: float) -> None:
        self._trace.mark(self._by_step.get(step, ()), Border.COLLECTED, ended)

    def lose_steps(self) -> None:
        """Of those that were planned none ends."""
        self._by_step.clear()

    def committed(self, step: int, now: float) -> None:
        self._trace.mark(self._by_step.pop(step, ()), Border.COMMITTED, now)
