"""A trace of the time to first token: when a request passed each stage."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping

from jspec.messages.plan import StepPlan


class Border(enum.Enum):
    """Stages in the order in which a request passes them."""

    RECEIVED = "received"
    PARSED = "parsed"
    TOKENIZED = "tokenized"
    SUBMITTED = "submitted"
    PLANNED = "planned"  # its admission is planned
    DISPATCHED = "dispatched"  # start of the call that enqueues its last prefill chunk
    ENQUEUED = "enqueued"  # end of that call
    COLLECTED = "collected"  # its first token is on the host
    COMMITTED = "committed"
    READ = "read"  # by the server, which writes it
    SENT = "sent"  # its first event is on the socket


class RequestTrace:
    """Writes a line of JSON for each request whose first event was sent.

    {"request_id": ..., "received": seconds of time.monotonic(), ...}

    Only the first mark of a stage counts. Several threads write marks, each stage in one of them.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._open: dict[str, dict[str, float]] = {}

    def begin(self, request_id: str) -> None:
        self._open[request_id] = {}

    def mark(self, request_ids: Iterable[str], border: Border, when: float) -> None:
        for request_id in request_ids:
            times = self._open.get(request_id)
            if times is not None:
                times.setdefault(border.value, when)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def end(self, request_id: str) -> Mapping[str, float]:
        """Write the line if the request passed all stages; drop the request, return its times."""
        times = self._open.pop(request_id, {})
        if len(times) == len(Border):
            ordered = {border.value: round(times[border.value], 6) for border in Border}
            self._write(json.dumps({"request_id": request_id, **ordered}) + "\n")
        return times


class FirstTokens:
    """Marks the stages between submission and commit, for requests and the steps that run them."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._names: dict[int, str] = {}  # last admitted request, by slot
        self._by_step: dict[int, list[str]] = {}  # requests with their last prefill chunk, by step

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
        self._by_step.clear()

    def committed(self, step: int, now: float) -> None:
        self._trace.mark(self._by_step.pop(step, ()), Border.COMMITTED, now)
