"""Plan the next prefill: chunks of admitted rows, then of newly admitted requests."""

from __future__ import annotations

from jspec.config.limits import ServeLimits
from jspec.messages.plan import Admission, PageGrant, PrefillChunk, StepKind, StepPlan
from jspec.scheduler import policy
from jspec.scheduler.blame import blaming
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import Flight, StepRows
from jspec.scheduler.seats import Seats
from jspec.scheduler.sequence import Tenancy
from jspec.scheduler.waiting import WaitingQueue
from jspec.spec import indexing as shapes


class PrefillPlanner:
    """Plans prefill steps and admits requests from `waiting` into `seats`."""

    def __init__(
        self, limits: ServeLimits, prefilling: Prefilling, seats: Seats, waiting: WaitingQueue
    ) -> None:
        self._limits = limits
        self._prefilling = prefilling
        self._seats = seats
        self._waiting = waiting

    def plan(self, packer: policy.ChunkPacker, *, step: int) -> Flight | None:
        """Return the next prefill, or None if there is no chunk or no room for one."""
        chunks: list[PrefillChunk] = []
        admissions: list[Admission] = []
        grants: list[PageGrant] = []
        for tenancy in self._prefilling.tenancies:
            if packer.has_room:
                with blaming(tenancy.sequence):
                    chunks.append(packer.pack(tenancy))
                    grants += self._grant_for_chunk(tenancy, chunks[-1])
        while packer.has_room and self._waiting and self._seats.free_slots:
            newcomer = self._waiting.head
            with blaming(newcomer):
                hit = self._seats.hit_of(newcomer)
                if hit is None:
                    break
                tenancy = self._seats.admit(self._waiting.pop(), hit)
                admissions.append(tenancy.admission)
                chunks.append(packer.pack(tenancy))
                grants += self._seats.windows.grants(tenancy)
                grants += self._grant_for_chunk(tenancy, chunks[-1])
        if not chunks:
            return None
        step_rows = StepRows.of(self._seats.tenancies[chunk.row] for chunk in chunks)
        plan = StepPlan(
            step=step,
            kind=StepKind.PREFILL,
            features=step_rows.features,
            admissions=tuple(admissions),
            chunks=tuple(chunks),
            grants=tuple(grants),
            constraints=step_rows.constraints,
        )
        return Flight(plan, step_rows)

    def _grant_for_chunk(self, tenancy: Tenancy, chunk: PrefillChunk) -> list[PageGrant]:
        end = chunk.start + len(chunk.token_ids) + chunk.is_final * self._limits.spec.num_root_rows
        return self._seats.windows.grow(tenancy, shapes.num_pages(end, self._limits.page_size))
