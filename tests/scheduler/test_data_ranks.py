"""Which data rank a request runs on, and what ranks share: nothing but the step."""

from __future__ import annotations

from collections import Counter

import pytest

from jspec.config.limits import ServeLimits
from jspec.config.shared_prefixes import UNIT, SharingLimits
from jspec.engine.rank_plans import plans_by_rank
from jspec.messages.plan import PageGrant, RowRef, StepKind
from jspec.messages.request import Request
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_ranks import FakeRanks
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits
from tests.support.plans import plan_of


def limits_of(num_ranks: int, *, num_slots: int = 8, num_pages: int = 64) -> ServeLimits:
    limits = small_limits(
        num_slots=num_slots,
        num_pages=num_pages,
        prefill_rows=8,
        chunk_size=64,
        max_queued_requests=32,
        prefix_cache=True,
        overlap_depth=0,
    )
    return with_limits(limits, num_ranks=num_ranks)


def bench_of(limits: ServeLimits) -> Bench:
    return Bench(limits, FakeRanks(limits))


def ranks_of(bench: Bench) -> dict[str, int]:
    """Return the rank of each running request."""
    seats = enumerate(bench.scheduler._ranks.all)
    return {name: rank for rank, own in seats for name in own.running}


def run(bench: Bench, *requests: Request) -> dict[str, int]:
    """Submit requests and run until all have a slot; return the ranks of all that ran."""
    bench.submit(*requests)
    found = {}
    while bench.scheduler.num_queued:
        assert bench.dispatch()
        found |= ranks_of(bench)
        bench.collect()
    return found


def starting(name: str, first: int, *, length: int = 24, max_new_tokens: int = 8) -> Request:
    """Return a request whose prompt starts with an id, and is its own after 20 tokens."""
    prompt = (first,) * 20 + tuple(100 + ord(name[-1]) for _ in range(length - 20))
    request = make_request(name, prompt_len=length, max_new_tokens=max_new_tokens)
    return Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=request.sampling,
        seed=request.seed,
        eos_token_ids=(),
    )


def test_requests_without_a_prefix_go_to_the_rank_with_fewest_rows() -> None:
    bench = bench_of(limits_of(3))
    found = run(bench, *(make_request(name, prompt_len=3 + i) for i, name in enumerate("abcdefg")))
    assert sorted(Counter(found.values()).values()) == [2, 2, 3]
    bench.run_all()
    assert all(bench.output(name) for name in "abcdefg")


def test_a_cached_prefix_attracts_within_bounds() -> None:
    bench = bench_of(limits_of(2))
    run(bench, starting("a", 1), starting("b", 2))
    at = ranks_of(bench)
    assert set(at.values()) == {0, 1}
    bench.run_all()
    found = run(bench, starting("c", 2), starting("d", 2), starting("e", 2))
    assert found["c"] == found["d"] == at["b"] != found["e"]
    others = [starting(f"f{i}", 2) for i in range(8)]
    counts = Counter(run(bench, *others).values())
    assert sum(counts.values()) == 11
    assert max(counts.values()) <= 2 * min(counts.values()) + 2
    bench.run_all()
    for name in ("c", "d", "e", *(request.request_id for request in others)):
        assert len(bench.output(name)) == 8
    assert bench.scheduler.stats.num_free_pages == 128


def test_a_full_rank_sends_its_requests_to_another() -> None:
    bench = bench_of(limits_of(2, num_slots=2))
    found = run(bench, *(starting(name, 1, max_new_tokens=20) for name in "abcd"))
    assert Counter(found.values()) == {0: 2, 1: 2}
    bench.submit(starting("e", 1))
    assert bench.scheduler.stats.num_queued == 1
    bench.run_all()
    assert len(bench.output("e")) == 8


def test_a_row_short_of_pages_retracts_rows_of_its_own_rank() -> None:
    """Both rows of rank 0 grow until one has to go, but not the newest row, which is on rank 1."""
    bench = bench_of(limits_of(2, num_pages=32))
    lengths = {"a": 90, "b": 4, "c": 90, "d": 90}
    a, b, c, d = (
        starting(name, 1 + i % 2, max_new_tokens=count)
        for i, (name, count) in enumerate(lengths.items())
    )
    found = run(bench, a, b) | run(bench, c, d)
    assert [found[name] for name in "abcd"] == [0, 1, 0, 1]
    bench.run_all()
    for request in (a, b, c, d):
        assert bench.output(request.request_id) == expected_ids(
            request, lengths[request.request_id]
        )
    retracted = {name: bench.chunks[name][-1].num_retractions for name in lengths}
    assert retracted["b"] == retracted["d"] == 0
    assert retracted["a"] + retracted["c"] > 0


def test_counts_are_sums_and_each_rank_s_own() -> None:
    bench = bench_of(limits_of(2))
    run(bench, *(make_request(name, prompt_len=9) for name in "ab"))
    stats = bench.scheduler.stats
    assert (stats.num_running, stats.num_pages) == (2, 128)
    assert [own.num_running for own in stats.by_rank] == [1, 1]
    assert sum(own.num_used_pages for own in stats.by_rank) == stats.num_used_pages > 0


def test_rows_share_a_prefix_with_rows_of_their_rank_only() -> None:
    """Pages of equal numbers on two ranks are not the same pages."""
    sharing = SharingLimits(rows_a_pack=4, pays_from=1, least_rows=1)
    limits = with_limits(limits_of(2), sharing=sharing, num_pages=200, context_length=UNIT + 64)
    bench = bench_of(limits)
    prompt = tuple(range(UNIT + 4))
    samples = [
        Request(request_id=name, prompt_ids=prompt, sampling=one.sampling, seed=i, eos_token_ids=())
        for i, name in enumerate("abcd")
        for one in [make_request(name, max_new_tokens=12)]
    ]
    bench.submit(*samples)
    shared = []
    while bench.dispatch() or bench.in_flight:
        plan = bench.in_flight[0]
        shared += [plan] if plan.shared else []
        bench.collect()
    assert shared
    for plan in shared:
        for part in plans_by_rank(plan, limits.pool):
            assert all(0 <= each.leader < len(part.rows) for each in part.shared)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_parts_of_a_plan_are_the_plan(num_ranks: int) -> None:
    limits = limits_of(num_ranks, num_slots=4)
    pool = limits.pool
    rows = [(rank, slot) for rank in range(0, num_ranks, 2) for slot in (1, 4)]
    refs = tuple(RowRef(pool.first_slot(rank) + slot, 7) for rank, slot in rows)
    grants = tuple(PageGrant(ref.slot, 2, (5,)) for ref in refs)
    plan = plan_of(StepKind.DECODE, limits.draft_shape, rows=refs, grants=grants)
    parts = plans_by_rank(plan, pool)
    assert len(parts) == num_ranks
    for rank, part in enumerate(parts):
        own = [] if rank % 2 else [1, 4]
        assert [row.slot for row in part.rows] == own == [grant.slot for grant in part.grants]
        assert part.runs == plan.runs
