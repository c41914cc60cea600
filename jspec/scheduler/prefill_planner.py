"""Plan the next prefill: chunks of admitted rows, then of newly admitted requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.messages.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    SnapshotCopy,
    StepKind,
    StepPlan,
    StepRun,
)
from jspec.messages.step_options import StepOption
from jspec.scheduler import policy
from jspec.scheduler.blame import blaming
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import Flight, StepRows
from jspec.scheduler.seats import Seats
from jspec.scheduler.sequence import Tenancy
from jspec.scheduler.waiting import WaitingQueue
from jspec.spec import indexing as shapes


class PrefillPlanner:
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
        restores: list[SnapshotCopy] = []
        saves: list[SnapshotCopy] = []
        pages = self._seats.pages
        for tenancy in self._prefilling.tenancies:
            if packer.has_room:
                with blaming(tenancy.sequence):
                    chunks.append(packer.pack(tenancy, cut=pages.chunk_end))
                    grants += self._grant_for_chunk(tenancy, chunks[-1])
                    saves += pages.save(tenancy, chunks[-1])
        while packer.has_room and self._waiting and self._seats.free_slots:
            newcomer = self._waiting.head
            with blaming(newcomer):
                hit = self._seats.hit_of(newcomer)
                if hit is None:
                    break
                tenancy, first_grants = self._seats.admit(self._waiting.pop(), hit)
                admissions.append(tenancy.admission)
                chunks.append(packer.pack(tenancy, cut=pages.chunk_end))
                restores += pages.restore(tenancy)
                saves += pages.save(tenancy, chunks[-1])
                grants += first_grants
                grants += self._grant_for_chunk(tenancy, chunks[-1])
        if not chunks:
            return None
        step_rows = StepRows.of(self._seats.tenancies[chunk.row] for chunk in chunks)
        constraints = step_rows.masked(np.ones(len(chunks), np.int64))
        kinds = [
            *([StepKind.RESTORE] if restores else []),
            StepKind.PREFILL,
            *([StepKind.SAVE] if saves else []),
        ]
        plan = StepPlan(
            step=step,
            runs=(
                *cached_draft_prefills(self._limits, admissions),
                *(StepRun(kind, self._limits.draft_shape) for kind in kinds),
            ),
            options=step_rows.options_with(constraints),
            admissions=tuple(admissions),
            chunks=tuple(chunks),
            grants=tuple(grants),
            restores=tuple(restores),
            saves=tuple(saves),
            constraints=constraints,
        )
        return Flight(plan, step_rows)

    def _grant_for_chunk(self, tenancy: Tenancy, chunk: PrefillChunk) -> list[PageGrant]:
        end = (
            chunk.start
            + len(chunk.token_ids)
            + chunk.is_final * self._limits.draft_shape.num_root_slots
        )
        # A row that only its prefill extends has no page for the root, which goes to page 0.
        num_pages = min(shapes.num_pages(end, self._limits.pool.page_size), len(tenancy.page_ids))
        return self._seats.pages.grow(tenancy, num_pages)


def cached_draft_prefills(
    limits: ServeLimits, admissions: Iterable[Admission]
) -> tuple[StepRun, ...]:
    """Return the draft prefills of cached tokens that admissions need; mostly none.

    They carry the cached ids of all rows if the drafter keeps ids, else of those with penalties.
    """
    keeps_ids = limits.draft_shape.keeps_ids
    runs: list[list[PrefillChunk]] = []
    room = 0
    for admission in admissions:
        start, end, ids = 0, admission.cached_len, admission.fill_ids
        if not keeps_ids and StepOption.PENALTIES not in admission.request.sampling.options:
            continue
        while start < end:
            if not room or len(runs[-1]) == limits.programs.prefill_rows:
                runs.append([])
                room = limits.cached_draft_prefill_size
            stop = min(end, start + room)
            runs[-1].append(
                PrefillChunk(
                    row=admission.row,
                    start=start,
                    token_ids=ids[start:stop],
                    next_id=ids[stop],
                )
            )
            start, room = stop, room - (stop - start)
    return tuple(
        StepRun(StepKind.CACHED_DRAFT_PREFILL, limits.draft_shape, tuple(chunks)) for chunks in runs
    )
