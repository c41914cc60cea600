"""Several rounds in one program: the same tokens as one at a time, in float32."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING, StepOptions
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from tests.engine.pool_copies import pool_copies
from tests.speculative.engines import (
    CONTEXT,
    Compiled,
    ViewRunner,
    build,
    check_an_abort_ends_one_and_no_other,
    dial_for,
    make_request,
    plain_ids,
    serve,
    spec_of,
)
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import with_limits

ROUNDS, PAGE = 3, 4
CHAIN, TREE = (2, 1, 3), (2, 2, 4)
FULL: dict[str, Any] = {"top_p": 0.95, "frequency_penalty": 0.3, "presence_penalty": 0.2}


@functools.cache
def chain_engine() -> Compiled:
    return build(spec_of(*CHAIN), page_size=PAGE, variants=(StepOptions(),), num_rounds=ROUNDS)


@functools.cache
def tree_engine() -> Compiled:
    return build(spec_of(*TREE), page_size=PAGE, variants=(SAMPLING,), num_rounds=ROUNDS)


def six_requests(**sampling: Any) -> list[Request]:
    """Return greedy and sampled requests; their ends fall on every round of a step."""
    return [
        make_request(
            i,
            prompt_len=4 + 5 * i,
            seed=300 + i,
            temperature=float(i % 2),
            max_new_tokens=17 + 10 * i,
            ignore_eos=True,
            **sampling,
        )
        for i in range(6)
    ]


def with_stop_ids(requests: list[Request]) -> list[Request]:
    """Let each stop at an id in the middle of its plain text."""
    stopped = []
    for request in requests:
        ids = plain_ids(request)
        sampling = dataclasses.replace(request.sampling, stop_token_ids=(ids[len(ids) // 2],))
        stopped.append(dataclasses.replace(request, sampling=sampling))
    return stopped


@pytest.mark.parametrize("depth", [0, 2])
def test_a_chain_in_rounds_gives_the_same_tokens(depth: int) -> None:
    requests = six_requests()
    expected = [plain_ids(request) for request in requests]
    dial = dial_for(requests, expected)
    served = serve(chain_engine(), requests, overlap_depth=depth, dial=dial)
    assert list(served.ids) == expected
    assert all(served.counters.accept_histogram)
    assert (served.num_leaked_pages, served.num_retractions) == (0, 0)
    assert served.num_free_pages == chain_engine().limits.pool.num_pages


@pytest.mark.slow
def test_a_tree_in_rounds_with_filters_and_penalties() -> None:
    requests = six_requests(**FULL)
    expected = [plain_ids(request) for request in requests]
    served = serve(tree_engine(), requests, overlap_depth=2, dial=dial_for(requests, expected))
    assert list(served.ids) == expected
    assert all(served.counters.accept_histogram)
    assert any(len(set(counts)) > 1 for counts in served.accepted_together)
    assert served.num_free_pages == tree_engine().limits.pool.num_pages


@pytest.mark.slow_cases("sampling1]")
@pytest.mark.parametrize("sampling", [{}, {"min_new_tokens": 12}])
def test_a_stop_id_in_any_round_ends_the_text_there(sampling: dict[str, Any]) -> None:
    """Under a minimum length the tree's program masks the ids until it is reached."""
    engine = tree_engine() if sampling else chain_engine()
    more = FULL if sampling else {}
    requests = with_stop_ids(six_requests(**more, **sampling))
    expected = [plain_ids(request) for request in requests]
    assert any(
        len(ids) < request.sampling.wanted_tokens
        for request, ids in zip(requests, expected, strict=True)
    )
    served = serve(engine, requests, num_slots=2, dial=dial_for(requests, expected))
    assert list(served.ids) == expected
    assert served.num_free_pages == engine.limits.pool.num_pages


def test_rows_at_the_end_of_the_context_write_into_no_other() -> None:
    """Rows fill the context to its last token while another continues, in a full pool."""
    lengths = (CONTEXT - 40, CONTEXT - 11, CONTEXT - 2, 20)
    requests = [
        make_request(
            i,
            prompt_len=length,
            seed=500 + i,
            temperature=float(i % 2),
            max_new_tokens=min(CONTEXT - length, 120),
            ignore_eos=True,
        )
        for i, length in enumerate(lengths)
    ]
    expected = [plain_ids(request) for request in requests]
    assert [len(ids) for ids in expected] == [40, 11, 2, 120]
    num_pages = 4 * CONTEXT // PAGE - 40
    served = serve(
        chain_engine(),
        requests,
        overlap_depth=2,
        dial=dial_for(requests, expected),
        num_pages=num_pages,
    )
    assert list(served.ids) == expected
    assert (served.num_leaked_pages, served.num_free_pages) == (0, num_pages)


@pytest.mark.slow
def test_retraction_between_rounds_changes_no_token() -> None:
    requests = [
        make_request(i, prompt_len=9 + i, seed=70 + i, temperature=i % 2, max_new_tokens=130)
        for i in range(4)
    ]
    expected = [plain_ids(request) for request in requests]
    served = serve(
        chain_engine(), requests, dial=dial_for(requests, expected), num_pages=80, chunk_size=8
    )
    assert list(served.ids) == expected
    assert served.num_retractions > 0
    assert (served.num_leaked_pages, served.num_free_pages) == (0, 80)


def test_an_abort_between_rounds_ends_one_request_and_no_other() -> None:
    check_an_abort_ends_one_and_no_other(chain_engine(), six_requests(), depth=1)


@pytest.mark.slow
def test_a_step_of_several_rounds_copies_no_pool_and_is_donated() -> None:
    for compiled in (chain_engine(), tree_engine()):
        runner = compiled.runner()
        before = runner.state
        shapes = {x.shape for x in (*before.kv, *before.draft_kv)}
        for key, executable in compiled.executables.items():
            text = executable.as_text()
            for shape in shapes:
                assert pool_copies(text, shape) == [], key
        view = ViewRunner(runner, compiled.limits)
        asyncio.run(_first_chunks(view))
        assert all(x.is_deleted() for x in (*before.kv, *before.draft_kv))
        decodes = [result for plan, result in view.steps if plan.kind is StepKind.DECODE]
        assert {len(result.rounds) for result in decodes} == {ROUNDS}


async def _first_chunks(view: ViewRunner) -> None:
    loop = EngineLoop(Scheduler(view.limits, make_stream=FakeTextStream.for_request), view)
    async for _ in loop.submit(
        [six_requests(**FULL if view.limits.draft_shape.topk > 1 else {})[0]]
    )[0]:
        pass
    await loop.close()


def test_what_nobody_wrote_stays_unread_after_an_end() -> None:
    """NaN in both pools: rounds after an end read unwritten slots, and affect no row."""
    requests = six_requests()
    expected = [plain_ids(request) for request in requests]
    runner = chain_engine().runner(dial=dial_for(requests, expected))
    spoil = functools.partial(jax.tree.map, lambda x: np.full(x.shape, np.nan, x.dtype))
    state = runner.state
    spoiled = dataclasses.replace(state, kv=spoil(state.kv), draft_kv=spoil(state.draft_kv))
    runner.replace_state(jax.device_put(spoiled, jax.tree.map(lambda x: x.sharding, state)))
    view = ViewRunner(runner, with_limits(chain_engine().limits, num_slots=8))

    async def run() -> list[tuple[int, ...]]:
        loop = EngineLoop(Scheduler(view.limits, make_stream=FakeTextStream.for_request), view)
        streams = loop.submit(requests)
        ids = [tuple([i async for chunk in s for i in chunk.new_ids]) for s in streams]
        await loop.close()
        return ids

    assert asyncio.run(run()) == expected
