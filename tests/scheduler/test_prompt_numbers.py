"""Values of a prompt that comes in chunks: all are of the weights that choose its first token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jspec.config.limits import ServeLimits
from jspec.messages.plan import RoundResult, StepKind, StepLogprobs, StepPlan
from jspec.messages.request import Request, StreamChunk
from jspec.spec.hidden_rows import HiddenRows
from tests.scheduler.test_scheduler import Bench, make_request
from tests.support.fake_runner import FakeRunner, small_limits
from tests.support.flat_limits import with_limits

OF_A_WEIGHT = 1000.0


class WeighingRunner(FakeRunner):
    """A token's values are its position, plus OF_A_WEIGHT for each update before the step."""

    num_updates = 0

    def _round(self, plan: StepPlan, ids: tuple[tuple[int, ...], ...]) -> RoundResult:
        of_round = super()._round(plan, ids)
        chunks = [np.arange(c.start, c.start + len(c.token_ids)) for c in plan.chunks]
        of_prompt = np.concatenate([*chunks, []]) + OF_A_WEIGHT * self.num_updates
        of_output = np.full(of_round.ids.shape, OF_A_WEIGHT * self.num_updates)
        is_prompt = plan.kind is StepKind.PREFILL
        return replace(
            of_round,
            logprobs=logprobs_of(of_output),
            hidden=of_output[..., None].astype(np.float32),
            prompt_logprobs=logprobs_of(of_prompt[:, None]) if is_prompt else None,
            prompt_hidden=of_prompt[:, None].astype(np.float32) if is_prompt else None,
        )


def logprobs_of(values: np.ndarray) -> StepLogprobs:
    none = np.zeros((*values.shape, 0))
    return StepLogprobs(
        logprobs=values, top_logprobs=none, top_ids=none.astype(int), watched_logprobs=none
    )


def bench_of(**changes: object) -> Bench:
    limits: ServeLimits = with_limits(
        small_limits(chunk_size=2, num_pages=256, context_length=512, prefix_cache=True),
        logprobs=True,
        hidden=HiddenRows(1),
        **changes,  # type: ignore[arg-type]
    )
    return Bench(limits, WeighingRunner(limits))


def asking(name: str, prompt_len: int) -> Request:
    return make_request(
        name,
        prompt_len=prompt_len,
        max_new_tokens=4,
        return_logprob=True,
        logprob_start_len=0,
        return_hidden_states=True,
    )


def update(bench: Bench) -> None:
    """Update the weights like the loop does between two steps."""
    while bench.in_flight:
        bench.collect()
    assert isinstance(bench.runner, WeighingRunner)
    bench.runner.num_updates += 1
    bench.scheduler.fail()
    bench.scheduler.set_weight_version(str(bench.runner.num_updates))


def check_prompt(chunks: list[StreamChunk], prompt_len: int, *, updates: int) -> None:
    """Check that each value of a prompt appears once, with the weights after `updates` updates."""
    (first,) = [chunk for chunk in chunks if chunk.prompt_logprobs]
    known = [None if known is None else known.logprob for _, known in first.prompt_logprobs]
    of_weights = OF_A_WEIGHT * updates
    assert known == [None, *(of_weights + i for i in range(prompt_len - 1))]
    assert [token_id for token_id, _ in first.prompt_logprobs] == list(range(prompt_len))
    states = first.hidden_states[0]
    np.testing.assert_array_equal(states[:, 0], of_weights + np.arange(prompt_len))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("steps_before", [1, 64, 127])
def test_an_update_in_the_middle_of_a_prompt_leaves_no_number_of_the_old_weights(
    depth: int, steps_before: int
) -> None:
    bench = bench_of(overlap_depth=depth)
    bench.submit(asking("a", 256))
    for _ in range(steps_before):
        if bench.dispatch() is None:
            bench.collect()
    update(bench)
    bench.run_all()
    chunks = bench.chunks["a"]
    check_prompt(chunks, 256, updates=1)
    assert {chunk.weight_version for chunk in chunks} == {"1"}
    assert chunks[-1].num_retractions == 1
    assert [x.logprob for chunk in chunks for x in chunk.logprobs] == [OF_A_WEIGHT] * 4
    assert bench.scheduler.stats.num_leaked_pages == 0


def test_a_row_that_was_retracted_before_the_update_keeps_nothing_either() -> None:
    """It waits for pages while the weights change, with half of its prompt's values."""
    bench = bench_of(overlap_depth=0)
    bench.submit(asking("a", 64))
    for _ in range(16):
        bench.must_dispatch(StepKind.PREFILL)
        bench.collect()
    bench.scheduler.fail()
    update(bench)
    bench.run_all()
    check_prompt(bench.chunks["a"], 64, updates=1)
    assert bench.chunks["a"][-1].num_retractions == 1


def test_a_retraction_alone_keeps_what_is_known() -> None:
    bench = bench_of(overlap_depth=0)
    bench.submit(asking("a", 64))
    for _ in range(16):
        bench.must_dispatch(StepKind.PREFILL)
        bench.collect()
    sequence = bench.scheduler._sequences["a"]
    bench.scheduler._retract(sequence)
    assert (sequence.logprobs.computed_from, sequence.hidden.computed_from) == (32, 32)
    assert bench.must_dispatch(StepKind.PREFILL).admissions[0].cached_len == 28
    bench.collect()
    bench.run_all()
    check_prompt(bench.chunks["a"], 64, updates=0)


def test_what_went_out_with_a_token_stays_and_comes_once() -> None:
    bench = bench_of(overlap_depth=0)
    bench.submit(asking("a", 8))
    while not bench.chunks:
        bench.dispatch()
        bench.collect()
    update(bench)
    bench.run_all()
    check_prompt(bench.chunks["a"], 8, updates=0)
    versions = [chunk.weight_version for chunk in bench.chunks["a"]]
    assert (versions[0], versions[-1]) == ("default", "1")


def test_siblings_share_pages_of_the_new_weights_alone() -> None:
    """n = 3: the first is half filled, the others wait for it, and a request waits for a slot."""
    bench = bench_of(overlap_depth=1)
    bench.submit(*(make_request(name, prompt_len=64, max_new_tokens=4) for name in "abc"))
    bench.submit(asking("d", 64))
    for _ in range(20):
        if bench.dispatch() is None:
            bench.collect()
    update(bench)
    cached = bench.scheduler.stats.num_cached_pages
    plan = bench.must_dispatch(StepKind.PREFILL)
    assert cached > 0
    assert [admission.cached_len for admission in plan.admissions] == [0]
    bench.run_all()
    assert {name: bench.chunks[name][-1].cached_tokens for name in "abcd"} == {
        **{"a": 0, "b": 60, "c": 60},
        "d": 0,
    }
    assert {chunk.weight_version for name in "abcd" for chunk in bench.chunks[name]} == {"1"}
    check_prompt(bench.chunks["d"], 64, updates=1)


def test_tokens_cached_under_the_old_weights_are_not_counted_under_the_new() -> None:
    bench = bench_of(overlap_depth=0)
    bench.submit(make_request("a", prompt_len=64))
    bench.run_all()
    bench.submit(make_request("b", prompt_len=128))
    bench.must_dispatch(StepKind.PREFILL)
    update(bench)
    bench.run_all()
    bench.submit(make_request("c", prompt_len=128))
    bench.run_all()
    assert [bench.chunks[name][-1].cached_tokens for name in "bc"] == [0, 124]
