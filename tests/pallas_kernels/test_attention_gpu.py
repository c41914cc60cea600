"""The Hopper kernel against the dense oracle: in GPU interpret mode, and on a GPU where one is.

Interpret mode checks for races and fills unwritten memory with NaN; pools and padding are NaN as
well. It takes no matrix operand from registers, so P is in shared memory there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu import attend_rows
from jspec.pallas_kernels.attention.tuning import Tuning
from tests.pallas_kernels.chips import (
    in_turns,
    needs_hopper,
    needs_mosaic_gpu,
    needs_older_jax,
)
from tests.pallas_kernels.test_attention import (
    Case,
    Row,
    attend_densely,
    draw_rows,
    pool_of,
    query_places,
    words_of,
)

# One share of two blocks' ring, so that every slot is filled again.
SELF = Tuning(splits=1, stages=2)
PRODUCER = Tuning(splits=1, stages=1, loader="producer", consumers=2)


@dataclass(frozen=True, kw_only=True)
class GPUCase:
    """A case of the shared generator, in the kernel's sizes."""

    case: Case
    tuning: Tuning
    dtype: Any = jnp.bfloat16


def gpu_case(tuning: Tuning | None = None, *, width: int = 64, **changes: Any) -> GPUCase:
    settings: dict[str, Any] = {"batch": 2, "longest": 150, **changes}
    case = Case(widths=(width, width, width), writes=False, **settings)
    return GPUCase(case=case, tuning=tuning or SELF)


CASES = {
    "decode, page 16": gpu_case(page_size=16, queries=1),
    "decode, shares, wide heads": gpu_case(
        Tuning(splits=3, stages=1), page_size=64, queries=1, longest=290, width=128
    ),
    "chain, padding queries": gpu_case(page_size=32, queries=4),
    "tree, a full tile": gpu_case(page_size=64, queries=16, tail=16, heads=(8, 2)),
    "tree, two tiles, two words": gpu_case(page_size=16, batch=1, queries=40, tail=40),
    "draft level": gpu_case(page_size=16, queries=4, tail=12),
    "half pages": gpu_case(page_size=128, queries=3, tail=9, longest=220),
    "blocks of 128": gpu_case(
        Tuning(block_tokens=128, stages=1, splits=1), page_size=128, queries=2, longest=220
    ),
    "window": gpu_case(page_size=16, queries=3, longest=330, options={"window": 90}),
    "tree, window, sinks": gpu_case(
        Tuning(splits=2),
        page_size=16,
        queries=7,
        tail=7,
        sinks=True,
        options={"window": 6},
    ),
    "sinks alone, shares by default": gpu_case(Tuning(), page_size=16, queries=2, sinks=True),
    "two consumers": gpu_case(
        Tuning(consumers=2, stages=1, splits=1), page_size=16, queries=4, tail=4
    ),
    "producer": gpu_case(
        Tuning(loader="producer", stages=2, splits=1), page_size=64, queries=4, tail=4, longest=290
    ),
    "producer, two consumers": gpu_case(PRODUCER, page_size=16, queries=2, longest=290),
    # Results that the kernel places itself, by how the rows of a tile are cut.
    "direct, one query, group 8": gpu_case(page_size=64, queries=1, heads=(8, 1), width=128),
    "direct, group 1": gpu_case(page_size=16, queries=16, heads=(2, 2)),
    "direct, group 3": gpu_case(page_size=16, queries=5, heads=(6, 2)),
    "direct, group 4, wide heads": gpu_case(
        page_size=64, batch=3, queries=4, heads=(8, 2), width=128
    ),
    "direct, two tiles, window": gpu_case(
        page_size=128, queries=20, heads=(8, 2), longest=330, options={"window": 90}
    ),
    "direct, producer": gpu_case(
        Tuning(loader="producer", stages=1, splits=1), page_size=16, queries=16, heads=(8, 1)
    ),
    # Results that it cannot place: too many queries per tile, and one in two tiles.
    "many queries, group 1": gpu_case(page_size=16, queries=20, heads=(2, 2)),
    "two tiles, group 3": gpu_case(page_size=16, queries=25, heads=(6, 2)),
}


# One of each kind, and what these leave out: wide heads, shares, blocks of 128 tokens, and results
# that the kernel does not place itself.
FAST = (
    "chain, padding queries",
    "tree, two tiles, two words",
    "tree, window, sinks",
    "producer, two consumers",
    "direct, group 3",
    "direct, two tiles, window",
)
OTHERS = (
    "decode, shares, wide heads",
    "two tiles, group 3",
    "tree, a full tile",
    "blocks of 128",
)


def rounded(row: Row, dtype: Any) -> Row:
    """Round to the dtypes of the pool and the queries."""

    def narrow(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32), np.float64)

    return dataclasses.replace(row, prefix=narrow(row.prefix), new=narrow(row.new), q=narrow(row.q))


def arrays_of(gpu: GPUCase, rows: list[Row]) -> tuple[jax.Array, jax.Array, AttentionMetadata]:
    """Return q, pool and rows of one call; padding queries are 7, unwritten slots NaN."""
    case = gpu.case
    q = np.full((case.num_queries, case.heads[0], case.widths[0]), 7, np.float32)
    positions = np.zeros(case.num_queries, np.int32)
    table = np.zeros((case.batch, case.pages_per_row), np.int32)
    mask = tail_positions = None
    if case.tail is not None:
        mask = np.zeros((case.num_queries, -(-case.tail // 32)), np.uint32)
        tail_positions = np.zeros((case.batch, case.tail), np.int32)
    for b, (row, places) in enumerate(zip(rows, query_places(case, rows), strict=True)):
        q[places], positions[places] = row.q, row.q_positions
        table[b, : len(row.pages)] = row.pages
        if row.tail_mask is not None and mask is not None and tail_positions is not None:
            mask[places], tail_positions[b] = words_of(row.tail_mask), row.tail_positions
    lengths = np.array([len(row.q) for row in rows])
    attention_rows = AttentionMetadata(
        page_table=jnp.asarray(table),
        prefix_lens=jnp.asarray([len(row.prefix) for row in rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32),
        q_positions=jnp.asarray(positions),
        tail_mask=None if mask is None else jnp.asarray(mask),
        tail_positions=None if tail_positions is None else jnp.asarray(tail_positions),
    )
    pool = jnp.asarray(pool_of(case, rows, with_new=True))
    return jnp.asarray(q).astype(gpu.dtype), pool.astype(gpu.dtype), attention_rows


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """Use the CPU, which simulates the GPU, even where there is a GPU."""
    return jax.default_device(jax.devices("cpu")[0])


def check(gpu: GPUCase, *, seed: int, interpret: bool) -> None:
    case = gpu.case
    rng = np.random.default_rng([seed, case.queries])
    rows = [rounded(row, gpu.dtype) for row in draw_rows(rng, case)]
    sinks = rng.normal(0, 1, case.heads[0]).astype(np.float32) if case.sinks else None
    options = {"window": None, **case.options}

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, attention_rows: AttentionMetadata) -> jax.Array:
        return attend_rows(
            q,
            pool,
            attention_rows,
            scale=0.1,
            queries_per_row=case.queries,
            sinks=None if sinks is None else jnp.asarray(sinks),
            tuning=gpu.tuning,
            interpret=interpret,
            **options,
        )

    with on_cpu() if interpret else contextlib.nullcontext():
        out = np.asarray(run(*arrays_of(gpu, rows)).astype(jnp.float32))
    places = query_places(case, rows)
    for row, at in zip(rows, places, strict=True):
        expected = attend_densely(row, scale=0.1, sinks=sinks, **options)
        np.testing.assert_allclose(out[at], expected, rtol=0.02, atol=0.02)
    padding = np.setdiff1d(np.arange(case.num_queries), np.concatenate(places))
    assert not out[padding].any()


@needs_mosaic_gpu
@pytest.mark.parametrize("name", FAST)
def test_equals_the_dense_oracle_and_reads_no_poison(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check(CASES[name], seed=len(name), interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


E4M3 = jnp.float8_e4m3fn


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "name",
    [
        "tree, window, sinks",
        "producer, two consumers",
        pytest.param("decode, shares, wide heads", marks=pytest.mark.exhaustive),
        pytest.param("direct, two tiles, window", marks=pytest.mark.exhaustive),
        pytest.param("blocks of 128", marks=pytest.mark.exhaustive),
        pytest.param("two consumers", marks=pytest.mark.exhaustive),
    ],
)
def test_fp8_pools_equal_the_dense_oracle(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    check(dataclasses.replace(CASES[name], dtype=E4M3), seed=2, interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tuning"), in_turns(CASES, [None, Tuning(splits=2, stages=1), PRODUCER], ci=OTHERS)
)
def test_equals_the_dense_oracle_under_every_tuning(
    name: str, tuning: Tuning | None, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = CASES[name]
    check(dataclasses.replace(gpu, tuning=tuning or gpu.tuning), seed=1, interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, E4M3], ids=["bf16", "f16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_oracle_on_the_chip(name: str, dtype: Any) -> None:
    for weights in ("registers", "shared"):
        tuning = dataclasses.replace(CASES[name].tuning, weights=weights)
        gpu = dataclasses.replace(CASES[name], tuning=tuning, dtype=dtype)
        check(gpu, seed=1, interpret=False)


@needs_mosaic_gpu
def test_a_row_without_queries_is_zero_and_changes_no_other() -> None:
    gpu = gpu_case(Tuning(splits=2), page_size=16, queries=2, tail=2)
    rows = draw_rows(np.random.default_rng(0), gpu.case)
    run = jax.jit(
        functools.partial(
            attend_rows, scale=0.1, queries_per_row=2, tuning=gpu.tuning, interpret=True
        )
    )
    with on_cpu():
        q, pool, full = arrays_of(gpu, rows)
        empty = dataclasses.replace(
            full,
            cu_q_lens=jnp.asarray([0, 0, 2], jnp.int32),
            page_table=full.page_table.at[0].set(0, mode="drop"),
            prefix_lens=full.prefix_lens.at[0].set(0, mode="drop"),
        )
        one, two = (np.asarray(run(q, pool, x), np.float32) for x in (full, empty))
    assert not two[:2].any()
    np.testing.assert_array_equal(one[2:], two[2:])


# ---- refusals ------------------------------------------------------------------------------


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "the pool is float32; expected bfloat16 or float16"),
        ({"width": 96}, "head_dim is 96; expected 64 or 128"),
        ({"page_size": 24}, "page_size is 24"),
        ({"page_size": 4}, "page_size is 4"),
        ({"queries": 65}, "65 per row"),
        ({"heads": 7}, "heads or widths do not fit"),
        ({"tuning": Tuning(stages=9)}, "bytes of shared memory"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    queries, width = changes.get("queries", 2), changes.get("width", 128)
    dtype = changes.get("dtype", jnp.bfloat16)
    rows = AttentionMetadata(
        page_table=jnp.zeros((1, 2), jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.asarray([0, queries], jnp.int32),
        q_positions=jnp.zeros(queries, jnp.int32),
    )
    with pytest.raises(ValueError, match=message):
        attend_rows(
            jnp.zeros((queries, changes.get("heads", 4), width), dtype),
            jnp.zeros((2, changes.get("page_size", 16), 4, width), dtype),
            rows,
            scale=changes.get("scale", 1.0),
            queries_per_row=queries,
            tuning=changes.get("tuning"),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 32}, "block_tokens is 32"),
        ({"stages": 0}, "stages 0"),
        ({"splits": 0}, "splits is 0"),
    ],
)
def test_tunings_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning(**changes)


@needs_older_jax
def test_an_older_jax_is_told_so() -> None:
    rows = AttentionMetadata(
        page_table=jnp.zeros((1, 2), jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.asarray([0, 1], jnp.int32),
        q_positions=jnp.zeros(1, jnp.int32),
    )
    pool = jnp.zeros((2, 16, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"needs jax 0\.11 or later"):
        attend_rows(jnp.zeros((1, 4, 64)), pool, rows, scale=1.0, queries_per_row=1)
