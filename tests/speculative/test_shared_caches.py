"""Layers that read an earlier layer's cache: text with and without cached prefixes, and after a
retraction, is plain decoding's.

The target has a window in a space of its own, full attention with wider heads, and a layer that
reads the first one's cache (Gemma 4). On one shard and on two, and with K and V in FP8, whose
scales are those of the layer that wrote them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from jspec.config.limits import Algorithm
from jspec.messages.step_options import SAMPLING
from jspec.models.layer import Params
from jspec.models.registry import table_of
from jspec.spec.cache_entry import FP8
from jspec.spec.model_spec import cache_groups, cached_in
from jspec.spec.sandwich import cache_indices
from tests.speculative.engines import (
    PLAIN,
    Compiled,
    build,
    corpus_params,
    limits_of,
    make_request,
    spec_of,
    tiny_params,
)
from tests.speculative.every_drafter import sharded
from tests.speculative.family_targets import WINDOW, drawn, target_of
from tests.speculative.test_prefix_cache import PENALTIES, Session, ids_of
from tests.speculative.test_window_cache import (
    SPARE,
    check_idle,
    conversations,
    session_of,
    space_of,
)

TARGET = target_of("gemma4")
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]
    page_size: int
    algorithm: Algorithm = Algorithm.NGRAM
    shards: int = 1
    kv_dtype: str | None = None


CASES = [
    pytest.param(Case((3, 2, 7), 4, Algorithm.EAGLE3), id="tree"),
    pytest.param(
        Case((3, 1, 4), 2, shards=2), id="lookup on two shards", marks=pytest.mark.exhaustive
    ),
    pytest.param(
        Case((3, 2, 7), 8, kv_dtype=FP8), id="lookup over FP8", marks=pytest.mark.exhaustive
    ),
]


def params_of(case: Case) -> tuple[Params, Params]:
    target = drawn(TARGET)
    for i, layer in target["layers"].items():
        if case.kv_dtype and TARGET.layers[i].attention.kv_of is None:
            # K and V are normed, so that most are below 4.
            layer["attention"] |= {
                name: jnp.full(1, 0.01 * (i + 1), jnp.float32) for name in ("k_scale", "v_scale")
            }
    is_head = case.algorithm is Algorithm.EAGLE3
    draft = tiny_params()[1] if is_head else corpus_params([(0,)])
    return sharded(table_of(TARGET), target, case.shards), draft


@functools.cache
def engine(case: Case) -> Compiled:
    is_plain = case.algorithm is Algorithm.NONE
    spec = PLAIN if is_plain else spec_of(*case.shape, case.algorithm)
    limits = limits_of(spec, page_size=case.page_size)
    return build(
        spec,
        page_size=case.page_size,
        dial=False,
        variants=(SAMPLING,),
        params=params_of(case),
        target_spec=TARGET,
        windows=(space_of(limits, WINDOW, num_rows=2, spare=SPARE),),
        shards=case.shards,
        kv_dtype=case.kv_dtype,
    )


def plain_session(case: Case) -> Session:
    """Return plain decoding on one shard without a prefix cache, of the same K and V."""
    plain = Case((0, 1, 1), 16, Algorithm.NONE, kv_dtype=case.kv_dtype)
    return session_of(engine(plain), prefix_cache=False)


def test_the_reader_has_no_cache() -> None:
    groups = cache_groups(cached_in(TARGET, FP8), name="target")
    assert [(group.window, group.num_layers) for group in groups] == [(WINDOW, 1), (None, 1)]
    assert cache_indices(TARGET) == (0, 1, 0)


@pytest.mark.parametrize("case", CASES)
def test_text_with_cached_prefixes_is_text_without(case: Case) -> None:
    session, cold = session_of(engine(case), chunk_size=7), plain_session(case)
    for turn, _, found in conversations("shared", num_turns=2, session=session, cold=cold):
        assert found or turn == 0


@pytest.mark.parametrize("case", CASES)
def test_retracted_rows_go_on_over_their_own_pages(case: Case) -> None:
    session = session_of(engine(case), overlap_depth=0)
    requests = [
        make_request(i, prompt_len=9 + i, seed=70 + i, max_new_tokens=30, **sampling)
        for i, sampling in enumerate(PENALTIES[:2])
    ]
    served = session.serve(requests, retract_after=8)
    expected = plain_session(case).serve(requests)
    assert [ids_of(chunks) for chunks in served] == [ids_of(chunks) for chunks in expected]
    assert [chunks[-1].num_retractions for chunks in served] == [1, 1]
    check_idle(session)
