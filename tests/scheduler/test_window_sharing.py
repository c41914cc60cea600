"""Cached prefixes of models with windows: which rows start after them, and what is evicted.

The fake runner refuses a row whose window has anything but what the row would have written.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jspec.config.limits import Algorithm, ServeLimits, WindowSpace
from jspec.messages.plan import StepKind, StepPlan
from jspec.messages.request import Request
from tests.scheduler.test_prefix_sharing import turn
from tests.scheduler.test_scheduler import Bench, expected_ids
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

LIMITS = small_limits(num_pages=400, num_slots=4, context_length=400, prefix_cache=True)


def with_windows(limits: ServeLimits, *windows: int, spare: int = 0) -> ServeLimits:
    """Return limits with the fewest pages in each space, and some more."""
    of_chunks = limits.pages_of_chunks(limits.programs.chunk_size)
    spaces = [WindowSpace(w, limits.window_pages_per_row(w) + of_chunks + spare) for w in windows]
    return with_limits(limits, windows=tuple(spaces))


def cached_of(bench: Bench, request: Request) -> int:
    """Serve a request alone; return its cached prompt tokens."""
    bench.submit(request)
    bench.run_all()
    name, most = request.request_id, request.sampling.max_new_tokens
    assert most is not None
    assert bench.output(name) == expected_ids(request, most)
    stats, spaces = bench.scheduler.stats, bench.scheduler.limits.pool.windows
    assert stats.num_leaked_pages == 0
    assert stats.num_free_window_pages == tuple(space.num_pages for space in spaces)
    return bench.chunks[name][-1].cached_tokens


def traffic(seed: int, *, count: int) -> list[Request]:
    """Return turns of conversations, other ends of their prompts, and new prompts."""
    chance = random.Random(seed)
    texts: list[tuple[int, ...]] = []
    requests = []
    for i in range(count):
        old = chance.choice(texts) if texts and chance.random() < 0.8 else ()
        kept = old[: chance.randint(0, len(old))] if chance.random() < 0.5 else old
        new = tuple(chance.randrange(26) for _ in range(chance.choice([1, 3, 30])))
        request = turn(f"r{i}", *(*kept, *new)[:200], max_new_tokens=chance.choice([1, 9, 40]))
        requests.append(request)
        most = request.sampling.max_new_tokens or 0
        texts.append((*request.prompt_ids, *expected_ids(request, most)))
    return requests


@pytest.mark.parametrize(
    ("windows", "page_size", "depth", "spec"),
    [
        ((8,), 4, 1, (3, 1, 4)),
        ((3, 30), 16, 2, (2, 2, 4)),
        ((1, 9), 1, 0, (0, 1, 1)),
    ],
)
def test_with_room_as_much_is_found_as_without_windows(
    windows: tuple[int, ...], page_size: int, depth: int, spec: tuple[int, int, int]
) -> None:
    roomy = small_limits(
        steps_topk_nodes=spec,
        num_pages=8000 // page_size,
        page_size=page_size,
        context_length=400,
        overlap_depth=depth,
        prefix_cache=True,
    )
    bench, full = Bench(with_windows(roomy, *windows, spare=8000 // page_size)), Bench(roomy)
    requests = traffic(page_size, count=40)
    found = [cached_of(bench, request) for request in requests]
    assert found == [cached_of(full, request) for request in requests]
    assert sum(count > 0 for count in found) > 10


def table_of(plan: StepPlan, slot: int) -> dict[int, int]:
    """Return the pages that a row gets in the window space, by index."""
    grants = [grant for grant in plan.grants if (grant.slot, grant.space) == (slot, 1)]
    return {i: page for grant in grants for i, page in enumerate(grant.pages, grant.index)}


def test_siblings_wait_and_hold_the_same_window() -> None:
    limits = with_windows(with_limits(LIMITS, overlap_depth=0, prefill_rows=4), 8, spare=60)
    bench = Bench(limits)
    bench.submit(*(turn(name, *range(14), ord(name)) for name in "abcd"))
    first = bench.must_dispatch(StepKind.PREFILL)
    bench.collect()
    rest = bench.must_dispatch(StepKind.PREFILL)
    assert [a.cached_len for a in rest.admissions] == [12, 12, 12]
    before = table_of(first, first.admissions[0].row.slot)
    for admission in rest.admissions:
        mine = table_of(rest, admission.row.slot)
        assert {i: mine[i] for i in (1, 2)} == {i: before[i] for i in (1, 2)}  # 5..11 are seen
        assert min(mine) == 1
    bench.collect()
    bench.run_all()
    assert bench.scheduler.stats.num_leaked_pages == 0


def test_the_ends_of_texts_outlast_the_middle_of_a_long_one() -> None:
    """A text of 300 tokens goes through the space, of which 32 pages were cached, and evicts no
    page that a next turn would start after.
    """
    bench = Bench(with_windows(LIMITS, 8, spare=20))
    asked = [turn(f"a{i}", i, *range(20), max_new_tokens=1) for i in range(4)]
    assert [cached_of(bench, request) for request in asked] == [0] * 4
    assert cached_of(bench, turn("long", *[5] * 300, max_new_tokens=20)) == 0
    again = [replace(request, request_id=f"b{i}") for i, request in enumerate(asked)]
    assert [cached_of(bench, request) for request in again] == [20, 20, 20, 20]


def test_a_place_where_two_texts_part_is_kept_from_then_on() -> None:
    """Its window was evicted: the second text computes it again, the third finds it."""
    bench, common = Bench(with_windows(LIMITS, 8)), tuple(range(24))
    prompts = [(*common, *[number] * 60) for number in (3, 4, 5)]
    found = [cached_of(bench, turn(f"r{i}", *p)) for i, p in enumerate(prompts)]
    assert found == [0, 0, 20]  # the page after it is named by a token that differs


def test_the_end_of_a_prompt_is_kept_while_a_long_answer_is_written() -> None:
    """The next turn may come without the answer's reasoning, and so diverge from it at once."""
    bench, prompt = Bench(with_windows(LIMITS, 8)), tuple(range(24))
    assert cached_of(bench, turn("a", *prompt, max_new_tokens=200)) == 0
    assert cached_of(bench, turn("b", *prompt, *[25] * 9)) == 20


def test_what_a_failed_step_wrote_in_a_window_is_found_by_nobody() -> None:
    bench = Bench(with_windows(with_limits(LIMITS, overlap_depth=2), 8, spare=40))
    bench.submit(turn("a", *range(13)))
    bench.run_all()
    bench.submit(turn("b", *range(13), *range(20)))
    assert bench.must_dispatch(StepKind.PREFILL).admissions[0].cached_len == 12
    before = bench.scheduler.stats.num_cached_window_pages
    bench.scheduler.fail()
    stats = bench.scheduler.stats
    assert 0 < stats.num_cached_window_pages[0] < before[0]
    assert (stats.num_leaked_pages, stats.num_free_pages) == (0, stats.num_pages)
    assert stats.num_free_window_pages == (bench.scheduler.limits.pool.windows[0].num_pages,)
    again = bench.scheduler.plan()
    assert again is not None
    assert again.admissions[0].cached_len == 12


def test_other_extra_keys_and_other_weights_find_no_window() -> None:
    bench = Bench(with_windows(LIMITS, 8, spare=40))
    asked = (("a", None), ("b", "k"), ("c", "k"))
    found = [cached_of(bench, replace(turn(name), extra_key=key)) for name, key in asked]
    assert found == [0, 0, 16]
    bench.scheduler.set_weight_version("2")
    assert [cached_of(bench, turn(name)) for name in "de"] == [0, 16]


@pytest.mark.parametrize("algorithm", [Algorithm.EAGLE3, Algorithm.MULTI_LAYER_EAGLE])
def test_rows_that_compute_the_same_page_are_found_again_whole(algorithm: Algorithm) -> None:
    """Rows do not wait for a short common prefix, so each has its own pages for it. Later pages are
    cached for each row when they leave the window, wherever pages end.
    """
    limits = with_limits(LIMITS, page_size=2, num_pages=800, prefill_rows=4, prefill_buckets=(5,))
    limits = with_limits(
        limits, draft_shape=replace(limits.draft_shape, algorithm=algorithm), overlap_depth=2
    )
    for num_new in range(18, 26):
        bench = Bench(with_windows(limits, 6, spare=80))
        asked = [
            turn(name, *range(21), *[i] * (3 + i), max_new_tokens=num_new)
            for i, name in enumerate("abc")
        ]
        bench.submit(*asked)
        bench.run_all()
        for each in asked:
            text = (*each.prompt_ids, *bench.output(each.request_id))
            again = turn(f"{each.request_id} again", *text, 1)
            found = cached_of(bench, again)
            # The last token is not cached, nor are entries that look ahead to it.
            assert found == (len(text) - 1 - limits.draft_shape.tokens_ahead) // 2 * 2, (
                num_new,
                again,
            )


def test_what_a_row_computes_again_takes_the_place_of_what_was_cached() -> None:
    """A text is cached whole, but hardly any of it remains in the window space: a row that starts
    at 0 has its own pages, and caches the text once.
    """
    limits = with_windows(with_limits(LIMITS, num_pages=32, overlap_depth=0), 8)
    bench, prompt = Bench(limits), tuple(range(24))
    assert cached_of(bench, turn("a", *prompt, max_new_tokens=60)) == 0
    assert cached_of(bench, turn("b", *[3] * 40, max_new_tokens=1)) == 0
    before = bench.scheduler.stats.num_cached_pages
    assert before > 16
    bench.submit(turn("again", *prompt, *expected_ids(turn("a", *prompt), 60)[:50]))
    while bench.dispatch() is not None:
        bench.collect()
        stats = bench.scheduler.stats
        own = sum(len(row.page_ids) for row in bench.scheduler._ranks.tenancies)
        assert stats.num_used_pages == own
        assert stats.num_leaked_pages == 0
    assert len(bench.output("again")) == 8
