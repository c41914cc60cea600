"""Several rounds per step: the output equals that of single rounds, chunk for chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jspec.errors import InvariantError
from jspec.messages.plan import PageGrant, StepKind
from jspec.scheduler.pages import budget
from tests.scheduler import test_fake_runner as walk
from tests.scheduler.test_scheduler import Bench, make_request, result
from tests.support.fake_rows import PlanError
from tests.support.fake_runner import (
    FakeRunner,
    scripted_tokens,
    small_limits,
)
from tests.support.fake_text import ids_of
from tests.support.flat_limits import with_limits

THREE = small_limits(num_rounds=3)


def test_one_step_brings_the_chunks_of_its_rounds() -> None:
    bench = Bench(THREE, FakeRunner(THREE, accepted_at=lambda _r, length: length % 2))
    bench.submit(make_request(prompt_len=5, max_new_tokens=30))
    bench.must_dispatch(StepKind.PREFILL)
    bench.must_dispatch(StepKind.DECODE)
    bench.collect()
    # L = 5 accepts one and emits two, then L = 7 and L = 9 do the same.
    assert [len(chunk.new_ids) for chunk in bench.collect()] == [2, 2, 2]


def test_rounds_after_an_end_are_dropped_and_counted_nowhere() -> None:
    script = scripted_tokens({"r": ids_of("abzabcabcabcabc")})
    bench = Bench(THREE, FakeRunner(THREE, token_at=script, accepted_at=lambda _r, _l: 3))
    bench.submit(make_request(max_new_tokens=30, stop_token_ids=[25]))
    bench.must_dispatch(StepKind.PREFILL)
    bench.must_dispatch(StepKind.DECODE)
    bench.collect()
    (last,) = bench.collect()
    assert last.finish is not None
    assert last.finish.matched == 25
    stats = bench.scheduler.stats
    assert (last.counters.verify_ct, stats.counters, stats.num_emitted) == (1, last.counters, 3)
    assert stats.num_free_pages == stats.num_pages


def test_an_abort_drops_all_rounds_in_flight_and_keeps_the_pages_until_then() -> None:
    bench = Bench(THREE)
    bench.submit(make_request(max_new_tokens=50))
    bench.must_dispatch(StepKind.PREFILL)
    bench.must_dispatch(StepKind.DECODE)
    bench.collect()
    bench.must_dispatch(StepKind.DECODE)
    assert bench.scheduler.abort("r") is not None
    assert bench.collect() == ()
    assert bench.scheduler.stats.num_free_pages < bench.scheduler.stats.num_pages
    assert bench.collect() == ()
    assert bench.scheduler.stats.num_free_pages == bench.scheduler.stats.num_pages
    assert bench.scheduler.stats.num_emitted == 1


@pytest.mark.parametrize(("max_new_tokens", "num_decodes"), [(1, 0), (2, 1), (4, 1), (5, 2)])
def test_rounds_in_flight_bound_what_is_dispatched(max_new_tokens: int, num_decodes: int) -> None:
    # The final chunk emits one token, and each of a step's three rounds one at least.
    bench = Bench(small_limits(num_rounds=3, overlap_depth=2))
    bench.submit(make_request(max_new_tokens=max_new_tokens))
    while bench.dispatch():
        pass
    assert [plan.kind for plan in bench.in_flight][1:] == [StepKind.DECODE] * num_decodes


@pytest.mark.parametrize("num_rounds", [1, 3, 8])
def test_a_row_owns_no_page_after_its_last_useful_round(num_rounds: int) -> None:
    limits = small_limits(page_size=1, overlap_depth=0, num_rounds=num_rounds)
    bench = Bench(limits, FakeRunner(limits, accepted_at=lambda _r, _l: 0))
    bench.submit(make_request(prompt_len=5, max_new_tokens=20))
    bench.run_all()
    plans = bench.runner.plans
    owned = sum(len(grant.pages) for plan in plans for grant in plan.grants)
    assert owned == budget.last_committed(5, 20) + limits.draft_shape.num_scratch_slots


def test_a_result_of_another_number_of_rounds_raises() -> None:
    bench = Bench(THREE)
    bench.submit(make_request(max_new_tokens=30))
    first = bench.must_dispatch(StepKind.PREFILL)
    second = bench.must_dispatch(StepKind.DECODE)
    with pytest.raises(InvariantError, match=r"step 1 emitted .* expected 1 rounds"):
        bench.scheduler.commit(first, result(1, *(((1,),),) * 3))
    bench.collect()
    for wrong in ((((1,),),) * 2, (((1,),), ((1,),), ()), (((1,),), ((1,),), ((),))):
        with pytest.raises(InvariantError, match=r"step 2 emitted .* expected 3 rounds"):
            bench.scheduler.commit(second, result(2, *wrong))


# The fake runner's rules about rounds, each broken once.


def started(*, max_new_tokens: int) -> FakeRunner:
    """Return one row, prefilled and collected: L = 5, 12 positions owned; each round emits 4."""
    limits = with_limits(walk.LIMITS, num_rounds=3)
    runner = FakeRunner(limits, accepted_at=lambda _r, _l: 3)
    sampling = replace(walk.REQUEST.sampling, max_new_tokens=max_new_tokens)
    request = replace(walk.REQUEST, sampling=sampling)
    admission = replace(walk.admission(), request=request)
    runner.collect(runner.dispatch(walk.prefill(1, walk.chunk(), admit=(admission,))))
    return runner


def grants(count: int) -> tuple[PageGrant, ...]:
    return tuple(PageGrant(1, 3 + i, (4 + i,)) for i in range(count))


def test_later_rounds_must_be_reserved_for_as_far_as_they_are_of_use() -> None:
    # The third round starts at 13 at most and writes up to 17: two pages more than the first 12.
    for count in (0, 1):
        with pytest.raises(PlanError, match=r"needs 1[37] positions and owns 1[26]"):
            started(max_new_tokens=40).dispatch(walk.decode(2, walk.ROW, grants=grants(count)))
    started(max_new_tokens=40).dispatch(walk.decode(2, walk.ROW, grants=grants(2)))
    started(max_new_tokens=4).dispatch(walk.decode(2, walk.ROW))  # the last one starts at 7


def test_a_page_that_no_round_needs_is_refused() -> None:
    with pytest.raises(PlanError, match="slot 1 needs 17 and had 20 granted"):
        started(max_new_tokens=40).dispatch(walk.decode(2, walk.ROW, grants=grants(3)))
