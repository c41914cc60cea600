"""Counters of an engine whose shape changes while steps are unread: those of each step's own
shape."""

from __future__ import annotations

from collections import Counter

import pytest

from jspec.config.limits import ServeLimits
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.messages.request import Request
from jspec.messages.response import SpecCounters
from jspec.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import FakeRunner, Handle, random_acceptance, small_limits
from tests.support.fake_text import FakeTextStream
from tests.support.random_shapes import RandomShapes

SHAPES = ((0, 1, 1), (1, 1, 2), (2, 2, 5))  # beside 3/2/7
NEW_TOKENS = dict(zip("abcdefgh", (110, 40, 7, 100, 61, 90, 33, 105), strict=True))


class Recording(FakeRunner):
    """A runner that keeps the result of the last step that was collected."""

    last: StepResult

    def collect(self, dispatched: Handle) -> StepResult:
        self.last = super().collect(dispatched)
        return self.last


class Expected:
    """The expected counters, from the dispatched steps and their results."""

    def __init__(self, requests: list[Request]) -> None:
        self._left = {each.request_id: each.sampling.wanted_tokens for each in requests}
        self._named = dict[tuple[int, int], str]()
        self.proposed, self.verified = Counter[str](), Counter[str]()
        self.accepted, self.whole = Counter[str](), Counter[str]()
        self.shapes = set[int]()

    def see(self, plan: StepPlan, result: StepResult, limits: ServeLimits) -> None:
        for admission in plan.admissions:
            row = admission.row
            self._named[row.slot, row.epoch] = admission.request.request_id
        for each in result.rounds:
            for row, count in zip(plan.row_refs, each.num_emitted.tolist(), strict=True):
                name = self._named[row.slot, row.epoch]
                left = self._left[name]
                self._left[name] = max(left - count, 0)
                draft_shape = plan.shape or limits.draft_shape
                if plan.kind is not StepKind.DECODE or left == 0 or draft_shape.num_steps == 0:
                    continue
                self.shapes.add(draft_shape.num_draft_tokens)
                self.proposed[name] += draft_shape.num_draft_tokens - 1
                self.verified[name] += 1
                self.accepted[name] += min(count - 1, left)
                self.whole[name] += count <= left


@pytest.mark.parametrize(("depth", "num_rounds"), [(0, 1), (1, 3), (3, 1)])
def test_each_step_is_counted_by_its_own_shape(depth: int, num_rounds: int) -> None:
    seed = depth
    limits = small_limits(
        steps_topk_nodes=(3, 2, 7), shapes=SHAPES, overlap_depth=depth, num_rounds=num_rounds
    )
    runner = Recording(limits, accepted_at=random_acceptance(0.6, 3, salt=seed))
    bench = Bench(limits, runner)
    shapes = RandomShapes(limits, seed=seed)
    bench.scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request, shapes=shapes)
    requests = [make_request(name, max_new_tokens=count) for name, count in NEW_TOKENS.items()]
    expected = Expected(requests)
    bench.submit(*requests)
    while bench.dispatch() or bench.in_flight:
        if bench.dispatch() is None:
            plan = bench.in_flight[0]
            bench.collect()
            expected.see(plan, runner.last, limits)
    assert len(expected.shapes) == 3
    totals = bench.scheduler.stats.counters
    for request in requests:
        name = request.request_id
        assert bench.output(name) == expected_ids(request, NEW_TOKENS[name])
        check(bench.chunks[name][-1].counters, expected, [name])
    check(totals, expected, list(NEW_TOKENS))


def check(counters: SpecCounters, expected: Expected, names: list[str]) -> None:
    assert counters.num_proposed == sum(expected.proposed[name] for name in names)
    assert counters.verify_ct == sum(expected.verified[name] for name in names)
    assert counters.num_accepted == sum(expected.accepted[name] for name in names)
    assert counters.full_verify_ct == sum(expected.whole[name] for name in names)
    assert sum(counters.accept_histogram) == counters.verify_ct
