"""A token whose hidden state overflows: no other row's text changes, nor its own by drafting it.

The target and the head have one token each whose embedding is NaN or infinite. All executables are
those of the finite weights, which are arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from jspec.models.decoder import Decoder
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from tests.speculative.engines import (
    CONTEXT,
    NUM_SLOTS,
    TARGET,
    Compiled,
    engine,
    make_request,
    plain_engine,
    serve,
)
from tests.support.caches import empty_pools
from tests.support.dial_drafter import dial_params

TREE, PAGE = (3, 2, 7), 16
IS_NAN, IS_INF = 311, 312  # only in prompts that are made with it


@functools.cache
def poisoned_tables() -> tuple[Any, Any]:
    """Return the embeddings of target and head: one is NaN, one has an infinity among numbers."""

    def poison(table: jax.Array) -> jax.Array:
        return table.at[IS_NAN].set(jnp.nan).at[IS_INF, 3].set(jnp.inf)

    params = engine(TREE, PAGE, options=SAMPLING).params
    return poison(params["target"]["embed"]["table"]), poison(
        params["draft"]["head"]["embed"]["table"]
    )


def poisoned(compiled: Compiled) -> Compiled:
    """Return the executables with weights that have two poisoned tokens."""
    target_table, head_table = poisoned_tables()
    params = dict(compiled.params)
    params["target"] = {**params["target"], "embed": {"table": target_table}}
    if params["draft"]:
        head = {**params["draft"]["head"], "embed": {"table": head_table}}
        params["draft"] = {**params["draft"], "head": head}
    return dataclasses.replace(compiled, params=params)


def request_with(i: int, token: int | None, *, temperature: float = 1.0) -> Request:
    """Return request i with `token` in the middle of its prompt."""
    request = make_request(
        i,
        prompt_len=6 + i,
        seed=8100 + i,
        temperature=temperature,
        max_new_tokens=24,
        ignore_eos=True,
        min_p=0.02,
    )
    ids = tuple(1 if x in (IS_NAN, IS_INF) else x for x in request.prompt_ids)
    if token is not None:
        ids = (*ids[:3], token, *ids[4:])
    return dataclasses.replace(request, prompt_ids=ids)


def alone(request: Request) -> tuple[int, ...]:
    return serve(poisoned(plain_engine()), [request], overlap_depth=0).ids[0]


def dial_of(requests: list[Request], texts: list[tuple[int, ...]], *, decoy: int = -1) -> Params:
    truths = {r.seed: r.prompt_ids + ids for r, ids in zip(requests, texts, strict=True)}
    return dial_params(truths, rows=NUM_SLOTS, width=CONTEXT, decoy=decoy)


@pytest.mark.slow
@pytest.mark.parametrize("token", [IS_NAN, IS_INF])
def test_a_prompt_that_overflows_changes_no_text_but_its_own(token: int) -> None:
    """All run in one prefill step, plainly and over a tree; its own text equals that when alone."""
    requests = [request_with(0, None), request_with(1, token), request_with(2, None)]
    texts = [alone(request) for request in requests]
    assert len(set(texts[0])) > 5
    assert list(serve(poisoned(plain_engine()), requests).ids) == texts
    dial = dial_of(requests, texts)
    served = serve(poisoned(engine(TREE, PAGE, options=SAMPLING)), requests, dial=dial)
    assert list(served.ids) == texts
    assert all(served.counters.accept_histogram)


@pytest.mark.parametrize("decoy", [IS_NAN, IS_INF])
def test_a_guess_that_overflows_changes_no_text(decoy: int) -> None:
    """It is a sibling of accepted nodes, and has children, in every tree."""
    requests = [request_with(i, None, temperature=float(i % 2)) for i in range(3)]
    texts = [alone(request) for request in requests]
    dial = dial_of(requests, texts, decoy=decoy)
    served = serve(poisoned(engine(TREE, PAGE, options=SAMPLING)), requests, dial=dial)
    assert list(served.ids) == texts
    assert all(served.counters.accept_histogram)


def test_pages_are_reused_after_a_tenant_that_overflowed() -> None:
    """The pool has room for one request at a time: the second gets the first one's pages."""
    requests = [request_with(1, IS_NAN), request_with(2, None), request_with(3, None)]
    texts = [alone(request) for request in requests]
    served = serve(
        poisoned(engine(TREE, PAGE, options=SAMPLING)),
        requests,
        num_slots=1,
        num_pages=3,
        dial=dial_of(requests, texts, decoy=IS_NAN),
    )
    assert list(served.ids) == texts
    assert served.num_leaked_pages == 0


@functools.cache
def half_model() -> tuple[Decoder, Params]:
    """A float16 target with one layer, whose weights are finite and whose V overflows for 7."""
    model = Decoder(dataclasses.replace(TARGET, layers=TARGET.layers[:1]), Ops())
    params = init_params(model.table, seed=0, dtype=jnp.float16)
    table = params["embed"]["table"].at[:, 0].set(0.0).at[7].set(0.0).at[7, 0].set(1.0)
    kernel = params["layers"][0]["attention"]["qkv"]["kernel"]
    kernel = kernel.at[0, -16:].set(60000.0)  # V of all heads, from the one feature that 7 has
    params["embed"]["table"] = table
    params["layers"][0]["attention"]["qkv"]["kernel"] = kernel
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(params))
    return model, params


def test_a_float16_prompt_that_overflows_with_finite_weights() -> None:
    model, params = half_model()
    lens = np.asarray([5, 4, 6])
    starts = np.append(0, np.cumsum(lens))
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1], [2], [3]], jnp.int32),
        prefix_lens=jnp.zeros(3, jnp.int32),
        cu_q_lens=jnp.asarray(starts, jnp.int32),
        q_positions=jnp.asarray(np.concatenate([np.arange(n) for n in lens]), jnp.int32),
    )
    kv = empty_pools(
        model.cache_groups, num_pages=4, page_size=8, shards=1, dtype=jnp.float16, ops=Ops()
    )

    @jax.jit
    def hidden_and_pool(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, _, (pool,) = model.forward(params, ids, kv, rows, queries_per_row=None)
        return hidden, pool

    ids = jnp.asarray(np.random.default_rng(0).integers(8, 256, starts[-1]), jnp.int32)
    expected, _ = hidden_and_pool(ids)
    hidden, pool = hidden_and_pool(ids.at[6].set(7))  # the second token of row 1
    assert float(jnp.max(jnp.abs(pool[2, 1].astype(jnp.float32)))) == 65504.0  # it did overflow
    assert np.isfinite(pool).all()
    others = [*range(6), *range(9, 15)]
    np.testing.assert_array_equal(np.asarray(hidden)[others], np.asarray(expected)[others])
    assert np.isfinite(np.asarray(hidden)[others]).all()
