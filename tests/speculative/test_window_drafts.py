"""Draft layers with a window use its page space: pages are freed, and no lagging row is lost.

The layers are those that two families publish (`published_layers`), over a target without windows.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import Algorithm, WindowSpace
from jspec.device.state import EngineState
from jspec.layers.linear import Shard
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.pallas_kernels.ops import Ops
from jspec.scheduler.pages.cache_spaces import CacheSpaces
from jspec.speculative.drafter import Drafter
from tests.speculative.engines import (
    DIAL_ACCEPTANCE,
    Compiled,
    ViewRunner,
    build,
    dial_for,
    limits_of,
    make_request,
    plain_ids,
    serve_view,
    spec_of,
    tiny_params,
)
from tests.speculative.own_layers import config_of, head_of
from tests.speculative.test_multi_layer import draft_params, whole_text
from tests.support.dial_drafter import DialMultiLayerDrafter
from tests.support.flat_limits import with_limits

CHAIN, TREE = (3, 1, 4), (3, 2, 7)
PAGE, NUM_ROWS, CHUNK = 2, 2, 8


def window_of(name: str) -> int:
    (window,) = {layer.attention.window for layer in config_of(name).layer.layers}
    assert window is not None
    return window


@functools.cache
def engine(name: str, shape: tuple[int, int, int]) -> Compiled:
    """Return an engine with window pages for NUM_ROWS rows and no more."""
    spec = spec_of(*shape, Algorithm.MULTI_LAYER_EAGLE)
    limits, window = limits_of(spec, page_size=PAGE), window_of(name)
    pages = NUM_ROWS * limits.window_pages_per_row(window)
    pages += limits.pages_of_chunks(limits.programs.chunk_size)

    def make(ops: Ops, shard: Shard) -> Drafter:
        return DialMultiLayerDrafter(head_of(name, ops, shard), spec, acceptance=DIAL_ACCEPTANCE)

    return build(
        spec,
        page_size=PAGE,
        params=(tiny_params()[0], draft_params(name)),
        variants=(StepOptions(),),
        make=make,
        aux_layer_ids=config_of(name).aux_layer_ids,
        windows=(WindowSpace(window, pages),),
    )


def some_requests() -> list[Request]:
    """Return greedy and sampled requests; several chunks, and rows of many windows."""
    return [
        make_request(i, prompt_len=n, seed=640 + i, temperature=i % 2, max_new_tokens=new)
        for i, (n, new) in enumerate(((19, 90), (1, 70), (40, 120)))
    ]


def rows_in_window(state: EngineState, *, name: str, slot: int, layer: int, count: int) -> Any:
    """Return the rows of `count` committed ones that a layer's next query would see."""
    window = window_of(name)
    table = np.asarray(state.rows.window_tables[window])[slot]
    position = np.arange(max(count - (window - 1), 0), count)
    pool = np.asarray(state.draft_kv[layer])
    return pool[table[position // PAGE], position % PAGE]


def check(name: str, shape: tuple[int, int, int]) -> None:
    """Check that the text is plain decoding's, and that the row that ends last has cached what a
    prefill of all of it caches, layer by layer.
    """
    compiled, requests = engine(name, shape), some_requests()
    expected = [plain_ids(request) for request in requests]
    limits = with_limits(compiled.limits, prefill_buckets=(CHUNK,), prefix_cache=False)
    view = ViewRunner(compiled.runner(dial=dial_for(requests, expected)), limits)
    served = asyncio.run(serve_view(view, requests))
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    assert served.num_free_window_pages == (limits.pool.windows[0].num_pages,)
    counts = {count for accepted in served.accepted for count in accepted}
    assert counts >= {0, shape[0]}
    last = next(plan.rows for plan, _ in reversed(served.steps) if plan.rows)[0]
    (owner,) = {
        admission.request.request_id
        for plan, _ in served.steps
        for admission in plan.admissions
        if admission.row == last
    }
    number = [request.request_id for request in requests].index(owner)
    whole = whole_text(requests[number], requests[number].prompt_ids + expected[number])
    fresh = ViewRunner(compiled.runner(), limits)
    asyncio.run(serve_view(fresh, [whole]))
    (own,) = [admission.row for plan, _ in fresh.steps for admission in plan.admissions]
    for layer in range(shape[0]):
        count = len(whole.prompt_ids) - layer
        got, wanted = (
            rows_in_window(of.runner.state, name=name, slot=row.slot, layer=layer, count=count)
            for of, row in ((view, last), (fresh, own))
        )
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5, err_msg=f"layer {layer}")


@pytest.mark.slow
@pytest.mark.exhaustive_cases("mimo_v2")
@pytest.mark.parametrize(("name", "shape"), [("mimo_v2", TREE), ("step3p5", CHAIN)], ids=str)
def test_rows_that_lag_are_there(name: str, shape: tuple[int, int, int]) -> None:
    check(name, shape)


@pytest.mark.slow
def test_pages_given_back_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: as if no layer lagged, with one page more, so that it is granted again before it
    is read."""
    right = CacheSpaces._seen_len

    def too_early(self: CacheSpaces, tenancy: Any) -> int:
        return right(self, tenancy) + (self._limits.draft_shape.lag // PAGE + 1) * PAGE

    monkeypatch.setattr(CacheSpaces, "_seen_len", too_early)
    with pytest.raises(AssertionError):
        check("step3p5", CHAIN)


def test_the_pools_of_such_layers_are_as_small_as_their_window_s() -> None:
    for name in ("mimo_v2", "step3p5"):
        spec = spec_of(*CHAIN, Algorithm.MULTI_LAYER_EAGLE)
        groups = DialMultiLayerDrafter(head_of(name), spec, acceptance=1.0).cache_groups
        assert [group.window for group in groups] == [window_of(name)] * 3
