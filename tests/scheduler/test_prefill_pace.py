"""Prompts within a time: the tokens that fit it, and the rate of decode steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.messages.plan import StepKind
from jspec.scheduler import policy
from jspec.scheduler.prefill_pace import COLD_RUNS, SAMPLES, PrefillPace
from jspec.spec import indexing
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

BUCKETS = (128, 256, 512, 768, 1024, 2048)


def seen(*steps: tuple[int, float]) -> PrefillPace:
    """Return a pace after steps of these tokens and seconds, and after their programs' cold
    runs."""
    pace = PrefillPace(BUCKETS)
    for bucket in BUCKETS:
        for _ in range(COLD_RUNS):
            pace.see(bucket, 9.0)
    for num_tokens, seconds in steps:
        pace.see(num_tokens, seconds)
    return pace


def test_the_worked_example() -> None:
    pace = seen((256, 0.010), (1024, 0.030))
    for seconds, tokens in (
        *((0.0101, 256), (0.0149, 256), (0.0151, 512), (0.0224, 512), (0.0226, 768)),
        *((0.031, 1024), (0.059, 1024), (0.061, 2048)),
    ):
        assert pace.tokens_within(seconds) == tokens


def test_nothing_is_known_before_a_second_run_and_something_always_fits() -> None:
    pace = PrefillPace(BUCKETS)
    assert pace.tokens_within(1.0) is None
    for _ in range(COLD_RUNS):
        pace.see(100, 0.1)
    assert pace.tokens_within(1.0) is None
    pace.see(100, 0.1)
    assert pace.tokens_within(0.001) == 128


def test_one_slow_moment_and_old_times_do_not_count() -> None:
    pace = seen((1024, 0.030), (1024, 0.9), (1024, 0.030))
    assert pace.tokens_within(0.031) == 1024
    for _ in range(SAMPLES):
        pace.see(1024, 0.060)
    assert pace.tokens_within(0.031) == 512


@given(
    steps=st.lists(st.tuples(st.integers(1, 2048), st.floats(0.001, 1.0)), min_size=1),
    seconds=st.floats(0.0005, 2.0),
)
def test_what_fits_is_a_size_and_no_longer_time_fits_less(
    steps: list[tuple[int, float]], seconds: float
) -> None:
    pace = seen(*steps)
    fits, more = pace.tokens_within(seconds), pace.tokens_within(2 * seconds)
    assert fits in BUCKETS
    assert more is not None
    assert fits is not None
    assert fits <= more


def test_a_time_holds_in_a_burst_too() -> None:
    limits = small_limits(chunk_size=16, num_slots=4)
    many = policy.Unfilled(num_rows=40, num_tokens=400)
    asked = {"num_decoding": 2, "since_decode": 0}
    assert policy.prefill_room(limits, many, **asked) == 16
    assert policy.prefill_room(limits, many, **asked, timed=4) <= 4
    assert policy.prefill_room(limits, many, num_decoding=2, since_decode=4, timed=4) == 0
    assert policy.prefill_room(limits, many, num_decoding=0, since_decode=4, timed=4) > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_decode_steps_come_within_the_time(depth: int) -> None:
    """A prefill takes a millisecond per token, padding included; 10 ms may pass between decodes.

    The text is the same.
    """
    limits = small_limits(
        chunk_size=32, num_pages=400, context_length=400, overlap_depth=depth, prefill_rows=4
    )
    bench = Bench(with_limits(limits, prefill_seconds=0.0101))
    first = make_request("a", max_new_tokens=250)
    others = [make_request(f"b{i}", prompt_len=150, max_new_tokens=2) for i in range(3)]
    bench.submit(first)
    bench.must_dispatch(StepKind.PREFILL)
    bench.submit(*others)

    def sizes(plans: list[int]) -> list[int]:
        return [indexing.bucket(size, limits.programs.prefill_buckets) for size in plans if size]

    while bench.dispatch() or bench.in_flight:
        if bench.dispatch() is None:
            plan = bench.in_flight[0]
            tokens = [sum(len(chunk.token_ids) for chunk in plan.chunks)]
            bench.scheduler.timed(plan, sum(sizes(tokens)) * 0.001 or 0.002)
            bench.collect()
    for request in (first, *others):
        count = request.sampling.wanted_tokens
        assert bench.output(request.request_id) == expected_ids(request, count)
    between, longest = [0], [0]
    for plan in bench.runner.plans:
        if plan.kind is StepKind.DECODE:
            longest.append(sum(sizes(between)))
            between = [0]
        between.append(sum(len(chunk.token_ids) for chunk in plan.chunks))
    learned = longest[longest.index(max(longest)) + 8 :]
    assert max(learned) <= 10, longest
    assert max(longest) <= 64  # before any measurement, and then for sizes not seen yet
