"""Layers of two families, one per level, in engines whose rows resume over cached pages.

The pool law: whatever happened to a row, layer s's cached rows below L - s are those of a fresh run
over the same tokens. test_drafter_laws.py tests the layers by themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.device.state import EngineState
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.layer import Params
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from tests.speculative.engines import (
    CONTEXT,
    DIAL_ACCEPTANCE,
    NUM_SLOTS,
    Compiled,
    ViewRunner,
    build,
    dial_for,
    make_request,
    plain_ids,
    serve_view,
    spec_of,
    tiny_params,
    with_prefix_cache,
)
from tests.speculative.own_layers import (
    config_of,
    head_of,
    params_of,
)
from tests.speculative.test_prefix_cache import Session, ids_of
from tests.support.dial_drafter import DialMultiLayerDrafter, dial_params

CHAIN, TREE = (3, 1, 4), (3, 2, 7)


def test_more_steps_than_layers_are_refused() -> None:
    head = FeatureHead(config_of("chained"), Ops())
    with pytest.raises(ConfigError, match="num_steps is 4; expected at most 3, the layers"):
        MultiLayerDrafter(head, spec_of(4, 1, 5, Algorithm.MULTI_LAYER_EAGLE))


def draft_params(name: str) -> Params:
    """Return the layers, the params that they share with the target, and an empty dial."""
    target = tiny_params()[0]
    lent = {"embed": target["embed"]}
    if not config_of(name).own_head:
        lent["lm_head"] = target["lm_head"]
    own = {**params_of(name), **lent}
    empty = dial_params({0: (0,)}, rows=NUM_SLOTS, width=CONTEXT)
    return {**own, "dial": empty}


@functools.cache
def engine(name: str, shape: tuple[int, int, int]) -> Compiled:
    """Return an engine: chains on pages of 16, trees on pages of 4; drafts of every quality."""
    spec = spec_of(*shape, Algorithm.MULTI_LAYER_EAGLE)

    def make(ops: Ops, shard: Shard) -> Drafter:
        return DialMultiLayerDrafter(head_of(name, ops, shard), spec, acceptance=DIAL_ACCEPTANCE)

    return build(
        spec,
        page_size=16 if shape[1] == 1 else 4,
        params=(tiny_params()[0], draft_params(name)),
        variants=(StepOptions(),),
        make=make,
        aux_layer_ids=config_of(name).aux_layer_ids,
    )


def draft_rows(state: EngineState, slot: int, layer: int, count: int) -> Any:
    pages = np.asarray(state.draft_kv[layer])[np.asarray(state.rows.page_table[slot])]
    return pages.reshape(-1, *pages.shape[2:])[:count]


def whole_text(request: Request, text: tuple[int, ...]) -> Request:
    """Return a prompt of all that the row has committed, and a token after it."""
    sampling = dataclasses.replace(request.sampling, max_new_tokens=1)
    return dataclasses.replace(request, prompt_ids=text[:-1], sampling=sampling)


def check_last_row(compiled: Compiled, view: ViewRunner, whole: dict[str, Request]) -> None:
    """Check the pool law of the row that ended last, whose pages are unshared, by a fresh
    prefill."""
    steps = [plan for plan, _ in view.steps]
    (last,) = next(plan.rows for plan in reversed(steps) if plan.rows)
    (owner,) = {a.request.request_id for plan in steps for a in plan.admissions if a.row == last}
    fresh = ViewRunner(compiled.runner(), compiled.limits)
    asyncio.run(serve_view(fresh, [whole[owner]]))
    (own,) = [admission.row for plan, _ in fresh.steps for admission in plan.admissions]
    for layer in range(compiled.limits.draft_shape.num_steps):
        count = len(whole[owner].prompt_ids) - layer
        np.testing.assert_allclose(
            draft_rows(view.runner.state, last.slot, layer, count),
            draft_rows(fresh.runner.state, own.slot, layer, count),
            rtol=0,
            atol=1e-5,
            err_msg=f"layer {layer}",
        )


def resume(
    name: str, shape: tuple[int, int, int], *, chunk: int, after: int, lookahead: int | None = None
) -> set[str]:
    """Retract all rows after `steps` steps, let them resume over cached pages, and check the law.

    Returns which rows found output cached. lookahead: another than the cache's own.
    """
    compiled = engine(name, shape)
    requests = [
        make_request(i, prompt_len=21 + 9 * i, seed=90 + i, temperature=i % 2, max_new_tokens=n)
        for i, n in enumerate((50, 60, 80))
    ]
    expected = [plain_ids(request) for request in requests]
    dialled = compiled.runner(dial=dial_for(requests, expected)).params
    cached = with_prefix_cache(dataclasses.replace(compiled, params=dialled))
    session = Session(cached, overlap_depth=0, chunk_size=chunk)
    if lookahead is not None:
        session.scheduler._ranks.all[0].pages._cache._lookahead = lookahead
    served = session.serve(requests, retract_after=after)
    assert [ids_of(chunks) for chunks in served] == expected
    counts = {len(chunk.new_ids) for chunks in served for chunk in chunks}
    assert counts >= set(range(1, shape[0] + 2))  # from all rejected to all accepted
    texts = [r.prompt_ids + ids for r, ids in zip(requests, expected, strict=True)]
    whole = {r.request_id: whole_text(r, t) for r, t in zip(requests, texts, strict=True)}
    check_last_row(compiled, session.view, whole)
    return session.resumed


@pytest.mark.slow
@pytest.mark.exhaustive_cases("step3p5")
@pytest.mark.parametrize(("name", "shape"), [("mimo_v2", TREE), ("step3p5", CHAIN)], ids=str)
def test_the_pool_law_holds_over_cached_pages(name: str, shape: tuple[int, int, int]) -> None:
    """In the middle of a prompt and of a text, in chunks of several sizes: a lagging layer's cached
    rows are those that it had.
    """
    resume(name, shape, chunk=5, after=13)
    for chunk, after in ((5, 30), (13, 16), (32, 12)):
        assert resume(name, shape, chunk=chunk, after=after) == {"r0", "r1", "r2"}


@pytest.mark.slow
def test_a_cached_row_that_its_layer_did_not_know_is_noticed() -> None:
    """Mutation: a page counts as known as soon as its tokens are. The text stays the same."""
    with pytest.raises(AssertionError, match=r"\nlayer [12]\n"):
        resume("mimo_v2", TREE, chunk=5, after=13, lookahead=0)
