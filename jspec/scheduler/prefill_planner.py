"""Plan the next prefill: chunks of admitted rows, then of newly admitted requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest

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
from jspec.scheduler.data_ranks import DataRanks
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import Flight, StepRows
from jspec.scheduler.sequence import Tenancy
from jspec.scheduler.waiting import WaitingQueue
from jspec.spec import indexing as shapes


class PrefillPlanner:
    def __init__(
        self, limits: ServeLimits, prefilling: Prefilling, ranks: DataRanks, waiting: WaitingQueue
    ) -> None:
        self._limits = limits
        self._prefilling = prefilling
        self._ranks = ranks
        self._waiting = waiting

    def plan(self, packer: policy.ChunkPacker, *, step: int) -> Flight | None:
        """Return the next prefill, or None. Each data rank packs with a copy of `packer`."""
        packers = [replace(packer) for _ in self._ranks.all]
        chunks: list[PrefillChunk] = []
        admissions: list[Admission] = []
        grants: list[PageGrant] = []
        restores: list[SnapshotCopy] = []
        saves: list[SnapshotCopy] = []
        for tenancy in self._prefilling.tenancies:
            rank = self._ranks.number_of(tenancy)
            packer, pages = packers[rank], self._ranks.all[rank].pages
            if packer.has_room:
                with blaming(tenancy.sequence):
                    chunks.append(packer.pack(tenancy, cut=pages.chunk_end))
                    grants += self._grant_for_chunk(tenancy, chunks[-1])
                    saves += pages.save(tenancy, chunks[-1])
        while self._waiting:
            newcomer = self._waiting.head
            has_room = [packer.has_room for packer in packers]
            with blaming(newcomer):
                place = self._ranks.place(newcomer, has_room)
                if place is None:
                    break
                rank, hit = place
                seats, pages = self._ranks.all[rank], self._ranks.all[rank].pages
                tenancy, first_grants = seats.admit(self._waiting.pop(), hit)
                admissions.append(tenancy.admission)
                chunks.append(packers[rank].pack(tenancy, cut=pages.chunk_end))
                restores += pages.restore(tenancy)
                saves += pages.save(tenancy, chunks[-1])
                grants += first_grants
                grants += self._grant_for_chunk(tenancy, chunks[-1])
        if not chunks:
            return None
        chunks.sort(key=lambda chunk: self._limits.pool.rank_of(chunk.row.slot))
        step_rows = StepRows.of(self._ranks.tenancy_of(chunk.row) for chunk in chunks)
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
        # A row that ends with its prefill has no page for the root, which goes to page 0.
        num_pages = min(shapes.num_pages(end, self._limits.pool.page_size), len(tenancy.page_ids))
        return self._ranks.of(tenancy).pages.grow(tenancy, num_pages)


def cached_draft_prefills(
    limits: ServeLimits, admissions: Sequence[Admission]
) -> tuple[StepRun, ...]:
    """Return the draft prefills of cached tokens that admissions need."""
    # They carry the cached ids of all rows if the drafter keeps ids, else of rows with penalties.
    rank_of, ranks = limits.pool.rank_of, range(limits.pool.num_ranks)
    own = [[each for each in admissions if rank_of(each.row.slot) == rank] for rank in ranks]
    runs = zip_longest(*[_cached_pieces(limits, each) for each in own], fillvalue=())
    return tuple(
        StepRun(StepKind.CACHED_DRAFT_PREFILL, limits.draft_shape, tuple(chain(*chunks)))
        for chunks in runs
    )


def _cached_pieces(
    limits: ServeLimits, admissions: Sequence[Admission]
) -> list[list[PrefillChunk]]:
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
    return runs
