"""Layers of one's own, one a level: the pool law, the guesses, and that no text depends on them.

The pool law: whatever happened to a row, layer s's cached rows below L - s are those of a fresh run
over the same tokens. A layer that was given another's pool, or lags by one row more or less, breaks
it at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.device.state import EngineState
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.decoder import Params
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters import multi_layer
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from tests.speculative import multi_layer_rows
from tests.speculative.engines import (
    CONTEXT,
    DIAL_ACCEPTANCE,
    NUM_SLOTS,
    TARGET,
    Compiled,
    ViewRunner,
    build,
    dial_for,
    make_request,
    plain_ids,
    serve,
    serve_view,
    spec_of,
    tiny_params,
    with_prefix_cache,
)
from tests.speculative.mtp_checkpoints import DialDrafter
from tests.speculative.multi_layer_rows import (
    CHUNK,
    CONFIGS,
    NUM_ROWS,
    S,
    Texts,
    config_of,
    head_of,
    params_of,
)
from tests.speculative.published_layers import FAMILIES
from tests.speculative.test_prefix_cache import Session, ids_of
from tests.support.dial_drafter import DialMultiLayerDrafter, dial_head, dial_params
from tests.support.flat_limits import with_limits

SLOW = pytest.mark.slow
CHAIN, TREE = (3, 1, 4), (3, 2, 7)
FAST_KINDS = [("not_chained", 2), ("hidden_first", 1), ("step3p5", 1)]
# What two families publish; those chains and trees in engines.
PUBLISHED = [pytest.param(name, shape, marks=SLOW) for name in FAMILIES for shape in (CHAIN, TREE)]
KINDS = [
    pytest.param(name, topk, marks=() if (name, topk) in FAST_KINDS else SLOW)
    for name in (*CONFIGS, *FAMILIES)
    for topk in (1, 2)
]


@pytest.mark.slow_cases("hidden_first-1]", "not_chained-2]")
@pytest.mark.parametrize(("name", "topk"), KINDS)
def test_every_guess_is_that_of_a_dense_forward(name: str, topk: int) -> None:
    """Rows of 1, 2 and 5 tokens, of which two are shorter than the last layer's lag would have it,
    then longer ones: candidates of every level, along every path."""
    texts = Texts(name, topk, seed=1)
    texts.chunk([1, 2, 5])
    assert texts.check_guesses() == NUM_ROWS * (1 + (S - 1) * topk)
    texts.verify([3, 0, 1])
    texts.check_guesses()
    texts.verify([0, 2, 3])
    texts.check_guesses()


def random_history(texts: Texts, rng: np.random.Generator) -> None:
    """Chunks of random lengths, none for some rows; verifications that accept every count; a row
    that is retracted and told of everything again."""
    for _ in range(3):
        lens = rng.multinomial(rng.integers(1, CHUNK + 1), [1 / NUM_ROWS] * NUM_ROWS)
        texts.chunk(lens.tolist())
    texts.chunk([int(told == 0) for told in texts.told])
    for _ in range(3):
        texts.verify(rng.integers(0, S + 1, NUM_ROWS).tolist())
    row = int(rng.integers(NUM_ROWS))
    texts.forget(row)
    texts.chunk([int(rng.integers(1, 6)) if r == row else 0 for r in range(NUM_ROWS)])
    texts.verify(rng.integers(0, S + 1, NUM_ROWS).tolist())


@pytest.mark.slow_cases("hidden_first")
@pytest.mark.parametrize(("name", "topk"), KINDS)
def test_the_pool_law_holds_after_any_history(name: str, topk: int) -> None:
    for seed in range(6):
        texts = Texts(name, topk, seed=seed)
        random_history(texts, np.random.default_rng(100 + seed))
        texts.check_pools()
        if seed % 3 == 0:
            texts.check_guesses()


def test_a_step_without_a_live_row_touches_no_row() -> None:
    texts = Texts("not_chained", 2, seed=3)
    texts.chunk([5, 1, 2])
    before = [texts.cached(row, layer) for row in range(NUM_ROWS) for layer in range(S)]
    texts.chunk([0] * NUM_ROWS)
    after = [texts.cached(row, layer) for row in range(NUM_ROWS) for layer in range(S)]
    np.testing.assert_array_equal(after, before)
    texts.verify([1, 0, 2])
    texts.check_pools()


def swapped_pools(forward: Any) -> Any:
    """Layers 0 and 1 write into each other's rows: the field's defect, as near as one can come."""

    def swapped(kv: Any) -> Any:
        return (kv[1], kv[0], *kv[2:])

    def run(self: Any, params: Any, ids: Any, hidden: Any, kv: Any, rows: Any, **named: Any) -> Any:
        out, kv = forward(self, params, ids, hidden, swapped(kv), rows, **named)
        return out, swapped(kv)

    return run


def off_by(delta: int) -> Any:
    def mutate(lag_behind: Any) -> Any:
        return lambda emitted, *, lag, num_known: lag_behind(
            emitted, lag=max(lag + delta, 0), num_known=num_known
        )

    return mutate


@pytest.mark.parametrize(
    ("owner", "attribute", "mutate"),
    [
        pytest.param(FeatureHead, "forward", swapped_pools, id="another layer's pool"),
        pytest.param(multi_layer, "lag_behind", off_by(1), id="lag one more"),
        pytest.param(multi_layer, "lag_behind", off_by(-1), id="lag one less"),
        pytest.param(
            indexing,
            "lagged_start",
            lambda f: lambda seq_len, lag: f(seq_len, lag) + 1,
            id="slot and RoPE",
        ),
        pytest.param(
            multi_layer,
            "delayed",
            lambda f: (
                lambda hidden, first, *, before, own: f(hidden, 0 * first, before=before, own=own)
            ),
            id="features that travel",
        ),
    ],
)
def test_a_moved_row_is_noticed(
    owner: Any, attribute: str, mutate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, mutate(getattr(owner, attribute)))
    programs_of = multi_layer_rows.programs_of
    monkeypatch.setattr(multi_layer_rows, "programs_of", programs_of.__wrapped__)
    texts = Texts("not_chained", 1, seed=0)
    texts.chunk([5, 3, 2])
    texts.chunk([2, 1, 4])
    with pytest.raises(AssertionError, match="row 0, layer"):
        texts.check_pools()


def test_more_steps_than_layers_are_refused() -> None:
    head = FeatureHead(CONFIGS["chained"], Ops())
    with pytest.raises(ConfigError, match="num_steps is 4; expected at most 3, the layers"):
        MultiLayerDrafter(head, spec_of(4, 1, 5, Algorithm.MULTI_LAYER_EAGLE))


def draft_params(name: str) -> Params:
    """The layers, what they share with the target, and an empty dial."""
    target = tiny_params()[0]
    lent = {"embed": target["embed"]}
    if not config_of(name).own_head:
        lent["lm_head"] = target["lm_head"]
    own = {**params_of(name), **lent}
    empty = dial_params({0: (0,)}, rows=NUM_SLOTS, width=CONTEXT)
    if not config_of(name).per_level:
        ids = jnp.arange(TARGET.vocab_size, dtype=jnp.int32)
        return {"head": {**own, "draft_ids": ids}, "dial": empty}
    return {**own, "dial": empty}


@functools.cache
def engine(name: str, shape: tuple[int, int, int], *, shards: int = 1) -> Compiled:
    """Chains on pages of 16, trees on pages of 4; drafts of every quality."""
    config = config_of(name)
    algorithm = Algorithm.NEXTN if not config.per_level else Algorithm.MULTI_LAYER_EAGLE
    spec = spec_of(*shape, algorithm)

    def make(ops: Ops, shard: Shard) -> Drafter:
        head = head_of(name, ops, shard)
        if not config.per_level:
            inner = dial_head(head)
            return DialDrafter(inner, spec, acceptance=DIAL_ACCEPTANCE)
        return DialMultiLayerDrafter(head, spec, acceptance=DIAL_ACCEPTANCE)

    return build(
        spec,
        page_size=16 if shape[1] == 1 else 4,
        params=(tiny_params()[0], draft_params(name)),
        variants=(StepOptions(),),
        make=make,
        aux_layer_ids=config.aux_layer_ids,
        shards=shards,
    )


def some_requests(batch: int) -> list[Request]:
    """Greedy and sampled rows; prompts of one token, of fewer than the lag, of several chunks."""
    return [
        make_request(
            i,
            prompt_len=(16, 1, 40, 2, 17)[i],
            seed=6000 + i,
            temperature=float(i % 2),
            max_new_tokens=50 - 5 * i,
        )
        for i in range(batch)
    ]


def check_identity(compiled: Compiled) -> set[int]:
    """In every batch, chunk and depth that has its own path; the counts that were accepted."""
    accepted: set[int] = set()
    for batch, chunk, depth in ((1, 5, 2), (5, 32, 1), (4, 3, 0)):
        requests = some_requests(batch)
        expected = [plain_ids(request) for request in requests]
        dial = dial_for(requests, expected)
        served = serve(compiled, requests, chunk_size=chunk, overlap_depth=depth, dial=dial)
        assert list(served.ids) == expected
        assert served.num_leaked_pages == 0
        accepted |= {count for counts in served.accepted for count in counts}
    return accepted


@pytest.mark.slow_cases("not_chained-(3, 2, 7)]")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("not_chained", TREE),
        pytest.param("recurrent", TREE, marks=SLOW),
        pytest.param("recurrent", CHAIN, marks=SLOW),
        pytest.param("chained", CHAIN, marks=SLOW),
        pytest.param("not_chained", CHAIN, marks=SLOW),
        pytest.param("hidden_first", (2, 3, 8), marks=SLOW),
        pytest.param("chained", (1, 1, 2), marks=SLOW),
    ],
    ids=str,
)
def test_speculative_equals_plain(name: str, shape: tuple[int, int, int]) -> None:
    assert check_identity(engine(name, shape)) == set(range(shape[0] + 1))


def draft_rows(state: EngineState, slot: int, layer: int, count: int) -> Any:
    pages = np.asarray(state.draft_kv[layer])[np.asarray(state.rows.page_table[slot])]
    return pages.reshape(-1, *pages.shape[2:])[:count]


def whole_text(request: Request, text: tuple[int, ...]) -> Request:
    """A prompt of all that the row has committed, and a token after it."""
    sampling = dataclasses.replace(request.sampling, max_new_tokens=1)
    return dataclasses.replace(request, prompt_ids=text[:-1], sampling=sampling)


def check_last_row(
    name: str, compiled: Compiled, view: ViewRunner, whole: dict[str, Request]
) -> None:
    """The pool law against a fresh prefill, of the row that ended last: its pages are its own."""
    steps = [plan for plan, _ in view.steps]
    (last,) = next(plan.rows for plan in reversed(steps) if plan.rows)
    (owner,) = {a.request.request_id for plan in steps for a in plan.admissions if a.row == last}
    fresh = ViewRunner(compiled.runner(), compiled.limits)
    asyncio.run(serve_view(fresh, [whole[owner]]))
    (own,) = [admission.row for plan, _ in fresh.steps for admission in plan.admissions]
    num_layers = 1 if not config_of(name).per_level else compiled.limits.draft_shape.num_steps
    for layer in range(num_layers):
        count = len(whole[owner].prompt_ids) - layer
        np.testing.assert_allclose(
            draft_rows(view.runner.state, last.slot, layer, count),
            draft_rows(fresh.runner.state, own.slot, layer, count),
            rtol=0,
            atol=1e-5,
            err_msg=f"layer {layer}",
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("not_chained", TREE),
        pytest.param("recurrent", TREE, marks=SLOW),
        pytest.param("recurrent", CHAIN, marks=SLOW),
        pytest.param("chained", CHAIN, marks=SLOW),
        pytest.param("hidden_first", (2, 3, 8), marks=SLOW),
        *PUBLISHED,
    ],
    ids=str,
)
def test_the_pool_law_holds_under_a_scheduler(name: str, shape: tuple[int, int, int]) -> None:
    """Rows come and go, a pool too small for all retracts and fills again; then each layer's rows
    of the one that ends last are those of a prefill of its whole text."""
    compiled = engine(name, shape)
    requests = [
        make_request(i, prompt_len=9 + i, seed=70 + i, temperature=i % 2, max_new_tokens=n)
        for i, n in enumerate((130, 120, 60, 200))
    ]
    expected = [plain_ids(request) for request in requests]
    num_pages = 20 if compiled.limits.pool.page_size == 16 else 80
    limits = with_limits(compiled.limits, num_pages=num_pages, prefill_buckets=(8,))
    view = ViewRunner(compiled.runner(dial=dial_for(requests, expected)), limits)
    served = asyncio.run(serve_view(view, requests))
    assert served.num_retractions > 0
    assert list(served.ids) == expected
    text = requests[3].prompt_ids + expected[3]
    check_last_row(name, compiled, view, {"r3": whole_text(requests[3], text)})


def resume(
    name: str, shape: tuple[int, int, int], *, chunk: int, after: int, lookahead: int | None = None
) -> set[str]:
    """All rows are retracted after so many steps and resume over their cached pages; then the law.
    Says which rows found output cached. lookahead: another than the cache's own."""
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
        session.scheduler._pages._cache._lookahead = lookahead
    served = session.serve(requests, retract_after=after)
    assert [ids_of(chunks) for chunks in served] == expected
    counts = {len(chunk.new_ids) for chunks in served for chunk in chunks}
    assert counts >= set(range(1, shape[0] + 2))  # from all rejected to all accepted
    texts = [r.prompt_ids + ids for r, ids in zip(requests, expected, strict=True)]
    whole = {r.request_id: whole_text(r, t) for r, t in zip(requests, texts, strict=True)}
    check_last_row(name, compiled, session.view, whole)
    return session.resumed


@pytest.mark.parametrize(("name", "shape"), PUBLISHED, ids=str)
def test_the_pool_law_holds_over_cached_pages(name: str, shape: tuple[int, int, int]) -> None:
    """In the middle of a prompt and of a text, in chunks of several sizes: the cached rows of a
    layer that lags are those that it knew."""
    resume(name, shape, chunk=5, after=13)
    for chunk, after in ((5, 30), (13, 16), (32, 12)):
        assert resume(name, shape, chunk=chunk, after=after) == {"r0", "r1", "r2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_row_that_its_layer_did_not_know_is_noticed(name: str) -> None:
    """Mutation: a page counts as known as soon as its tokens are. The text is as ever."""
    with pytest.raises(AssertionError, match=r"\nlayer [12]\n"):
        resume(name, TREE, chunk=5, after=13, lookahead=0)


@pytest.mark.slow
def test_layers_of_nothing_but_nan_change_no_text() -> None:
    compiled = engine("not_chained", TREE)
    requests = some_requests(3)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params_of("not_chained")["layers"])
    draft = {**draft_params("not_chained"), "layers": broken}
    served = serve(compiled, requests, draft=draft)
    assert list(served.ids) == [plain_ids(request) for request in requests]
