"""An FP8 cache: the same text whatever is drafted, chunked, batched, paged or sharded.

In float32, like test_identity.py: K and V are coarse here, and every query reads the stored ones,
so no result depends on which tokens share a step.
"""

from __future__ import annotations

import copy
import functools

import jax.numpy as jnp
import pytest

from jspec.config.limits import Algorithm
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.registry import table_of
from jspec.spec.cache_entry import FP8
from jspec.spec.model_spec import cached_in
from tests.speculative.engines import (
    DRAFT,
    PLAIN,
    TARGET,
    Compiled,
    build,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
    with_prefix_cache,
)
from tests.speculative.every_drafter import sharded
from tests.speculative.test_prefix_cache import Session, ids_of

K_SCALE, V_SCALE = 0.031, 0.007  # no power of two: both would be exact


def with_scales(params: Params) -> Params:
    scaled: Params = copy.copy(params)
    scaled["layers"] = {}
    for i, layer in params["layers"].items():
        scales = {
            "k_scale": jnp.full(1, K_SCALE * (1 + i), jnp.float32),
            "v_scale": jnp.full(1, V_SCALE * (1 + i), jnp.float32),
        }
        scaled["layers"][i] = {**layer, "attention": {**layer["attention"], **scales}}
    return scaled


def params_of(shards: int) -> tuple[Params, Params]:
    target, head = map(with_scales, tiny_params())
    if shards == 1:
        return target, head
    return (
        sharded(table_of(cached_in(TARGET, FP8)), target, shards),
        sharded(head_params(DRAFT), head, shards),
    )


@functools.cache
def fp8_engine(
    shape: tuple[int, int, int],
    page_size: int,
    *,
    algorithm: Algorithm = Algorithm.EAGLE3,
    shards: int = 1,
) -> Compiled:
    return build(
        spec_of(*shape, algorithm),
        page_size=page_size,
        params=params_of(shards),
        shards=shards,
        variants=(SAMPLING,),
        kv_dtype=FP8,
    )


@functools.cache
def plain_engine() -> Compiled:
    return build(PLAIN, page_size=16, params=params_of(1), variants=(SAMPLING,), kv_dtype=FP8)


@functools.cache
def texts() -> tuple[list[Request], list[tuple[int, ...]]]:
    """Return requests, and each one's text by plain decoding, alone and with its prompt in one
    chunk."""
    prompts = ((11, 0.0), (3, 1.0), (29, 0.7), (31, 0.0))
    requests = [
        make_request(i, prompt_len=n, seed=90 + i, temperature=t, max_new_tokens=40)
        for i, (n, t) in enumerate(prompts)
    ]
    return requests, [serve(plain_engine(), [each]).ids[0] for each in requests]


def check(engine: Compiled, *, chunk: int, is_dial: bool = True) -> None:
    requests, expected = texts()
    dial = dial_for(requests, expected) if is_dial else None
    served = serve(engine, requests, chunk_size=chunk, dial=dial)
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    assert not is_dial or all(served.counters.accept_histogram)


@pytest.mark.slow
def test_plain_decoding_in_chunks_and_batches() -> None:
    check(plain_engine(), chunk=5, is_dial=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "page_size", "chunk"),
    [
        ((2, 2, 4), 4, 8),
        pytest.param((3, 1, 4), 1, 5, marks=pytest.mark.exhaustive),
        pytest.param((3, 4, 16), 16, 32, marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_change_no_token(shape: tuple[int, int, int], page_size: int, chunk: int) -> None:
    check(fp8_engine(shape, page_size), chunk=chunk)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_lookup_changes_no_token() -> None:
    check(fp8_engine((3, 3, 8), 16, algorithm=Algorithm.NGRAM), chunk=8, is_dial=False)


@pytest.mark.slow
def test_two_shards_change_no_token() -> None:
    check(fp8_engine((2, 2, 4), 4, shards=2), chunk=8)


@pytest.mark.slow
def test_cached_prefixes_and_retractions_change_no_token() -> None:
    """A tree's pages are read by later rows, and rows are retracted meanwhile."""
    requests, expected = texts()
    engine = with_prefix_cache(fp8_engine((2, 2, 4), 4))
    assert {pool.dtype for pool in engine.runner().state.kv} == {jnp.dtype(FP8)}
    assert {pool.dtype for pool in engine.runner().state.draft_kv} == {jnp.dtype(FP8)}
    session = Session(engine, chunk_size=8, overlap_depth=0, num_pages=50)
    for retract_after in (9, None):
        of_all = session.serve(requests, retract_after=retract_after)
        assert [ids_of(chunks) for chunks in of_all] == expected
    assert any(chunks[-1].cached_tokens for chunks in of_all)
    assert session.scheduler.stats.num_retractions > 0
