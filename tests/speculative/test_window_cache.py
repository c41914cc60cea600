"""A target with windows after a cached prefix: text, accepted drafts and page contents equal those
of an engine that computes everything.

`test_windows.py` compares that engine with a dense forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import Algorithm, ServeLimits, WindowSpace
from jspec.messages.request import StreamChunk
from jspec.messages.step_options import SAMPLING
from jspec.models.decoder import Decoder
from jspec.models.heads.block_head import BlockHead
from jspec.spec.cache_groups import groups_of_layers
from jspec.speculative.drafters.block import BlockDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ranked import StandaloneDrafter
from tests.speculative import own_blocks
from tests.speculative.engines import Compiled, build, limits_of, make_request, spec_of, tiny_params
from tests.speculative.every_drafter import layers_weights
from tests.speculative.own_layers import config_of, head_of
from tests.speculative.test_prefix_cache import (
    PENALTIES,
    Session,
    accepted_by,
    ids_of,
    next_turn,
)
from tests.speculative.test_windows import SOME, WINDOW, windowed

# Page size, and S/K/N. itself: a target that drafts for itself, with windows of its own. mimo_v2,
# step3p5: layers of a family, whose windows use the target's space and lag. dflash: a block drafter
# with a layer in the target's space.
KINDS = {
    "plain": (16, 0, 1, 1),
    "chain": (4, 3, 1, 4),
    "tree": (16, 3, 2, 7),
    "itself": (4, 3, 1, 4),
    "mimo_v2": (4, 3, 2, 7),
    "step3p5": (2, 3, 1, 4),
    "dflash": (4, 3, 2, 7),
}
LAYERS = ("mimo_v2", "step3p5")
ALGORITHMS = {
    "itself": Algorithm.STANDALONE,
    **dict.fromkeys(LAYERS, Algorithm.MULTI_LAYER_EAGLE),
    "dflash": Algorithm.DFLASH,
}
SPARE = 40  # pages beyond those of two rows
pytestmark = pytest.mark.slow
DRAFTING = [
    *("itself", "mimo_v2"),
    *(
        pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in ("chain", "tree", "step3p5", "dflash")
    ),
]
EVERY = [
    pytest.param(kind, marks=() if kind == "itself" else pytest.mark.exhaustive) for kind in KINDS
]


@functools.cache
def engine(kind: str) -> Compiled:
    page_size, steps, topk, nodes = KINDS[kind]
    spec = spec_of(steps, topk, nodes, ALGORITHMS.get(kind, Algorithm.EAGLE3))
    window = window_of(kind)
    target = windowed(tuple(each and window for each in SOME))
    space = space_of(limits_of(spec, page_size=page_size), window, num_rows=2, spare=SPARE)
    build_it = functools.partial(
        build,
        spec,
        page_size=page_size,
        dial=False,
        variants=(SAMPLING,),
        target_spec=target,
        windows=(space,),
    )
    if kind not in ALGORITHMS:
        return build_it()
    params = tiny_params()[0]
    if kind in LAYERS:
        return build_it(
            params=(params, layers_weights(kind)),
            make=lambda ops, shard: MultiLayerDrafter(head_of(kind, ops, shard), spec),
            aux_layer_ids=config_of(kind).aux_layer_ids,
        )
    if kind == "dflash":
        own = own_blocks.SPECS[kind]
        return build_it(
            params=(params, own_blocks.params_of(kind)),
            make=lambda ops, shard: BlockDrafter(BlockHead(own, ops, shard), spec),
            aux_layer_ids=own.aux_layer_ids,
        )
    return build_it(
        params=(params, params),
        make=lambda ops, shard: StandaloneDrafter(Decoder(target, ops, shard), spec),
    )


def window_of(kind: str) -> int:
    """Return the draft's window if it has one, so that target and draft share a space."""
    if kind == "dflash":
        return own_blocks.WINDOW
    if kind not in LAYERS:
        return WINDOW
    return config_of(kind).layer.layers[0].attention.window or WINDOW


def space_of(limits: ServeLimits, window: int, *, num_rows: int, spare: int) -> WindowSpace:
    of_rows = num_rows * limits.window_pages_per_row(window)
    return WindowSpace(window, of_rows + limits.pages_of_chunks(limits.programs.chunk_size) + spare)


def session_of(
    compiled: Compiled, *, spare: int = SPARE, prefix_cache: bool = True, **how: Any
) -> Session:
    """Return a session with the engine's limits, or with fewer pages of windows."""
    (own,) = compiled.limits.pool.windows
    space = space_of(compiled.limits, own.window, num_rows=2, spare=spare)
    return Session(compiled, prefix_cache=prefix_cache, windows=(space,), **how)


def check_idle(session: Session) -> None:
    (space,) = session.view.limits.pool.windows
    assert session.scheduler.stats.num_free_window_pages == (space.num_pages,)


def conversations(
    kind: str, *, num_turns: int, session: Session, cold: Session
) -> Iterator[tuple[int, int, int]]:
    """Run rows with a common prefix; return (turn, prompt tokens, cached ones) of each turn."""
    begin = make_request(0, prompt_len=21, seed=1).prompt_ids
    requests = []
    for i, sampling in enumerate(PENALTIES):
        request = make_request(i, prompt_len=3 + i, seed=50 + i, max_new_tokens=20, **sampling)
        requests.append(dataclasses.replace(request, prompt_ids=(*begin, *request.prompt_ids)))
    for turn in range(num_turns):
        served, expected = session.serve(requests), cold.serve(requests)
        for chunks, others in zip(served, expected, strict=True):
            assert ids_of(chunks) == ids_of(others), f"{kind} in turn {turn}"
            yield turn, chunks[-1].prompt_tokens, chunks[-1].cached_tokens
        requests = [
            next_turn(request, ids_of(chunks), turn=turn)
            for request, chunks in zip(requests, served, strict=True)
        ]
    check_idle(session)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("chunk", "depth", "num_turns"),
    [(32, 1, 2), pytest.param(5, 2, 3, marks=pytest.mark.exhaustive)],
)
def test_text_with_cache_is_text_without(kind: str, chunk: int, depth: int, num_turns: int) -> None:
    """From the second turn on all but the last tokens are cached, as without windows."""
    compiled = engine(kind)
    how: dict[str, Any] = {"chunk_size": chunk, "overlap_depth": depth}
    session, cold = session_of(compiled, **how), session_of(compiled, prefix_cache=False, **how)
    size, new = compiled.limits.pool.page_size, 5 + 1 + compiled.limits.draft_shape.tokens_ahead
    for turn, prompt, found in conversations(kind, num_turns=num_turns, session=session, cold=cold):
        assert found % size == 0
        assert found >= (prompt - new) // size * size or turn == 0
    assert cold.scheduler.stats.num_cached_tokens == 0


@pytest.mark.parametrize("kind", EVERY)
def test_text_is_the_same_in_pools_that_are_short(kind: str) -> None:
    """In both spaces rows wait or are retracted, and cached pages are evicted."""
    compiled = engine(kind)
    num_pages = 272 // compiled.limits.pool.page_size
    session = session_of(compiled, spare=0, num_pages=num_pages)
    cold = session_of(compiled, prefix_cache=False)
    for seed in (70, 71):  # the second wave begins as the first
        requests = [
            make_request(i, prompt_len=9, seed=70 + i, max_new_tokens=100 - seed + i, **sampling)
            for i, sampling in enumerate(PENALTIES)
        ]
        served, expected = session.serve(requests), cold.serve(requests)
        assert [ids_of(chunks) for chunks in served] == [ids_of(chunks) for chunks in expected]
        check_idle(session)


@pytest.mark.parametrize("kind", EVERY)
def test_a_row_resumes_over_its_cached_output(kind: str) -> None:
    """With every penalty, also in the middle of the output: pages were cached when they left the
    window."""
    compiled = engine(kind)
    session, cold = (
        session_of(compiled, overlap_depth=0, prefix_cache=cached) for cached in (True, False)
    )
    requests = [
        make_request(i, prompt_len=3 + i, seed=70 + i, max_new_tokens=60, **sampling)
        for i, sampling in enumerate(PENALTIES[:2])
    ]
    served = session.serve(requests, retract_after={"itself": 10}.get(kind, 20))
    expected = cold.serve(requests)
    assert [ids_of(chunks) for chunks in served] == [ids_of(chunks) for chunks in expected]
    assert session.resumed == {request.request_id for request in requests}
    again = dataclasses.replace(requests[0], prompt_ids=(*requests[0].prompt_ids, *half(expected)))
    warm, other = session.serve([again])[0], cold.serve([again])[0]
    assert ids_of(warm) == ids_of(other)
    size, ahead = compiled.limits.pool.page_size, compiled.limits.draft_shape.tokens_ahead
    assert warm[-1].cached_tokens >= (len(again.prompt_ids) - 1 - ahead) // size * size
    check_idle(session)


def half(expected: list[list[StreamChunk]]) -> tuple[int, ...]:
    return ids_of(expected[0])[:30]


@pytest.mark.parametrize("kind", DRAFTING)
def test_acceptance_warm_equals_cold_and_so_do_the_pages(kind: str) -> None:
    compiled = engine(kind)
    first = make_request(0, prompt_len=37, seed=5, max_new_tokens=24, temperature=2.0)
    warm, cold = session_of(compiled), session_of(compiled, prefix_cache=False)
    request = next_turn(first, ids_of(warm.serve([first])[0]), turn=0)
    of_warm, of_cold = warm.serve([request])[0], cold.serve([request])[0]
    assert of_warm[-1].cached_tokens >= 48
    assert of_cold[-1].cached_tokens == 0
    assert accepted_by(of_warm) == accepted_by(of_cold)
    assert sum(accepted_by(of_cold)) > 0
    compare_rows(warm, cold, committed=len(request.prompt_ids) + 23)


@pytest.mark.parametrize("kind", DRAFTING)
def test_rows_do_not_depend_on_chunks_or_on_what_was_cached(kind: str) -> None:
    """Nor on a retraction, which resumes over its own pages."""
    compiled = engine(kind)
    request = make_request(0, prompt_len=45, seed=5, max_new_tokens=20, temperature=2.0)
    cold = session_of(compiled, prefix_cache=False)
    (expected,) = cold.serve([request])
    early, late = {"chain": (6, 12), "tree": (6, 12), "itself": (3, 6)}.get(kind, (5, 8))
    for chunk_size, retract_after in ((7, None), (32, early), (5, late)):
        session = session_of(compiled, chunk_size=chunk_size, overlap_depth=0)
        session.serve([dataclasses.replace(request, prompt_ids=request.prompt_ids[:30])])
        (chunks,) = session.serve([request], retract_after=retract_after)
        assert ids_of(chunks) == ids_of(expected)
        assert chunks[-1].num_retractions == (retract_after is not None)
        committed = 45 + 19 - compiled.limits.draft_shape.num_scratch_slots
        compare_rows(session, cold, committed=committed)


def compare_rows(warm: Session, cold: Session, *, committed: int) -> None:
    for name in ("kv", "draft_kv"):
        ours, theirs = (rows_of(session, name, committed) for session in (warm, cold))
        assert len(ours) == len(theirs) > 0
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)


def rows_of(session: Session, name: str, count: int) -> list[np.ndarray]:
    """Return the pools' values for the first `count` tokens of the last row, in slot 1.

    Layers with a window have only the last ones, which a next query would see.
    """
    state, size = session.runner.state, session.view.limits.pool.page_size
    program = session.compiled.program
    groups = (program.target if name == "kv" else program.drafter).cache_groups
    found = []
    for pool, group in zip(getattr(state, name), groups_of_layers(groups), strict=True):
        window = group.window
        rows = state.rows
        table = rows.page_table if window is None else rows.window_tables[window]
        pages = np.asarray(table)[1][: -(-count // size)]
        begin = 0 if window is None else count - (window - 1)
        of_row = np.asarray(pool)[pages].reshape(-1, *pool.shape[2:])
        found.append(of_row[begin:count])
    return found


def test_a_window_that_is_not_there_would_be_seen() -> None:
    """Mutation: a row starts wherever the full space has pages. The target's texts then differ, and
    the drafts were made from other features.
    """
    compiled = engine("chain")
    session, cold = session_of(compiled), session_of(compiled, prefix_cache=False)
    _, space = session.scheduler._ranks.all[0].pages.spaces
    space.tail = 0
    first = make_request(0, prompt_len=60, seed=8, max_new_tokens=30, temperature=0.0)
    again = next_turn(first, ids_of(session.serve([first])[0]), turn=0)
    warm, other = session.serve([again])[0], cold.serve([again])[0]
    assert warm[-1].cached_tokens > 80
    assert ids_of(warm) != ids_of(other)
