"""Triton's decode attention over FP8 pools against the dense oracle: interpreted, and on a GPU
where one is. Unwritten slots and other rows' pages are NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device.fp8 import E4M3
from jspec.pallas_kernels.attention import gpu_fp8
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_fp8 import Tuning
from jspec.pallas_kernels.attention.gpu_plan import pack_queries
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.test_attention import attend_densely, draw_rows, query_places
from tests.pallas_kernels.test_attention_gpu import GPUCase, arrays_of, gpu_case, on_cpu, rounded

ONE, THREE = Tuning(splits=1), Tuning(splits=3)
CASES: dict[str, tuple[GPUCase, Tuning]] = {
    "decode, page 16": (gpu_case(page_size=16, queries=1), ONE),
    "decode, shares": (gpu_case(page_size=64, queries=1, longest=290), THREE),
    "chain, padding queries": (gpu_case(page_size=32, queries=4), ONE),
    "chain, wide heads": (gpu_case(page_size=64, batch=3, queries=4, heads=(8, 2), width=128), ONE),
    "a tree of few nodes, half pages": (
        gpu_case(page_size=128, queries=3, tail=9, longest=220),
        dataclasses.replace(ONE, block=128),
    ),
    "tree, window, sinks": (
        gpu_case(
            page_size=16,
            queries=7,
            tail=7,
            sinks=True,
            options={"window": 6},
        ),
        Tuning(splits=2, block=32),
    ),
    "window": (gpu_case(page_size=16, queries=3, longest=330, options={"window": 90}), ONE),
    "group 3, shares by default": (gpu_case(page_size=16, queries=5, heads=(6, 2)), Tuning()),
}
FAST = ("tree, window, sinks",)


def check(name: str, *, interpret: bool) -> None:
    gpu, tuning = CASES[name]
    case, gpu = gpu.case, dataclasses.replace(gpu, dtype=E4M3)
    rng = np.random.default_rng(len(name))
    rows = [rounded(row, E4M3) for row in draw_rows(rng, case)]
    sinks = rng.normal(0, 1, case.heads[0]).astype(np.float32) if case.sinks else None
    options: dict[str, Any] = {"window": None, **case.options}
    num_heads, num_kv = case.heads
    assert case.queries * num_heads // num_kv <= gpu_fp8.MOST_PACKED

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, attention_rows: AttentionMetadata) -> jax.Array:
        return gpu_fp8.attend_rows(
            pack_queries(q, case.batch, num_kv, case.queries, width=q.shape[-1]),
            pool,
            attention_rows,
            scale=0.1,
            queries_per_row=case.queries,
            packed_heads=num_heads,
            sinks=None if sinks is None else jnp.asarray(sinks),
            tuning=tuning,
            interpret=interpret,
            **options,
        )

    q, pool, where = arrays_of(gpu, rows)
    with on_cpu() if interpret else contextlib.nullcontext():
        out = np.asarray(run(q.astype(jnp.float16), pool, where).astype(jnp.float32))
    places = query_places(case, rows)
    for row, at in zip(rows, places, strict=True):
        expected = attend_densely(row, scale=0.1, sinks=sinks, **options)
        np.testing.assert_allclose(out[at], expected, rtol=0.005, atol=0.005)
    padding = np.setdiff1d(np.arange(case.num_queries), np.concatenate(places))
    assert not out[padding].any()


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_equals_the_dense_oracle_and_reads_no_poison(name: str) -> None:
    check(name, interpret=True)


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_oracle_on_the_chip(name: str) -> None:
    check(name, interpret=False)


@pytest.mark.parametrize(
    ("queries", "group", "dtype", "serves"),
    [
        (4, 4, E4M3, True),
        (1, 16, E4M3, True),
        (5, 4, E4M3, False),
        (1, 4, jnp.bfloat16, False),
    ],
)
def test_it_serves_few_queries_of_fp8_pools(
    queries: int, group: int, dtype: Any, serves: bool
) -> None:
    pool = jnp.zeros((1, 16, 2, 128), dtype)
    assert gpu_fp8.serves(pool, queries_per_row=queries, group=group) == serves
