"""The fake runner refuses plans that a device could not run; each rule is broken once here."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from jspec.messages.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    RowRef,
    StepKind,
    StepPlan,
    StepRun,
)
from jspec.messages.protocols import Runner
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import ALL
from tests.support.fake_rows import PlanError
from tests.support.fake_runner import (
    FakeRunner,
    hash_token,
    random_acceptance,
    small_limits,
)
from tests.support.plans import plan_of

LIMITS = small_limits(page_size=4, num_pages=16, chunk_size=8, prefill_rows=2, overlap_depth=1)
REQUEST = Request(
    request_id="r", prompt_ids=(1, 2, 3, 4, 5), sampling=SamplingParams(max_new_tokens=4), seed=1
)
ROW = RowRef(1, 1)


def admission(row: RowRef = ROW) -> Admission:
    return Admission(row=row, request=REQUEST, prompt_len=5, fill_ids=REQUEST.prompt_ids)


def chunk(row: RowRef = ROW, start: int = 0, end: int = 5) -> PrefillChunk:
    ids = REQUEST.prompt_ids
    next_id = ids[end] if end < len(ids) else None
    return PrefillChunk(row=row, start=start, token_ids=ids[start:end], next_id=next_id)


def prefill(
    step: int,
    *chunks: PrefillChunk,
    admit: tuple[Admission, ...] = (),
    pages: tuple[int, ...] = (1, 2, 3),
) -> StepPlan:
    grants = tuple(PageGrant(admission.row.slot, 0, pages) for admission in admit)
    return plan_of(
        StepKind.PREFILL,
        LIMITS.draft_shape,
        step=step,
        admissions=admit,
        chunks=chunks,
        grants=grants,
    )


def decode(step: int, *rows: RowRef, grants: tuple[PageGrant, ...] = ()) -> StepPlan:
    return plan_of(StepKind.DECODE, LIMITS.draft_shape, step=step, rows=rows, grants=grants)


FIRST = prefill(1, chunk(), admit=(admission(),))
SECOND_ROW = RowRef(2, 1)


def started() -> FakeRunner:
    """Return a runner with one row, prefilled and collected: L = 5, 12 positions owned."""
    runner = FakeRunner(LIMITS, accepted_at=lambda _request, _seq_len: 3)
    runner.collect(runner.dispatch(FIRST))
    return runner


def test_it_is_a_runner() -> None:
    runner: Runner = FakeRunner(LIMITS)
    assert runner.limits is LIMITS


def test_a_good_walk() -> None:
    runner = started()
    result = runner.collect(runner.dispatch(decode(2, ROW)))
    (only,) = result.rounds
    assert only.emitted_ids == (tuple(hash_token(REQUEST, p) for p in (6, 7, 8, 9)),)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(FIRST, step=2), "step 2 after 0"),
        (replace(FIRST, options=ALL), "options are all; expected plain"),
        (prefill(1), "slots"),
        (prefill(1, chunk(RowRef(0, 1)), admit=(admission(RowRef(0, 1)),)), "slots"),
        (prefill(1, chunk(RowRef(5, 1)), admit=(admission(RowRef(5, 1)),)), "slots"),
        (prefill(1, chunk(), chunk(), admit=(admission(),)), "slots"),
        (replace(FIRST, rows=(ROW,)), "with rows"),
        (prefill(1, chunk()), "admitted"),
        (prefill(1, chunk(start=1), admit=(admission(),)), "admitted"),
        (prefill(1, replace(chunk(), token_ids=()), admit=(admission(),)), "empty chunk"),
        (prefill(1, replace(chunk(), token_ids=(9,)), admit=(admission(),)), "chunk tokens"),
        (prefill(1, replace(chunk(end=3), next_id=9), admit=(admission(),)), "next_id 9"),
        (prefill(1, replace(chunk(end=3), next_id=None), admit=(admission(),)), "next_id None"),
        (prefill(1, chunk(), admit=(replace(admission(), prompt_len=4),)), "prompt_len"),
        (prefill(1, chunk(), admit=(replace(admission(), fill_ids=(1, 2)),)), "fill"),
        (prefill(1, chunk(), admit=(admission(),), pages=(1,)), "writes 5 of 4"),
        (prefill(1, chunk(), admit=(admission(),), pages=(1, 1)), "granted twice"),
        (prefill(1, chunk(), admit=(admission(),), pages=(0, 1)), "page 0"),
        (prefill(1, chunk(), admit=(admission(),), pages=(1, 17)), "page 17"),
        (
            prefill(1, chunk(), chunk(SECOND_ROW), admit=(admission(), admission(SECOND_ROW))),
            "10 tokens of a prefill",
        ),
    ],
)
def test_a_wrong_first_step_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        FakeRunner(LIMITS).dispatch(plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(decode(2, ROW), chunks=(chunk(),)), "a decode with chunks"),
        (decode(2, RowRef(1, 2)), "not the slot's tenant"),
        (decode(2, SECOND_ROW), "not the slot's tenant"),
        (prefill(2, chunk(start=2)), "chunk at 2 after 5"),
        (prefill(2, chunk(), admit=(admission(),)), "follows epoch 1"),
        (decode(2, ROW, grants=(PageGrant(2, 3, (4,)),)), "grant to slot 2"),
        (decode(2, ROW, grants=(PageGrant(1, 2, (4,)),)), "after 3 pages"),
        (decode(2, ROW, grants=(PageGrant(1, 3, (3,)),)), "granted twice"),
        (decode(2, ROW, grants=(PageGrant(1, 3, (4, 5, 6, 7)),)), "4 grants"),
    ],
)
def test_a_wrong_second_step_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        started().dispatch(plan)


def test_a_decode_before_the_final_chunk_is_refused() -> None:
    runner = FakeRunner(LIMITS)
    runner.dispatch(prefill(1, chunk(end=3), admit=(admission(),)))
    with pytest.raises(PlanError, match="before its final chunk"):
        runner.dispatch(decode(2, ROW))


def test_a_decode_outside_its_reservation_is_refused() -> None:
    runner = FakeRunner(LIMITS)
    runner.dispatch(prefill(1, chunk(), admit=(admission(),), pages=(1, 2)))
    with pytest.raises(PlanError, match="needs 9 positions and owns 8"):
        runner.dispatch(decode(2, ROW))


def test_unread_steps_widen_the_reservation() -> None:
    runner = started()
    runner.dispatch(decode(2, ROW))
    with pytest.raises(PlanError, match="needs 13 positions and owns 12"):
        runner.dispatch(decode(3, ROW))


def test_a_decode_with_no_token_left_is_refused() -> None:
    runner = started()
    runner.collect(runner.dispatch(decode(2, ROW)))
    with pytest.raises(PlanError, match="with 5 of 4 tokens out"):
        runner.dispatch(decode(3, ROW, grants=(PageGrant(1, 3, (4,)),)))


def test_a_page_or_slot_of_a_row_in_flight_is_refused() -> None:
    for row, message in ((SECOND_ROW, "in flight"), (RowRef(1, 2), "before its slot is collected")):
        runner = FakeRunner(LIMITS)
        runner.dispatch(FIRST)
        with pytest.raises(PlanError, match=message):
            runner.dispatch(prefill(2, chunk(row), admit=(admission(row),)))


def test_a_row_whose_page_was_given_away_never_runs_again() -> None:
    runner = started()
    runner.dispatch(prefill(2, chunk(SECOND_ROW), admit=(admission(SECOND_ROW),)))
    with pytest.raises(PlanError, match="not the slot's tenant"):
        runner.dispatch(decode(3, ROW))


def test_too_many_unread_steps_are_refused() -> None:
    runner = FakeRunner(LIMITS)
    runner.dispatch(FIRST)
    runner.dispatch(decode(2, ROW))
    with pytest.raises(PlanError, match="2 unread steps"):
        runner.dispatch(decode(3, ROW))


def test_a_step_is_collected_once_and_in_order() -> None:
    runner = FakeRunner(LIMITS)
    handles = [runner.dispatch(FIRST), runner.dispatch(decode(2, ROW))]
    with pytest.raises(PlanError, match="step 2, which is not the oldest in flight"):
        runner.collect(handles[1])
    for handle in handles:
        runner.collect(handle)
        with pytest.raises(PlanError, match="not the oldest in flight"):
            runner.collect(handle)


def run_of(kind: StepKind, *chunks: PrefillChunk) -> StepRun:
    return StepRun(kind, LIMITS.draft_shape, chunks)


@pytest.mark.parametrize(
    "runs",
    [
        (run_of(StepKind.CACHED_DRAFT_PREFILL), run_of(StepKind.PREFILL)),
        (run_of(StepKind.CACHED_DRAFT_PREFILL, chunk(end=4)), run_of(StepKind.PREFILL)),
        (run_of(StepKind.DECODE), run_of(StepKind.PREFILL)),
    ],
    ids=["empty", "nothing cached", "another kind"],
)
def test_a_prefill_runs_what_its_rows_need_and_nothing_else(runs: tuple[StepRun, ...]) -> None:
    with pytest.raises(PlanError, match="runs"):
        FakeRunner(LIMITS).dispatch(replace(FIRST, runs=runs))


@pytest.mark.parametrize(
    "kinds",
    [
        (StepKind.DRAFT_PREFILL, StepKind.DECODE),
        (StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE),
        (StepKind.DECODE, StepKind.DECODE),
    ],
    ids=["nothing pending", "no grammar", "twice"],
)
def test_a_decode_runs_what_its_rows_need_and_nothing_else(kinds: tuple[StepKind, ...]) -> None:
    runs = tuple(run_of(kind) for kind in kinds)
    with pytest.raises(PlanError, match="runs"):
        started().dispatch(replace(decode(2, ROW), runs=runs))


def test_a_second_thread_is_refused() -> None:
    runner, caught = started(), []

    def other_thread() -> None:
        with pytest.raises(PlanError, match="thread") as error:
            runner.dispatch(decode(2, ROW))
        caught.append(error)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_stop_ids_are_masked_while_the_output_is_short() -> None:
    request = replace(
        REQUEST,
        sampling=SamplingParams(min_new_tokens=20, max_new_tokens=90),
        eos_token_ids=tuple(range(13)),
    )
    tokens = [hash_token(request, 5 + i) for i in range(80)]
    assert not set(tokens[:20]) & set(range(13))
    assert set(tokens[20:]) & set(range(13))


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (1.0, 3, 3), (0.5, 0.75, 1.0)])
def test_acceptance_has_the_stated_mean(rate: float, low: float, high: float) -> None:
    # at rate 0.5 with 3 drafts: 0.5 + 0.25 + 0.125 = 0.875
    accepted_at = random_acceptance(rate, 3)
    mean = sum(accepted_at(REQUEST, p) for p in range(4000)) / 4000
    assert low <= mean <= high
