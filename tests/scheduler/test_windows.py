"""Window spaces: pages are granted chunk by chunk, and return when no query can see them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jspec.config.limits import Algorithm, ServeLimits, WindowSpace
from jspec.errors import ConfigError, InvariantError
from jspec.messages.plan import Admission, PageGrant, RowRef, StepKind
from jspec.messages.request import Request, SamplingParams
from jspec.scheduler.pages.page_space import PageSpace
from jspec.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Bench, expected_ids
from tests.support.fake_rows import FakeRow, FakeWindows, PlanError
from tests.support.fake_runner import FakeRunner, random_acceptance, small_limits
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import with_limits

FULL = small_limits(page_size=4, num_pages=200, context_length=600, chunk_size=8, num_slots=2)
FEWEST = FULL.window_pages_per_row(8) + FULL.pages_of_chunks(8)


def limits_of(num_pages: int = FEWEST, **changes: int) -> ServeLimits:
    return with_limits(FULL, windows=(WindowSpace(8, num_pages),), **changes)  # type: ignore[arg-type]


def request_of(prompt_len: int, max_new_tokens: int, *, name: str = "r") -> Request:
    return Request(
        request_id=name,
        prompt_ids=(0,) * prompt_len,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        seed=prompt_len,
    )


def run(limits: ServeLimits, *requests: Request) -> Bench:
    bench = Bench(limits, FakeRunner(limits, accepted_at=random_acceptance(0.7, 3)))
    bench.submit(*requests)
    bench.run_all()
    for request in requests:
        ids = tuple(i for chunk in bench.chunks[request.request_id] for i in chunk.new_ids)
        assert ids == expected_ids(request, len(ids))
        assert len(ids) == request.sampling.max_new_tokens
    stats = bench.scheduler.stats
    assert (stats.num_leaked_pages, stats.num_free_pages) == (0, limits.pool.num_pages)
    assert stats.num_free_window_pages == tuple(space.num_pages for space in limits.pool.windows)
    return bench


def test_the_worked_example_of_a_prompt() -> None:
    """Chunks of 8 of a prompt of 20: pages 0 1, then 2 3, then 4; 0 and 1 return, then 2."""
    limits = limits_of(20, overlap_depth=2)
    scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
    scheduler.enqueue([request_of(20, 1)])
    indices: list[list[int]] = []
    num_free: list[int] = []
    for _ in range(3):  # no result is read in between
        plan = scheduler.plan()
        assert plan is not None
        assert plan.kind is StepKind.PREFILL
        grants = [grant for grant in plan.grants if grant.space == 1]
        indices.append([i for g in grants for i in range(g.index, g.index + len(g.pages))])
        num_free += scheduler.stats.num_free_window_pages
    assert indices == [[0, 1], [2, 3], [4]]
    assert num_free == [20 - 2, 20 - 2, 20 - 2]


@pytest.mark.parametrize("prompt_len", [1, 4, 5])
@pytest.mark.parametrize("algorithm", [Algorithm.EAGLE3, Algorithm.STANDALONE])
def test_a_row_that_only_its_prompt_extends_gets_no_more_pages_than_at_admission(
    algorithm: Algorithm, prompt_len: int
) -> None:
    """Its root is never decoded: it has no page in any space."""
    limits = with_limits(
        FULL, page_size=1, draft_shape=replace(FULL.draft_shape, algorithm=algorithm)
    )
    fewest = limits.window_pages_per_row(8) + limits.pages_of_chunks(8)
    limits = with_limits(limits, windows=(WindowSpace(8, fewest),))
    plans = run(limits, request_of(prompt_len, 1)).runner.plans
    spaces = [grant.space for plan in plans for grant in plan.grants for _ in grant.pages]
    assert (spaces.count(0), spaces.count(1)) == (prompt_len, prompt_len)


def test_rows_wait_for_what_may_be_promised() -> None:
    """Two rows fit one after the other; short ones fit together, since they never need much."""
    bench = run(limits_of(), request_of(60, 40, name="a"), request_of(60, 40, name="b"))
    assert max(len(plan.row_refs) for plan in bench.runner.plans) == 1
    both = run(limits_of(2 * FEWEST), request_of(60, 40, name="a"), request_of(60, 40, name="b"))
    assert max(len(plan.row_refs) for plan in both.runner.plans) == 2


def test_too_small_a_space_is_refused() -> None:
    message = f"a window of 8 tokens have {FEWEST - 1} pages; one request needs at least {FEWEST}"
    with pytest.raises(ConfigError, match=message):
        limits_of(FEWEST - 1)
    with pytest.raises(ConfigError, match=r"windows of page spaces are \[8, 8\]; expected them to"):
        with_limits(FULL, windows=(WindowSpace(8, 99), WindowSpace(8, 99)))


def admission(slot: int) -> Admission:
    request = request_of(20, 5)
    return Admission(
        row=RowRef(slot, 1),
        request=request,
        prompt_len=20,
        fill_ids=request.prompt_ids,
    )


def window_grant(index: int, page: int, slot: int = 1) -> PageGrant:
    return PageGrant(slot, index, (page,), space=1)


def test_the_fake_refuses_what_is_not_owned() -> None:
    """A page that a query sees must be present, and may not go to another row too early."""
    row = FakeRow(admission=admission(1), page_ids=[], num_filled=20, read_len=20)
    other = FakeRow(admission=admission(2), page_ids=[], steps_in_flight=1)
    rows = {1: row, 2: other}
    for each in rows.values():
        each.window_pages = [{}]
    books = FakeWindows(limits_of())
    for index in (2, 3, 4):
        books.grant(window_grant(index, index), row.admission.row, rows)
    books.check(row, first=20, end=20)  # sees 13..20: pages 3 and 4
    with pytest.raises(PlanError, match=r"at 20 to 21 lacks pages \[5\] of the window of 8"):
        books.check(row, first=20, end=21)
    with pytest.raises(PlanError, match="where the row has a page"):
        books.grant(window_grant(4, 9), row.admission.row, rows)
    with pytest.raises(PlanError, match="outside its space"):
        books.grant(window_grant(5, FEWEST + 1), row.admission.row, rows)
    row.steps_in_flight = 1
    with pytest.raises(PlanError, match="in flight, sees"):
        books.grant(window_grant(0, 3, slot=2), other.admission.row, rows)
    books.grant(window_grant(0, 2, slot=2), other.admission.row, rows)  # ends at 12: not seen
    assert (row.window_pages, other.window_pages) == ([{3: 3, 4: 4}], [{0: 2}])
    with pytest.raises(PlanError, match=r"lacks pages \[2\]"):
        books.check(row, first=18, end=20)  # sees 11


def test_no_row_holds_more_than_it_was_promised() -> None:
    """A row that is not trimmed is an error, instead of a pool that runs out."""
    space = PageSpace(limits_of(50), 50, index=1, keep=8)
    row = space.admit((), last=178, end=20)
    assert len(space.grow(row, FEWEST)) == FEWEST
    with pytest.raises(InvariantError, match=f"has {FEWEST} pages of the window of 8; expected at"):
        space.trim(row, 8)
    with pytest.raises(InvariantError, match=f"gets 1 pages of space 1 after {FEWEST}; expected"):
        space.grow(row, FEWEST + 1)
