"""The queue: by rank, then by the rows of each caller, then by arrival, without starvation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import PriorityOrder
from jspec.errors import RequestError
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.scheduler.sequence import Sequence
from jspec.scheduler.waiting import PATIENCE, WaitingQueue
from tests.scheduler.test_policy import make_sequence
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

OFF = small_limits(num_slots=2)
HIGH = with_limits(OFF, priority_order=PriorityOrder.HIGH_FIRST)
LOW = with_limits(OFF, priority_order=PriorityOrder.LOW_FIRST)


def waiting(arrival: int, priority: int = 0, *, caller: str | None = None) -> Sequence:
    sequence = make_sequence(4, arrival=arrival)
    sequence.caller = caller
    sequence.request = replace(sequence.request, priority=priority)
    return sequence


def urgent(name: str, priority: int, **more: int) -> Request:
    return replace(make_request(name, **more), priority=priority)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [(OFF, [0, 1, 2, 3, 4]), (HIGH, [3, 1, 4, 0, 2]), (LOW, [0, 2, 1, 4, 3])],
    ids=["off", "high first", "low first"],
)
def test_a_rank_goes_first_and_within_it_who_came_first(limits, expected) -> None:  # type: ignore[no-untyped-def]
    queue = WaitingQueue(limits)
    for arrival, priority in enumerate([0, 5, 0, 9, 5]):
        queue.push(waiting(arrival, priority if limits is not OFF else 0))
    assert [each.arrival for each in queue] == expected
    assert [queue.pop().arrival for _ in expected] == expected
    assert len(queue) == 0


def test_a_retracted_one_goes_before_all_of_its_rank_and_no_other() -> None:
    queue = WaitingQueue(HIGH)
    queue.push(waiting(7, 0))
    queue.push(waiting(8, 5))
    queue.push_back(waiting(3, 0))
    assert [queue.pop().arrival for _ in range(3)] == [8, 3, 7]


def test_patience_begins_anew_when_a_sequence_gives_way() -> None:
    """A limited number of a higher rank may go before it: as many as before any other."""
    queue = WaitingQueue(HIGH)
    queue.push(waiting(0, 0))
    assert queue.pop().arrival == 0
    for arrival in range(1, 50):  # it runs meanwhile
        queue.push(waiting(arrival, 9))
        queue.pop()
    queue.push_back(waiting(0, 0))
    gone = []
    for arrival in range(100, 200):
        queue.push(waiting(arrival, 9))
        gone.append(queue.pop().arrival)
        if gone[-1] == 0:
            break
    assert len(gone) == PATIENCE * HIGH.pool.num_slots + 1


def test_a_retracted_sequence_outlasts_the_limit_of_the_queue() -> None:
    """Pages are short, so one is retracted. It has run, so neither it nor the other one of its call
    expires. Unknown sequences are not ended.
    """
    bench = Bench(small_limits(num_slots=2, num_pages=160, page_size=1, overlap_depth=0))
    requests = [make_request(name, prompt_len=2, max_new_tokens=100) for name in "ab"]
    bench.submit(*requests)
    assert bench.scheduler.stats.num_queued == 2
    while not bench.scheduler.stats.num_retractions:
        bench.dispatch()
        bench.collect()
    assert (bench.scheduler.stats.num_running, bench.scheduler.stats.num_queued) == (1, 1)
    assert not bench.scheduler.expire(("b",))
    assert not bench.scheduler.expire(("a", "b"))
    fresh = make_request("c")
    bench.submit(fresh)
    assert not bench.scheduler.expire(("b", "c"))
    assert bench.scheduler.expire(("c",))
    bench.run_all()
    for request in requests:
        assert bench.output(request.request_id) == expected_ids(request, 100)
    assert bench.scheduler.stats.num_aborted == 1


def test_who_ends_while_it_waits_is_gone() -> None:
    queue, one = WaitingQueue(HIGH), waiting(0, 5)
    queue.push(one)
    queue.push(waiting(1))
    queue.remove(one)
    assert [each.arrival for each in queue] == [1]
    with pytest.raises(KeyError):
        queue.remove(one)


@given(
    before=st.integers(0, 5),
    priorities=st.lists(st.integers(1, 9), min_size=40, max_size=60),
)
def test_nobody_starves(before: int, priorities: list[int]) -> None:
    """However many of higher ranks come, one for each that leaves."""
    queue = WaitingQueue(HIGH)
    for arrival in range(before):
        queue.push(waiting(arrival, 9))
    queue.push(waiting(1000, 0))
    for passed, priority in enumerate(priorities):
        queue.push(waiting(before + passed, priority))
        if queue.pop().arrival == 1000:
            assert passed <= before + PATIENCE * HIGH.pool.num_slots
            return
    raise AssertionError("it was never its turn")


def test_a_long_queue_of_low_rank_gets_one_turn_after_another() -> None:
    """A hundred of them wait, and one of a high rank comes for each that leaves."""
    queue = WaitingQueue(HIGH)
    for arrival in range(100):
        queue.push(waiting(arrival, 0))
    gone = []
    for arrival in range(100, 500):
        queue.push(waiting(arrival, 9))
        gone.append(queue.pop().request.priority)
    turn = [*[9] * PATIENCE * HIGH.pool.num_slots, 0]
    assert gone == (turn * 100)[:400]


class Crowd:
    """A queue, and the simplest model of who waits and who has a slot."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(OFF)
        self.num_pushed = 0
        self.waiting: list[Sequence] = []
        self.retracted: list[Sequence] = []
        self.running: list[Sequence] = []
        self.went_before: dict[str, set[str]] = {}  # of a waiting caller, at as many rows

    def num_rows(self, caller: object) -> int:
        return sum(each.caller == caller for each in self.running)

    def push(self, caller: str) -> None:
        if all(each.caller != caller for each in self.waiting):
            self.went_before[caller] = set()
        self.waiting.append(waiting(self.num_pushed, caller=caller))
        self.num_pushed += 1
        self.queue.push(self.waiting[-1])

    def leave(self, place: int, *, retracts: bool) -> None:
        if self.running:
            one = self.running.pop(place % len(self.running))
            self.queue.leave(one)
            self.went_before[one.caller] = set()
            if retracts:
                self.retracted.append(one)
                self.queue.push_back(one)

    def remove(self, place: int) -> None:
        if self.waiting:
            self.queue.remove(self.waiting.pop(place % len(self.waiting)))

    def pop(self) -> None:
        if not self.waiting and not self.retracted:
            return
        head, one = self.queue.head, self.queue.pop()
        assert one is head
        if self.retracted:
            assert one is min(self.retracted, key=lambda each: each.arrival)
            self.retracted.remove(one)
        else:
            own = self.num_rows(one.caller)
            assert one is next(each for each in self.waiting if each.caller == one.caller)
            for other in {each.caller for each in self.waiting} - {one.caller}:
                assert own <= self.num_rows(other), "it has more rows than a caller that waits"
                if own == self.num_rows(other):
                    assert one.caller not in self.went_before[other], "twice before another's turn"
                    self.went_before[other].add(one.caller)
            self.waiting.remove(one)
        self.running.append(one)
        self.went_before[one.caller] = set()

    def check(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.retracted)
        callers = [each.caller for each in self.waiting + self.retracted]
        assert self.queue.num_callers == len(set(callers))
        rows = [self.num_rows(each.caller) for each in self.running]
        assert self.queue.most_rows == max(rows, default=0)


@given(
    acts=st.lists(
        st.tuples(st.just("push"), st.sampled_from("abc"))
        | st.tuples(st.sampled_from(["end", "retract", "remove"]), st.integers(0, 99))
        | st.tuples(st.just("pop"), st.none()),
        min_size=20,
        max_size=80,
    )
)
def test_a_slot_goes_to_a_caller_with_the_fewest_rows(acts: list[tuple[str, Any]]) -> None:
    """Callers with as many rows take turns, and a caller's requests keep their order."""
    crowd = Crowd()
    for act, argument in acts:
        match act:
            case "push":
                crowd.push(argument)
            case "remove":
                crowd.remove(argument)
            case "pop":
                crowd.pop()
            case _:
                crowd.leave(argument, retracts=act == "retract")
        crowd.check()
    found = sorted(each.arrival for each in crowd.queue)
    assert found == sorted(each.arrival for each in crowd.waiting + crowd.retracted)
    for _ in found:
        crowd.pop()
    assert len(crowd.queue) == 0


def test_a_newcomer_does_not_wait_for_a_long_queue() -> None:
    """A call of 100 prompts has both slots; the next free one goes to the call of one prompt."""
    limits = small_limits(num_slots=2, max_queued_requests=128)
    bench = Bench(limits)
    many = [make_request(f"many{i}", max_new_tokens=20) for i in range(100)]
    bench.submit(*many)
    for _ in range(3):
        bench.dispatch()
        bench.collect()
    assert bench.scheduler.stats.num_running == 2
    bench.submit(one := make_request("one"))
    stats = bench.scheduler.stats
    assert (stats.num_callers_waiting, stats.most_rows_of_a_caller) == (2, 2)
    bench.run_all()
    order = [a.request.request_id for plan in bench.runner.plans for a in plan.admissions]
    assert order == ["many0", "many1", "one", *(f"many{i}" for i in range(2, 100))]
    for request in (one, many[0], many[99]):
        count = request.sampling.max_new_tokens
        assert bench.output(request.request_id) == expected_ids(request, count)
    stats = bench.scheduler.stats
    assert (stats.num_callers_waiting, stats.most_rows_of_a_caller) == (0, 0)


def test_calls_of_one_user_are_one_caller() -> None:
    bench = Bench(small_limits(num_slots=2, overlap_depth=0))
    for name, caller in [("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("c0", None)]:
        bench.submit(replace(make_request(name), caller=caller))
    bench.run_all()
    order = [a.request.request_id for plan in bench.runner.plans for a in plan.admissions]
    assert order[:2] == ["a0", "b0"]
    assert order.index("c0") < order.index("a1") < order.index("a2")


def test_the_scheduler_admits_by_priority_and_writes_the_same_text() -> None:
    limits = with_limits(HIGH, num_slots=1, decode_buckets=(1,), overlap_depth=0)
    bench = Bench(limits)
    requests = [urgent("a", 0), urgent("b", -1), urgent("c", 3)]
    bench.submit(*requests)
    bench.run_all()
    order = [a.request.request_id for plan in bench.runner.plans for a in plan.admissions]
    assert order == ["c", "a", "b"]
    for request in requests:
        assert bench.output(request.request_id) == expected_ids(request, 8)
    assert bench.scheduler.stats.num_leaked_pages == 0


def test_of_two_rows_the_lower_rank_gives_way() -> None:
    """There are pages for one of them; the one that came first is the less urgent."""
    limits = with_limits(HIGH, num_pages=28, page_size=4, context_length=80, overlap_depth=0)
    bench = Bench(limits)
    bench.submit(urgent("a", 0, max_new_tokens=60), urgent("b", 1, max_new_tokens=60))
    bench.run_all()
    retracted = {name: chunks[-1].num_retractions for name, chunks in bench.chunks.items()}
    assert retracted["a"] > 0
    assert retracted["b"] == 0


@pytest.mark.parametrize("num_pages", [24, 30])
@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_has_a_row_that_gave_way_for_another_of_it(num_pages: int, depth: int) -> None:
    """The less urgent row came first, so it is older; the other one lacks a page while both decode.
    The bench checks each plan's rows.
    """
    limits = with_limits(
        small_limits(
            num_pages=num_pages,
            page_size=4,
            num_slots=4,
            context_length=100,
            overlap_depth=depth,
        ),
        priority_order=PriorityOrder.HIGH_FIRST,
    )
    num_retractions = 0
    for num_steps, num_tokens, seed in itertools.product((0, 3, 8), (40, 60), range(2)):
        bench = Bench(limits)
        low = replace(urgent("a", 0, prompt_len=4, max_new_tokens=60), seed=2 * seed)
        high = urgent("b", 1, prompt_len=4, max_new_tokens=num_tokens)
        high = replace(high, seed=2 * seed + 1)
        bench.submit(low)
        for _ in range(num_steps):
            if bench.dispatch() is None or len(bench.in_flight) > depth:
                bench.collect()
        bench.submit(high)
        bench.run_all()
        num_retractions += bench.scheduler.stats.num_retractions
        assert bench.output("a") == expected_ids(low, 60)
        assert bench.output("b") == expected_ids(high, num_tokens)
        assert bench.scheduler.stats.num_leaked_pages == 0
    assert num_retractions > 0


def test_a_priority_needs_an_order() -> None:
    bench = Bench(OFF)
    with pytest.raises(RequestError, match=r"priority is 3, but .* enable_priority_scheduling"):
        bench.submit(urgent("a", 3))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The long one takes half of each step, until it is filled."""
    limits = small_limits(
        chunk_size=16, num_slots=4, num_pages=200, context_length=400, overlap_depth=0
    )
    bench = Bench(limits)
    bench.submit(make_request("long", prompt_len=300, max_new_tokens=2))
    bench.must_dispatch(StepKind.PREFILL)
    bench.collect()
    bench.submit(make_request("short", prompt_len=6, max_new_tokens=2))
    plan = bench.must_dispatch(StepKind.PREFILL)
    assert [(len(chunk.token_ids), chunk.is_final) for chunk in plan.chunks] == [
        (8, False),
        (6, True),
    ]
    bench.collect()
    bench.run_all()
    assert bench.output("short") == expected_ids(make_request("short", prompt_len=6), 2)


@pytest.mark.parametrize("depth", [0, 1])
def test_decode_steps_come_within_the_budget(depth: int) -> None:
    """A prompt of 300 while a row decodes: at most `prefill_budget` tokens between steps."""
    limits = small_limits(
        chunk_size=32, num_pages=300, context_length=400, overlap_depth=depth, prefill_rows=4
    )
    bench = Bench(with_limits(limits, prefill_budget=8))
    bench.submit(make_request("a", max_new_tokens=200))
    bench.must_dispatch(StepKind.PREFILL)
    bench.submit(make_request("b", prompt_len=190, max_new_tokens=2))
    bench.run_all()
    since, most = 0, 0
    for plan in bench.runner.plans[1:]:
        since += sum(len(chunk.token_ids) for chunk in plan.chunks)
        most = max(most, since)
        if plan.kind is StepKind.DECODE:
            since = 0
    assert most == 8
