"""Laws of an engine of several data ranks, in float32.

identity      the texts are those of one rank, on 2 and 4 ranks and with tensor parallelism
balance       all ranks have rows
retraction    the same in pools too small for the rows of each rank
no live row   a rank without one changes nothing
"""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.messages.step_options import StepOptions
from tests.speculative.engines import (
    Compiled,
    Served,
    ViewRunner,
    build,
    limits_of,
    serve,
    serve_view,
    spec_of,
    tiny_params,
)
from tests.speculative.every_drafter import KINDS
from tests.speculative.law_engines import (
    Setting,
    engine,
    plain_texts,
    requests_of,
    scripted,
    with_script,
)
from tests.speculative.test_engine_laws import FILTERS
from tests.speculative.test_prefix_cache import Session
from tests.speculative.test_state_snapshots import TREE, converse, turns_of
from tests.speculative.test_state_snapshots import engine as recurrent_engine
from tests.speculative.test_windows import PAGE, SOME, dense_ids, windowed, with_space
from tests.speculative.test_windows import requests as windows_requests

SETTINGS = (
    Setting("eagle3", (2, 2, 7), 4, ranks=2, shards=2),
    Setting("recurrent", (2, 1, 3), 4, others=((0, 1, 1), (1, 1, 2)), ranks=2),
    Setting("multi_layer_not_chained", (3, 1, 4), 4, ranks=4),
    Setting("ngram", (3, 1, 4), 4, ranks=2),
    Setting("dflash", (3, 2, 11), 4, ranks=2, shards=2),
    Setting("eagle1", (2, 2, 7), 16, rounds=2, ranks=4),
    Setting("standalone", (3, 1, 4), 16, ranks=2),
    Setting("frozen_kv", (2, 1, 3), 16, ranks=2),
    Setting("eagle1_ngram", (2, 2, 7), 4, ranks=2),
    Setting("multi_layer_chained", (3, 1, 4), 16, ranks=2),
    Setting("multi_layer_hidden_first", (2, 3, 13), 4, ranks=2),
    Setting("dspark", (3, 2, 11), 4, ranks=2, shards=2),
    Setting("dflash2", (2, 3, 13), 16, ranks=4),
    Setting("p_eagle", (3, 2, 11), 4, ranks=2),
)
# CI runs the first, a tree on two ranks of two shards.
EVERY = [
    pytest.param(
        setting,
        id=setting.name,
        marks=[pytest.mark.slow, *([pytest.mark.exhaustive] if i else [])],
    )
    for i, setting in enumerate(SETTINGS)
]


def test_every_drafter_is_among_them() -> None:
    assert {setting.kind for setting in SETTINGS} == set(KINDS)


def ranks_of(compiled: Compiled, served: Served) -> list[int]:
    """Return how many requests ran on each rank."""
    found = [0] * compiled.limits.pool.num_ranks
    for plan, _ in served.steps:
        for admission in plan.admissions:
            found[compiled.limits.pool.rank_of(admission.row.slot)] += 1
    return found


@pytest.mark.parametrize("setting", EVERY, scope="module")
def test_the_text_depends_on_no_rank(setting: Setting) -> None:
    """There are fewer rows than slots, and never as many on each rank."""
    by_row = FILTERS["mixed"]
    requests = requests_of(5, num_tokens=30, seed=300, temperature=1.3, by_row=by_row)
    expected = plain_texts(tuple(requests))
    compiled = with_script(engine(setting), scripted(requests, expected))
    served = serve(compiled, requests)
    assert list(served.ids) == expected
    assert sorted(ranks_of(compiled, served)) == {2: [2, 3], 4: [1, 1, 1, 2]}[setting.ranks]
    pool = compiled.limits.pool
    assert (served.num_leaked_pages, served.num_free_pages) == (0, setting.ranks * pool.num_pages)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(SETTINGS[0], marks=pytest.mark.slow),
        pytest.param(SETTINGS[2], marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
    ids=lambda setting: setting.name,
    scope="module",
)
def test_rows_of_every_rank_are_retracted_and_go_on(setting: Setting) -> None:
    """Two rows for each pool, which has room for one and a half."""
    requests = requests_of(2 * setting.ranks, num_tokens=110, seed=70, longest=12, temperature=1.0)
    expected = plain_texts(tuple(requests))
    compiled = with_script(engine(setting), scripted(requests, expected))
    served = serve(compiled, requests, chunk_size=8, num_pages=42)
    assert list(served.ids) == expected
    assert served.num_retractions > 0
    assert (served.num_leaked_pages, served.num_free_pages) == (0, setting.ranks * 42)


@pytest.mark.parametrize("setting", EVERY, scope="module")
def test_a_rank_without_a_row_changes_nothing(setting: Setting) -> None:
    """One request runs on the first rank; the others run their dummy slots."""
    (request,) = requests_of(1, num_tokens=20, seed=11)
    compiled = engine(setting)
    runner, rng = compiled.runner(), np.random.default_rng(0)

    def filled(leaf: jax.Array) -> jax.Array:
        value = rng.integers(0, 3, leaf.shape).astype(leaf.dtype)
        first, *others = np.split(value, setting.ranks)
        first[:] = np.asarray(leaf)[: len(first)]
        for other in others:
            other[0] = 0  # the dummy row has no length and no pages
        return jax.device_put(value, leaf.sharding)

    def of_others() -> list[np.ndarray]:
        leaves = [np.split(np.asarray(x), setting.ranks) for x in jax.tree.leaves(runner.state)]
        return [own[1:] for ranks in leaves for own in ranks[1:]]

    runner.replace_state(jax.tree.map(filled, runner.state))
    before = of_others()
    served = asyncio.run(serve_view(ViewRunner(runner, compiled.limits), [request]))
    assert served.ids == tuple(plain_texts((request,)))
    assert ranks_of(compiled, served) == [1, *[0] * (setting.ranks - 1)]
    for old, new in zip(before, of_others(), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
def test_a_next_turn_starts_from_the_state_that_its_rank_has() -> None:
    compiled = recurrent_engine(TREE, ranks=2)
    session = Session(compiled)
    _, cached = converse(session, num_turns=2)
    size, ahead = compiled.limits.pool.page_size, compiled.limits.draft_shape.tokens_ahead
    lens = [len(request.prompt_ids) for request in turns_of(count=3)]
    assert cached == [min(n - ahead, n - 1) // size * size for n in lens]
    rank_of = compiled.limits.pool.rank_of
    restored = [rank_of(copy.slot) for plan, _ in session.view.steps for copy in plan.restores]
    assert set(restored) == {0, 1}


@pytest.mark.slow
def test_each_rank_releases_the_pages_before_its_windows() -> None:
    spec = spec_of(3, 3, 8, Algorithm.NGRAM)
    space = with_space(limits_of(spec, page_size=PAGE), num_rows=2).pool.windows
    compiled = build(
        spec,
        page_size=PAGE,
        ranks=2,
        variants=(StepOptions(),),
        params=(tiny_params()[0], {}),
        target_spec=windowed(SOME),
        windows=space,
    )
    served = serve(compiled, windows_requests())
    assert list(served.ids) == dense_ids(SOME)
    assert ranks_of(compiled, served)[1]
    assert served.num_free_window_pages == (2 * space[0].num_pages,)
