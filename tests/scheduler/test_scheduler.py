"""The scheduler step by step: plans, dropped results, counters."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import pytest

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError, QueueFullError, RequestError
from jspec.messages.plan import RoundResult, StepKind, StepPlan, StepResult
from jspec.messages.request import FinishKind, Request, SamplingParams, StreamChunk
from jspec.scheduler.pages.page_space import RowPages
from jspec.scheduler.scheduler import Scheduler
from jspec.scheduler.shapes.shape_choice import FixedShape
from tests.support.fake_runner import FakeRunner, Handle, hash_token, scripted_tokens, small_limits
from tests.support.fake_text import FakeTextStream, ids_of


def make_request(
    name: str = "r", *, prompt_len: int = 5, max_new_tokens: int = 8, **sampling: object
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(range(prompt_len)),
        sampling=SamplingParams.from_mapping({"max_new_tokens": max_new_tokens, **sampling}),
        seed=hash_seed(name),
    )


def hash_seed(name: str) -> int:
    return int.from_bytes(name.encode(), "little")


def check_rows_have_slots(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that each row of a step has its slot and pages: none was retracted meanwhile."""
    for row in plan.rows:
        assert not scheduler._ranks.tenancy_of(row).ended, row


class Bench:
    """A scheduler and a fake runner, driven by hand."""

    def __init__(self, limits: ServeLimits, runner: Any = None) -> None:
        """runner: another one than a FakeRunner."""
        self.scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        self.runner = runner or FakeRunner(limits)
        self.in_flight: deque[StepPlan] = deque()
        self.handles: deque[Handle] = deque()
        self.chunks: dict[str, list[StreamChunk]] = {}

    def submit(self, *requests: Request) -> None:
        self.scheduler.enqueue(requests)

    def dispatch(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            check_rows_have_slots(self.scheduler, plan)
            self.handles.append(self.runner.dispatch(plan))
            self.in_flight.append(plan)
        return plan

    def must_dispatch(self, kind: StepKind) -> StepPlan:
        plan = self.dispatch()
        assert plan is not None
        assert plan.kind is kind
        return plan

    def collect(self) -> tuple[StreamChunk, ...]:
        chunks = self.scheduler.commit(
            self.in_flight.popleft(), self.runner.collect(self.handles.popleft())
        )
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        return chunks

    def run_all(self) -> None:
        """Dispatch as far ahead as the scheduler plans, then collect one step at a time."""
        while self.dispatch() or self.in_flight:
            if self.dispatch() is None:
                self.collect()

    def output(self, name: str) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks[name] for token_id in chunk.new_ids)


def expected_ids(request: Request, count: int) -> tuple[int, ...]:
    start = len(request.prompt_ids)
    return tuple(hash_token(request, position) for position in range(start, start + count))


def test_one_request_from_submit_to_finish() -> None:
    bench, request = Bench(small_limits(overlap_depth=0)), make_request()
    bench.submit(request)
    bench.run_all()
    last = bench.chunks["r"][-1]
    assert bench.output("r") == expected_ids(request, 8)
    assert last.finish is not None
    assert (last.finish.kind, last.finish.length) == (FinishKind.LENGTH, 8)
    assert last.prompt_tokens == 5
    assert sum(chunk.num_accepted for chunk in bench.chunks["r"]) == last.counters.num_accepted
    assert sum(last.counters.accept_histogram) == last.counters.verify_ct > 0
    stats = bench.scheduler.stats
    assert (stats.num_free_pages, stats.num_leaked_pages) == (stats.num_pages, 0)
    assert (stats.num_finished, stats.num_emitted, stats.counters) == (1, 8, last.counters)


def test_a_row_decodes_once_its_final_chunk_is_dispatched_not_collected() -> None:
    bench = Bench(small_limits(overlap_depth=1, chunk_size=4))
    bench.submit(make_request(prompt_len=6))
    first = bench.must_dispatch(StepKind.PREFILL)
    second = bench.must_dispatch(StepKind.PREFILL)
    assert [chunk.next_id for chunk in first.chunks + second.chunks] == [4, None]
    assert (len(first.admissions), len(second.admissions)) == (1, 0)
    assert bench.dispatch() is None  # two steps are unread
    assert bench.collect() == ()
    bench.must_dispatch(StepKind.DECODE)
    assert len(bench.in_flight) == 2


def test_overlap_depth_bounds_the_unread_steps() -> None:
    for depth in (0, 1, 2):
        bench = Bench(small_limits(overlap_depth=depth))
        bench.submit(make_request(max_new_tokens=50))
        while bench.dispatch():
            pass
        assert len(bench.in_flight) == depth + 1


def test_prefill_and_decode_alternate_when_both_are_pending() -> None:
    bench = Bench(small_limits(overlap_depth=0, chunk_size=4, prefill_rows=1))
    bench.submit(
        make_request("a", prompt_len=4, max_new_tokens=40), make_request("b", prompt_len=20)
    )
    kinds = []
    for _ in range(10):
        plan = bench.dispatch()
        assert plan is not None
        kinds.append(plan.kind)
        bench.collect()
    assert kinds == [StepKind.PREFILL, StepKind.DECODE] * 5


def test_chunks_of_several_rows_are_packed_into_one_prefill() -> None:
    bench = Bench(small_limits(chunk_size=8, prefill_rows=2))
    bench.submit(*(make_request(name, prompt_len=5) for name in "abc"))
    plan = bench.must_dispatch(StepKind.PREFILL)
    assert [(c.start, len(c.token_ids)) for c in plan.chunks] == [(0, 5), (0, 3)]
    assert [admission.request.request_id for admission in plan.admissions] == ["a", "b"]


def test_requests_are_admitted_in_order_and_nobody_overtakes() -> None:
    limits = small_limits(num_pages=16, page_size=4, overlap_depth=0)
    bench = Bench(limits)
    bench.submit(
        make_request("a", prompt_len=20, max_new_tokens=20),
        make_request("big", prompt_len=40, max_new_tokens=9),
        make_request("small", prompt_len=1, max_new_tokens=1),
    )
    admitted: list[str] = []
    while plan := bench.dispatch():
        admitted.extend(admission.request.request_id for admission in plan.admissions)
        bench.collect()
    assert admitted == ["a", "big", "small"]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_no_step_is_dispatched_for_tokens_already_under_way(depth: int) -> None:
    bench = Bench(small_limits(overlap_depth=depth))
    bench.submit(make_request(max_new_tokens=1))
    bench.must_dispatch(StepKind.PREFILL)
    assert bench.dispatch() is None
    bench.collect()
    assert len(bench.runner.plans) == 1


def test_results_after_a_stop_are_stale_and_count_nothing() -> None:
    limits = small_limits(overlap_depth=2)
    script = scripted_tokens({"r": ids_of("abzabcabcabc")})
    bench = Bench(limits, FakeRunner(limits, token_at=script, accepted_at=lambda _r, _l: 3))
    bench.submit(make_request(max_new_tokens=30, stop_token_ids=[25]))
    for _ in range(3):
        assert bench.dispatch()
    bench.collect()
    (last,) = bench.collect()
    assert last.finish is not None
    assert last.finish.matched == 25
    before = bench.scheduler.stats
    assert (before.num_free_pages, before.num_leaked_pages) != (before.num_pages, 0)
    assert bench.collect() == ()
    after = bench.scheduler.stats
    assert after.counters == before.counters == last.counters
    assert (after.num_emitted, after.counters.verify_ct) == (3, 1)
    assert after.num_free_pages == after.num_pages


def test_slot_and_pages_return_only_after_the_last_step_that_names_them() -> None:
    bench = Bench(small_limits(num_slots=1, overlap_depth=1))
    bench.submit(make_request("a", max_new_tokens=50), make_request("b"))
    bench.must_dispatch(StepKind.PREFILL)
    bench.must_dispatch(StepKind.DECODE)
    chunk = bench.scheduler.abort("a")
    assert chunk is not None
    assert chunk.finish is not None
    assert chunk.finish.kind is FinishKind.ABORT
    bench.collect()
    assert bench.dispatch() is None  # the decode still names slot 1
    assert bench.scheduler.stats.num_free_pages < bench.scheduler.stats.num_pages
    bench.collect()
    plan = bench.must_dispatch(StepKind.PREFILL)
    assert (plan.chunks[0].row.slot, plan.chunks[0].row.epoch) == (1, 2)
    assert "a" not in bench.chunks


def test_abort_of_a_waiting_or_unknown_request() -> None:
    bench = Bench(small_limits())
    bench.submit(make_request("a"))
    chunk = bench.scheduler.abort("a")
    assert chunk is not None
    assert chunk.new_ids == ()
    assert bench.scheduler.abort("a") is None
    assert bench.scheduler.abort("nobody") is None
    assert bench.dispatch() is None
    assert bench.scheduler.stats.num_aborted == 1


def test_abort_gives_back_the_text_held_for_a_stop_string() -> None:
    limits = small_limits(overlap_depth=0)
    bench = Bench(limits, FakeRunner(limits, token_at=scripted_tokens({"r": ids_of("abab")})))
    bench.submit(make_request(max_new_tokens=4, stop=["ac"]))
    bench.dispatch()
    (chunk,) = bench.collect()
    assert (chunk.new_ids, chunk.text) == (ids_of("a"), "")
    last = bench.scheduler.abort("r")
    assert last is not None
    assert (last.text, last.new_ids) == ("a", ())


@pytest.mark.parametrize(("depth", "page_size"), [(0, 1), (3, 16)])
def test_page_pressure_retracts_the_newest_and_changes_no_token(depth: int, page_size: int) -> None:
    num_pages = 160 // page_size
    bench = Bench(small_limits(num_pages=num_pages, page_size=page_size, overlap_depth=depth))
    requests = [make_request(name, prompt_len=2, max_new_tokens=100) for name in "abc"]
    bench.submit(*requests)
    bench.run_all()
    num_retractions = [bench.chunks[name][-1].num_retractions for name in "abc"]
    assert num_retractions[0] == 0
    assert sum(num_retractions) == bench.scheduler.stats.num_retractions > 0
    for request in requests:
        name = request.request_id
        assert bench.output(name) == expected_ids(request, 100)
        assert bench.chunks[name][-1].prompt_tokens == 2
    assert bench.scheduler.stats.num_free_pages == num_pages
    again = [a for plan in bench.runner.plans for a in plan.admissions if len(a.fill_ids) > 2]
    assert len(again) == sum(num_retractions)
    assert all(admission.prompt_len == 2 for admission in again)


def test_a_retracted_request_goes_back_to_the_front_of_the_queue() -> None:
    bench = Bench(small_limits(num_pages=160, page_size=1, num_slots=2))
    requests = [make_request(name, prompt_len=2, max_new_tokens=100) for name in "abcd"]
    bench.submit(*requests)
    bench.run_all()
    order = [a.request.request_id for plan in bench.runner.plans for a in plan.admissions]
    assert order[:3] == ["a", "b", "b"]
    assert list(dict.fromkeys(order)) == ["a", "b", "c", "d"]


def test_a_sequence_alone_grows_until_the_pool_is_full() -> None:
    # 20 tokens beside the scratch, prompt 10: at most 20 - 10 + 1 = 11 more (see budget.py).
    limits = small_limits(num_pages=6, page_size=4, overlap_depth=2)
    bench = Bench(limits, FakeRunner(limits, accepted_at=lambda _r, _l: 0))
    request = make_request(prompt_len=10, max_new_tokens=100)
    bench.submit(request)
    bench.run_all()
    assert bench.output("r") == expected_ids(request, 11)
    last = bench.chunks["r"][-1]
    assert last.finish is not None
    assert (last.finish.kind, last.num_retractions) == (FinishKind.LENGTH, 0)


def test_stats_may_be_read_while_rows_come_and_go() -> None:
    """Another thread may read them. Here a row comes whenever one is counted, which a real thread
    cannot do reliably.
    """
    scheduler = Bench(small_limits()).scheduler
    tenancies: dict[Any, Any] = scheduler._ranks.all[0].tenancies

    class Arriving:
        pending_snapshots: ClassVar[dict[int, int]] = {}

        @property
        def pages(self) -> tuple[RowPages, ...]:
            tenancies[len(tenancies)] = Arriving()
            return (RowPages(0),)

    tenancies[0] = Arriving()
    assert scheduler.stats.num_leaked_pages == 0


def test_the_queue_is_bounded() -> None:
    bench = Bench(small_limits(max_queued_requests=2))
    bench.submit(make_request("a"), make_request("b"))
    with pytest.raises(QueueFullError, match="max_queued_requests 2"):
        bench.submit(make_request("c"))
    bench.must_dispatch(StepKind.PREFILL)
    bench.submit(make_request("c"))
    assert (bench.scheduler.stats.num_running, bench.scheduler.stats.num_queued) == (2, 1)


def test_all_requests_of_a_call_are_queued_or_none() -> None:
    bench = Bench(small_limits(max_queued_requests=2))
    good = make_request("a"), make_request("b")
    for refused, message in (
        ((*good, make_request("c")), "3 sequences at once; expected at most max_queued_requests 2"),
        ((good[0], make_request("c", prompt_len=0)), "the prompt has 0 tokens"),
        ((good[0], make_request("a")), "request_id is 'a'; expected one that is not in use"),
    ):
        with pytest.raises(RequestError, match=message):
            bench.submit(*refused)
    bench.submit(good[0])
    with pytest.raises(QueueFullError, match="requests: 1 waiting, 2 new"):
        bench.submit(good[1], make_request("c"))
    assert bench.scheduler.stats.num_requests == bench.scheduler.num_queued == 1
    bench.submit(good[1])


@pytest.mark.parametrize(
    ("prompt_len", "message"), [(0, "0 tokens"), (128, "context length is 128"), (61, "at most 60")]
)
def test_a_request_that_can_never_run_is_refused(prompt_len: int, message: str) -> None:
    bench = Bench(small_limits(num_pages=16, page_size=4))
    with pytest.raises(RequestError, match=message):
        bench.submit(make_request(prompt_len=prompt_len))
    assert bench.scheduler.stats.num_requests == 0


def test_an_id_in_use_is_refused_until_its_request_ends() -> None:
    bench = Bench(small_limits())
    bench.submit(make_request("a"))
    with pytest.raises(RequestError, match="'a'"):
        bench.submit(make_request("a"))
    bench.scheduler.abort("a")
    bench.submit(make_request("a"))


def test_a_plan_has_the_features_of_all_its_rows_and_no_others() -> None:
    bench = Bench(small_limits(overlap_depth=0, prefill_rows=4))
    bench.submit(
        make_request("a", max_new_tokens=40),
        make_request("b", top_p=0.5, max_new_tokens=2),
        make_request("c", presence_penalty=1, max_new_tokens=20),
    )
    seen = []
    while plan := bench.dispatch():
        if str(plan.options) not in seen:
            seen.append(str(plan.options))
        bench.collect()
    assert seen == ["sampling", "penalties", "plain"]


def result(step: int, *rounds: tuple[tuple[int, ...], ...]) -> StepResult:
    """Return a result from each round's ids by row."""
    return StepResult(step=step, rounds=tuple(RoundResult.of(ids) for ids in rounds))


def test_results_out_of_order_or_out_of_shape_raise() -> None:
    bench = Bench(small_limits(overlap_depth=1))
    bench.submit(make_request())
    first = bench.must_dispatch(StepKind.PREFILL)
    second = bench.must_dispatch(StepKind.DECODE)
    with pytest.raises(InvariantError, match="oldest step in flight, 1"):
        bench.scheduler.commit(second, result(2, ((1,),)))
    with pytest.raises(InvariantError, match="result 2"):
        bench.scheduler.commit(first, result(2, ((1,),)))
    for wrong in ((), ((),), ((1, 2),), ((1,), (2,))):
        with pytest.raises(InvariantError, match="step 1 emitted"):
            bench.scheduler.commit(first, result(1, wrong))
    bench.collect()
    with pytest.raises(InvariantError, match="step 2 emitted"):
        bench.scheduler.commit(second, result(2, ((1,) * 5,)))


def test_plain_decoding_is_one_token_a_step_and_no_verification() -> None:
    bench = Bench(small_limits(steps_topk_nodes=(0, 1, 1)))
    request = make_request()
    bench.submit(request)
    bench.run_all()
    assert bench.output("r") == expected_ids(request, 8)
    assert [len(chunk.new_ids) for chunk in bench.chunks["r"]] == [1] * 8
    assert bench.scheduler.stats.counters.verify_ct == 0


class Heard(FixedShape):
    """A chooser that records its calls: rows and tokens of each decode."""

    def __init__(self, limits: ServeLimits) -> None:
        super().__init__(limits.draft_shape)
        self.told: list[tuple[int, int]] = []

    def read(self, plan: StepPlan, result: StepResult) -> None:
        (of_round,) = result.rounds
        assert len(plan.rows) == len(of_round.num_emitted) == len(of_round.ids)
        self.told.append((len(plan.rows), int(of_round.num_emitted.sum())))


def test_rows_that_switched_speculation_off_say_nothing_of_drafts() -> None:
    limits = small_limits()
    heard, bench = Heard(limits), Bench(limits)
    bench.scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request, shapes=heard)
    bench.submit(make_request("off", max_new_tokens=24, speculative=False))
    bench.run_all()
    assert heard.told == []
    bench.submit(make_request("off", max_new_tokens=24, speculative=False), make_request("on"))
    bench.run_all()
    assert {rows for rows, _ in heard.told} == {1}
    assert sum(tokens for _, tokens in heard.told) >= len(bench.output("on")) - 1
