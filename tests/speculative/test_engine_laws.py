"""Laws of every drafter in an engine, in float32.

identity      the text is that of plain decoding, whatever was drafted: by the drafter itself,
              by a script that is right half of the time, by one that gives garbage (invalid
              ids, scores that are not numbers), and by weights that are all NaN; in batches,
              chunks, overlap depths, rounds, page sizes and shards, at any sampling
always right  a drafter with weights that are always right emits exactly S + 1 tokens per
              verification, greedy and at temperature 1, and the counters agree
retraction    the same in a pool too small for all, also with K = 16 and N = 64; that of lookups is
              test_state_snapshots.py's
no live row   a step without one changes nothing
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from tests.speculative.covering import all_pairs, covering_array, pairs_of
from tests.speculative.engines import (
    make_request,
    serve,
)
from tests.speculative.every_drafter import EVERY, KINDS
from tests.speculative.law_engines import (
    FAST,
    REST,
    Setting,
    engine,
    laid_out,
    no_script,
    plain_texts,
    requests_of,
    scripted,
    with_script,
)
from tests.support.plans import plan_of

pytestmark = pytest.mark.law

SHAPES = ((1, 1, 2), (3, 1, 4), (1, 3, 4), (2, 2, 4), (3, 2, 7), (3, 4, 13))
# By row, in turn. The filters that are mixed have an edge that is often chosen.
FILTERS: dict[str, tuple[dict[str, Any], ...]] = {
    "none": ({},),
    "top_k_top_p": ({"top_k": 40, "top_p": 0.9},),
    "min_p": ({"min_p": 0.02},),
    "mixed": ({"top_k": 2}, {}, {"min_p": 0.3}, {"top_p": 0.6}, {"top_k": 1}),
}
RUN_FACTORS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 5, 8),
    "chunk": (5, 8, 32),
    "depth": (0, 1, 2),
    "temperature": (0.0, 1.3),  # division by 1 changes no logit
    "filters": tuple(FILTERS),
    "penalty": (False, True),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "shape": SHAPES,
    "page_size": (1, 4, 16, 64),
    "rounds": (1, 3),
    "shards": (1, 2, 4),
    **RUN_FACTORS,
}
# One of each algorithm, which together show every value of every setting of a run.
RUNS: tuple[dict[str, Any], ...] = tuple(
    dict(zip(RUN_FACTORS, values, strict=True))
    for values in (
        (8, 8, 1, 1.3, "mixed", False),
        (5, 5, 2, 1.3, "top_k_top_p", True),
        (8, 32, 0, 1.3, "mixed", True),
        (2, 8, 2, 1.3, "min_p", True),
        (8, 5, 1, 1.3, "mixed", False),
        (1, 32, 0, 0.0, "none", False),
        (5, 8, 1, 1.3, "top_k_top_p", True),
        (2, 32, 1, 1.3, "none", False),
    )
)


def every_engine(
    settings: tuple[Setting, ...] = FAST, rest_in_ci: tuple[Setting, ...] = REST[:1]
) -> list[Any]:
    """Return cases of `settings` and REST: in the fast suite a tree, a lookup and states, in CI one
    of each algorithm. EAGLE-1 is there beside a lookup; test_rounds.py and test_shapes.py have
    rounds.
    """
    in_ci = {*FAST[1:], *rest_in_ci}

    def marks_of(setting: Setting) -> Any:
        if setting.kind in ("eagle3", "ngram", "recurrent") and setting in FAST:
            return ()
        return pytest.mark.slow if setting in in_ci else [pytest.mark.slow, pytest.mark.exhaustive]

    return [pytest.param(each, id=each.name, marks=marks_of(each)) for each in (*settings, *REST)]


EVERY_ENGINE = every_engine()


def check_identity(setting: Setting, run: dict[str, Any], *, num_tokens: int = 36) -> None:
    """Check one run of an engine, in which the script's rows accept every count from 0 to S."""
    sampling: dict[str, Any] = {"temperature": run["temperature"]}
    if run["penalty"]:
        sampling |= {"frequency_penalty": 0.4, "presence_penalty": 0.3}
    batch = run["batch"]
    alone = 3 if batch < 4 else 1  # few rows say more
    requests = requests_of(
        batch,
        num_tokens=alone * num_tokens,
        seed=900 * batch,
        by_row=FILTERS[run["filters"]],
        **sampling,
    )
    expected = plain_texts(tuple(requests))
    compiled = with_script(engine(setting), scripted(requests, expected))
    served = serve(
        compiled,
        requests,
        chunk_size=run["chunk"],
        overlap_depth=run["depth"],
        num_slots=batch,
    )
    assert list(served.ids) == expected
    assert (served.num_leaked_pages, served.num_free_pages) == (0, compiled.limits.pool.num_pages)
    told = {count for counts in served.accepted[::3] for count in counts}
    assert told == set(range(setting.shape[0] + 1)), told


@pytest.mark.parametrize("setting", EVERY_ENGINE, scope="module")
def test_the_text_depends_on_no_draft(setting: Setting) -> None:
    """Filters that are mixed in a batch run on one, two and four shards."""
    place = (*FAST, *REST).index(setting)
    check_identity(setting, RUNS[place % len(RUNS)])


ARRAY = covering_array(FACTORS)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(len(ARRAY)))
def test_the_text_depends_on_no_draft_in_the_whole_array(number: int) -> None:
    case = ARRAY[number]
    names = [field.name for field in dataclasses.fields(Setting) if field.name in case]
    setting = Setting(**{name: case[name] for name in names})
    check_identity(setting, {name: case[name] for name in RUN_FACTORS}, num_tokens=60)


def test_the_array_covers_every_pair() -> None:
    assert set().union(*map(pairs_of, ARRAY)) == all_pairs(FACTORS)
    assert len(ARRAY) <= 96  # kinds times shapes are 87
    assert {setting.kind for setting in (*FAST, *REST)} == set(KINDS)
    assert {KINDS[setting.kind].algorithm for setting in FAST} == {k.algorithm for k in EVERY}
    assert all({run[name] for run in RUNS} == {*levels} for name, levels in RUN_FACTORS.items())
    assert len(RUNS) == len(FAST)


@pytest.mark.parametrize("setting", EVERY_ENGINE, scope="module")
def test_weights_of_nothing_but_nan_change_no_text(setting: Setting) -> None:
    """These are the drafter's own; a lookup has none, and gets a corpus of invalid ids."""
    requests = requests_of(4, num_tokens=30, seed=40, temperature=1.0)
    spoiled = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -1),
        {k: v for k, v in engine(setting).params["draft"]["own"].items() if k != "draft_ids"},
    )
    own = {**engine(setting).params["draft"]["own"], **spoiled}
    served = serve(with_script(engine(setting), no_script(), own=own), requests)
    assert list(served.ids) == plain_texts(tuple(requests))


def mixed_requests() -> list[Request]:
    """Return greedy and sampled requests, alternating."""
    return [
        make_request(
            i,
            prompt_len=(16, 9, 40, 7, 23)[i],
            seed=8800 + i,
            temperature=float(i % 2),
            max_new_tokens=48 - 5 * i,
            ignore_eos=True,
        )
        for i in range(5)
    ]


@pytest.mark.parametrize("setting", EVERY_ENGINE, scope="module")
def test_one_that_is_always_right_emits_exactly_s_plus_1(setting: Setting) -> None:
    kind, (num_steps, _, nodes) = KINDS[setting.kind], setting.shape
    requests = mixed_requests()
    texts = plain_texts(tuple(requests), target=setting.kind)
    assert len(set(texts)) == len(texts)
    own = kind.always_right([r.prompt_ids + ids for r, ids in zip(requests, texts, strict=True)])
    target, own = laid_out(setting, kind.right_target(), own)
    served = serve(with_script(engine(setting), no_script(), own=own, target=target), requests)
    assert list(served.ids) == texts
    if kind.spec(setting.shape).lookup:  # which may be right beyond the head's S levels
        assert served.counters.acceptance_length >= num_steps + 1
        return
    for request, counters in zip(requests, served.per_request, strict=True):
        most = num_steps + 1
        verifications = math.ceil((request.sampling.wanted_tokens - 1) / most)
        assert counters.verify_ct == verifications
        assert counters.num_proposed == verifications * (nodes - 1)
        assert counters.full_verify_ct >= verifications - 1
        assert counters.full_num_emitted == counters.full_verify_ct * most
        assert counters.acceptance_length == most
        assert counters.accept_histogram[num_steps] >= verifications - 1
        assert sum(counters.accept_histogram) == verifications
    assert served.counters.acceptance_length == num_steps + 1


def check_retraction(setting: Setting, *, num_tokens: int, num_pages: int) -> None:
    if KINDS[setting.kind].spec(setting.shape).lookup:  # more tokens a round, so more headroom
        num_tokens, num_pages = 280, 2 * num_pages
    requests = requests_of(4, num_tokens=num_tokens, seed=70, longest=12, temperature=1.0)
    expected = plain_texts(tuple(requests))
    served = serve(
        with_script(engine(setting), scripted(requests, expected)),
        requests,
        chunk_size=8,
        num_pages=num_pages,
    )
    assert list(served.ids) == expected
    assert served.num_retractions > 0
    assert (served.num_leaked_pages, served.num_free_pages) == (0, num_pages)


@pytest.mark.parametrize("setting", every_engine((FAST[1], FAST[3]), ()), scope="module")
def test_a_retracted_row_goes_on_as_if_nothing_had_been(setting: Setting) -> None:
    sizes = {1: (64, 140), 4: (110, 78), 16: (110, 20), 64: (64, 4)}
    num_tokens, num_pages = sizes[setting.page_size]
    check_retraction(setting, num_tokens=num_tokens, num_pages=num_pages)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*itertools.product(KINDS, (1, 16))], ids=str)
def test_a_wide_tree_under_retraction(case: tuple[str, int]) -> None:
    """K = 16 with N = 64: scratch slots fill whole pages, and exhaust the pool."""
    name, page_size = case
    setting = Setting(name, (3 if KINDS[name].lags else 4, 16, 64), page_size)
    check_retraction(setting, num_tokens=120, num_pages=480 // page_size)


@pytest.mark.parametrize("setting", EVERY_ENGINE, scope="module")
def test_a_step_without_a_live_row_changes_nothing(setting: Setting) -> None:
    """This concerns the rows' state: slot 0 and page 0 take the padding."""
    runner = engine(setting).runner()
    with kept_state(runner) as before:
        for step, kind in enumerate((StepKind.DECODE, StepKind.PREFILL, StepKind.DECODE)):
            plan = plan_of(kind, runner.limits.draft_shape, step=step, options=SAMPLING)
            rounds = runner.collect(runner.dispatch(plan)).rounds
            assert all(not of_round.emitted_ids for of_round in rounds)
    for old, new in zip(before, beyond_dummies(runner.state), strict=True):
        np.testing.assert_array_equal(new, old)


def beyond_dummies(state: Any) -> list[Any]:
    """Return every array without its first entry: all are by slot or by page."""
    return [np.asarray(leaf)[1:] for leaf in jax.tree.leaves(state)]


@contextmanager
def kept_state(runner: Any) -> Iterator[list[Any]]:
    """Fill the runner's state with numbers, which it yields."""
    rng = np.random.default_rng(0)

    def filled(leaf: jax.Array) -> jax.Array:
        value = rng.integers(0, 3, leaf.shape).astype(leaf.dtype)
        value[:1] = 0  # the dummy row has no length and no pages
        return jax.device_put(value, leaf.sharding)

    state = jax.tree.map(filled, runner.state)
    runner.replace_state(state)
    yield beyond_dummies(state)
