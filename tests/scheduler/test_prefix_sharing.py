"""Which row starts after whose pages, which row waits, and the fate of a failed step's pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jspec.config.limits import ServeLimits, WindowSpace
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits


def limits_of(**changes: object) -> ServeLimits:
    """Return limits with pages of 4, chunks of 16, two rows per prefill."""
    return with_limits(small_limits(num_pages=64, prefix_cache=True), **changes)  # type: ignore[arg-type]


def turn(name: str, *prompt: int, max_new_tokens: int = 8) -> Request:
    request = make_request(name, max_new_tokens=max_new_tokens)
    return replace(request, prompt_ids=prompt or tuple(range(20)))


def test_a_second_turn_begins_after_the_first() -> None:
    bench = Bench(limits_of())
    bench.submit(turn("a"))
    bench.run_all()
    said = bench.output("a")
    bench.submit(turn("b", *range(20), *said, 1, 2, 3))
    bench.run_all()
    assert bench.output("b") == expected_ids(turn("b", *range(20), *said, 1, 2, 3), 8)
    # 20 + 8 tokens, of which the last has no KV; a page is named by one token after it
    assert bench.chunks["b"][-1].cached_tokens == 24
    stats = bench.scheduler.stats
    assert (stats.num_cached_tokens, stats.num_leaked_pages) == (24, 0)
    assert stats.num_free_pages == stats.num_pages
    assert 0 < stats.num_cached_pages < stats.num_pages
    assert stats.cache_hit_rate == 24 / (20 + 31)
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.stats.num_cached_pages == 0


def test_a_client_that_has_its_answer_may_flush_although_a_step_is_in_flight() -> None:
    bench = Bench(limits_of())
    bench.submit(turn("a"))
    while "a" not in bench.chunks or bench.chunks["a"][-1].finish is None:
        assert not bench.scheduler.flush_cache()
        if bench.dispatch() is None or len(bench.in_flight) > 1:
            bench.collect()
    assert bench.in_flight
    assert bench.scheduler.flush_cache()
    bench.submit(turn("b"))
    bench.run_all()
    assert bench.chunks["b"][-1].cached_tokens == 0
    assert bench.scheduler.stats.num_leaked_pages == 0
    assert bench.scheduler.flush_cache()
    assert bench.scheduler.stats.num_cached_pages == 0


def test_siblings_wait_for_the_first_and_share_its_prompt() -> None:
    bench = Bench(limits_of(overlap_depth=0, prefill_rows=4, num_slots=4))
    bench.submit(*(turn(name, *range(14), ord(name)) for name in "abcd"))
    first = bench.must_dispatch(StepKind.PREFILL)
    assert [a.request.request_id for a in first.admissions] == ["a"]
    bench.collect()
    rest = bench.must_dispatch(StepKind.PREFILL)
    assert [a.request.request_id for a in rest.admissions] == ["b", "c", "d"]
    assert {grant.pages[:3] for grant in rest.grants} == {first.grants[0].pages[:3]}
    assert {a.cached_len for a in rest.admissions} == {12}
    bench.collect()
    bench.run_all()
    assert bench.scheduler.stats.num_leaked_pages == 0


def test_under_overlap_a_page_is_read_before_its_writer_is_collected() -> None:
    bench = Bench(limits_of(overlap_depth=2, prefill_rows=4))
    bench.submit(turn("a", *range(15), 1), turn("b", *range(15), 2))
    bench.must_dispatch(StepKind.PREFILL)
    bench.must_dispatch(StepKind.DECODE)
    assert bench.must_dispatch(StepKind.PREFILL).admissions[0].cached_len == 12
    assert len(bench.in_flight) == 3


def test_nobody_waits_for_a_short_common_beginning() -> None:
    bench = Bench(limits_of(overlap_depth=0, prefill_rows=4, page_size=1))
    bench.submit(turn("a", 0, 1, 2, 3, 4, 5, 6), turn("b", 0, 8, 2, 3, 4, 5, 6))
    assert len(bench.must_dispatch(StepKind.PREFILL).admissions) == 2


def test_other_extra_keys_and_other_weights_share_nothing() -> None:
    bench = Bench(limits_of())

    def cached_of(name: str, extra_key: str | None) -> int:
        bench.submit(replace(turn(name), extra_key=extra_key))
        bench.run_all()
        return bench.chunks[name][-1].cached_tokens

    assert [cached_of(*x) for x in (("a", None), ("b", "k"), ("c", "k"))] == [0, 0, 16]
    bench.submit(turn("d"))
    bench.must_dispatch(StepKind.PREFILL)
    bench.scheduler.set_weight_version("2")
    bench.run_all()  # d has KV of both weights, so it is not cached
    assert [cached_of("e", None), cached_of("f", None)] == [0, 16]


def test_a_name_that_is_used_again_finds_the_pages_of_its_own_text() -> None:
    bench = Bench(limits_of())
    texts = tuple(range(20)), tuple(range(20)), tuple(range(100, 120))
    for text, cached in zip(texts, (0, 16, 0), strict=True):
        bench.submit(turn("a", *text, max_new_tokens=1))
        bench.run_all()
        assert bench.chunks["a"][-1].cached_tokens == cached


def test_cached_pages_make_room_and_running_rows_keep_theirs() -> None:
    limits = limits_of(num_pages=16, num_slots=2, decode_buckets=(1, 2))
    bench = Bench(limits)
    for i in range(6):  # more than fits the pool
        bench.submit(turn(f"r{i}", *range(i, i + 12), max_new_tokens=20))
    bench.submit(turn("long", *range(50, 65), max_new_tokens=40))
    bench.run_all()
    stats = bench.scheduler.stats
    assert (stats.num_finished, stats.num_leaked_pages) == (7, 0)
    assert stats.num_free_pages == stats.num_pages
    assert len(bench.output("long")) == 40


def test_an_aborted_prefill_leaves_what_was_dispatched() -> None:
    bench = Bench(limits_of(overlap_depth=0))
    prompt = tuple(range(40))
    bench.submit(turn("a", *prompt))
    bench.must_dispatch(StepKind.PREFILL)
    bench.scheduler.abort("a")
    bench.collect()
    bench.submit(turn("b", *prompt))
    bench.run_all()
    assert bench.chunks["b"][-1].cached_tokens == 12  # of 16 tokens, one page with none after it
    assert bench.scheduler.stats.num_leaked_pages == 0


def test_what_a_failed_step_wrote_is_found_by_nobody() -> None:
    bench = Bench(limits_of(overlap_depth=2))
    bench.submit(turn("a", *range(13)))
    bench.run_all()
    bench.submit(turn("b", *range(13), *range(20)))
    plan = bench.must_dispatch(StepKind.PREFILL)
    assert plan.admissions[0].cached_len == 12
    before = bench.scheduler.stats.num_cached_pages
    bench.scheduler.fail()
    stats = bench.scheduler.stats
    assert (stats.num_queued, stats.num_running, stats.num_steps_in_flight) == (1, 0, 0)
    assert stats.num_cached_pages < before
    assert (stats.num_leaked_pages, stats.num_free_pages) == (0, stats.num_pages)
    again = bench.scheduler.plan()
    assert again is not None
    assert again.admissions[0].cached_len == 12  # the collected steps' pages are cached


def test_without_it_nothing_is_kept() -> None:
    for windows in ((), (WindowSpace(8, 40),)):
        bench = Bench(limits_of(prefix_cache=False, windows=windows))
        for name in "ab":
            bench.submit(turn(name))
            bench.run_all()
        assert bench.chunks["b"][-1].cached_tokens == 0
        stats = bench.scheduler.stats
        assert (stats.num_cached_pages, *stats.num_cached_window_pages) == (0,) * (1 + len(windows))


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_the_whole_pool_is_one_requests_again(page_size: int) -> None:
    """A request that fits alone runs alone, whatever is cached."""
    roomy = limits_of(page_size=page_size, num_pages=1000)
    num_pages = 64 // page_size + roomy.draft_shape.num_scratch_pages(page_size)
    bench = Bench(with_limits(roomy, num_pages=num_pages))
    for i in range(4):
        prompt = range(20) if i % 2 else range(1, 21)
        bench.submit(turn(f"r{i}", *prompt, max_new_tokens=45))
    bench.run_all()
    assert all(len(bench.output(f"r{i}")) == 45 for i in range(4))
    assert bench.scheduler.stats.num_leaked_pages == 0
