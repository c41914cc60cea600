"""A device that says how many drafts of each row it verified: what is counted of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.messages.plan import RoundResult, StepKind, StepResult
from jspec.messages.request import SpecCounters
from tests.scheduler.test_scheduler import Bench, make_request
from tests.support.fake_runner import FakeRunner, random_acceptance, small_limits


class CountingRunner(FakeRunner):
    """Of a row that accepts n of its 3 drafts n were verified, or all; of one that accepts none,
    none or one. `told`: (emitted, verified) of each row and round."""

    def __init__(self, limits: ServeLimits, **more: Any) -> None:
        super().__init__(limits, **more)
        self.told: list[tuple[int, int]] = []

    def collect(self) -> StepResult:
        step = super().collect()
        if self.plans[-1].kind is StepKind.PREFILL:  # nothing overlaps
            return step
        return replace(step, rounds=tuple(map(self.counted, step.rounds)))

    def counted(self, of_round: RoundResult) -> RoundResult:
        emitted = of_round.num_emitted
        odd = (of_round.ids[:, 0] + np.arange(len(emitted))) % 2 == 1
        verified = np.where(emitted > 1, np.where(odd, 3, emitted - 1), odd).astype(np.int32)
        self.told += list(zip(emitted.tolist(), verified.tolist(), strict=True))
        return replace(of_round, num_proposed=verified)


def counters_of(told: list[tuple[int, int]]) -> SpecCounters:
    verified = [(emitted, drafts) for emitted, drafts in told if drafts]
    return SpecCounters(
        verify_ct=len(verified),
        num_accepted=sum(emitted - 1 for emitted, _ in verified),
        num_proposed=sum(drafts for _, drafts in verified),
        accept_histogram=tuple(sum(e == n + 1 for e, _ in verified) for n in range(4)),
        full_verify_ct=len(verified),
        full_num_emitted=sum(emitted for emitted, _ in verified),
    )


@pytest.mark.parametrize("stop", [(), ("never said",)], ids=["at once", "row by row"])
def test_a_row_without_a_verified_draft_is_a_plain_one(stop: tuple[str, ...]) -> None:
    limits = small_limits(overlap_depth=0, context_length=256, num_pages=128)
    runner = CountingRunner(limits, accepted_at=random_acceptance(0.5, 3))
    bench = Bench(limits, runner)
    bench.submit(make_request(max_new_tokens=150, stop=list(stop)))
    bench.must_dispatch(StepKind.PREFILL)
    bench.collect()
    while sum(len(chunk.new_ids) for chunk in bench.chunks["r"]) < 120:
        bench.must_dispatch(StepKind.DECODE)
        bench.collect()
    expected = counters_of(runner.told)
    assert (1, 0) in runner.told
    assert {(1, 1), (2, 1), (2, 3), (4, 3)} <= set(runner.told)
    assert bench.scheduler.stats.counters == expected
    assert bench.chunks["r"][-1].counters == expected


@pytest.mark.parametrize("wrong", [[0], [4], [1, 1]])
def test_a_number_that_cannot_be_raises(wrong: list[int]) -> None:
    limits = small_limits(overlap_depth=0)
    bench = Bench(limits, FakeRunner(limits, accepted_at=lambda *_: 2))
    bench.submit(make_request())
    bench.must_dispatch(StepKind.PREFILL)
    bench.collect()
    plan = bench.must_dispatch(StepKind.DECODE)
    step = bench.runner.collect()
    rounds = tuple(replace(r, num_proposed=np.array(wrong, np.int32)) for r in step.rounds)
    with pytest.raises(InvariantError, match=r"verified .* drafts; expected from \[2\]"):
        bench.scheduler.commit(plan, replace(step, rounds=rounds))
