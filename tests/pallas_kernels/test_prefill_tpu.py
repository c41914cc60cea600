"""The packed prefill kernel against the reference, in TPU interpret mode.

Page 0, pages without an owner, unwritten slots and padding K and V are NaN. Interpret mode cannot
show the strided read of the landed pairs (it takes another view) or any timing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.tpu import attend_packed
from jspec.pallas_kernels.prefill.tuning import BlockSizes
from tests.pallas_kernels.packed_rows import row_lengths

# Interpret mode takes a second an example: a failing one is shown as it is, not made smaller.
_SLOW_EXAMPLES = settings(
    phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
SMALL = BlockSizes(rows=128, keys=128)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled shape."""

    queries: int  # T
    batch: int
    heads: tuple[int, int] = (8, 2)  # H, G
    widths: tuple[int, int, int] = (128, 128, 128)  # D of K and q, V, the pool
    page_size: int = 16
    pages_per_row: int = 20
    dtype: Any = jnp.float32
    window: int | None = None
    sinks: bool = False
    writes: bool = True
    sizes: BlockSizes = SMALL

    @property
    def slots_per_row(self) -> int:
        return self.page_size * self.pages_per_row


@functools.cache
def _programs(case: Case) -> tuple[Any, Any]:
    """Return (kernel, reference), both (q, k, v, pool, rows, sinks) -> (out, pool)."""
    options: dict[str, Any] = {"scale": 0.1, "window": case.window}

    def kernel(q: Any, k: Any, v: Any, pool: Any, rows: AttentionMetadata, sinks: Any) -> Any:
        if not case.writes:
            k = v = None
        interpret = pltpu.InterpretParams()
        return attend_packed(
            q, k, v, pool, rows, sinks=sinks, sizes=case.sizes, interpret=interpret, **options
        )

    def specified(q: Any, k: Any, v: Any, pool: Any, rows: AttentionMetadata, sinks: Any) -> Any:
        if case.writes:
            pool = reference.write_new(k, v, pool, rows, queries_per_row=None)
        out = reference.attend(q, pool, rows, sinks=sinks, queries_per_row=None, **options)
        return out, pool

    return jax.jit(kernel), jax.jit(specified)


def draw(
    case: Case, rng: np.random.Generator, lengths: list[int], prefixes: list[int]
) -> tuple[Any, ...]:
    """Return (q, k, v, pool, rows, sinks) with rows of these lengths and prefixes, poison
    elsewhere."""
    (heads, groups), (k_width, v_width, width) = case.heads, case.widths
    total = sum(lengths)
    assert total <= case.queries
    q = rng.normal(0, 1, (case.queries, heads, k_width))
    k = rng.normal(0, 1, (case.queries, groups, k_width))
    v = rng.normal(0, 1, (case.queries, groups, v_width))
    for padding in (q, k, v):
        padding[total:] = np.nan
    free = iter(rng.permutation(np.arange(1, case.batch * case.pages_per_row + 1)))
    num_pages = case.batch * case.pages_per_row + 1
    pool = np.full((num_pages, case.page_size, 2 * groups, width), np.nan, np.float32)
    table = np.zeros((case.batch, case.pages_per_row), np.int32)
    positions = np.zeros(case.queries, np.int32)
    start = 0
    for b, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        assert prefix + length <= case.slots_per_row
        for p in range(-(-(prefix + length) // case.page_size)):
            table[b, p] = next(free)
        for slot in range(prefix if case.writes else prefix + length):
            page, offset = table[b, slot // case.page_size], slot % case.page_size
            pool[page, offset] = rng.normal(0, 1, (2 * groups, width))
        # A constant shift: positions are the window's, and need not be slots.
        positions[start : start + length] = prefix + np.arange(length) + b % 2
        start += length
    rows = AttentionMetadata(
        page_table=jnp.asarray(table),
        prefix_lens=jnp.asarray(prefixes, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32),
        q_positions=jnp.asarray(positions),
    )
    sinks = jnp.asarray(rng.normal(0, 2, heads), jnp.float32) if case.sinks else None
    arrays = [jnp.asarray(x, case.dtype) for x in (q, k, v, pool)]
    return (*arrays, rows, sinks)


def check(case: Case, rng: np.random.Generator, lengths: list[int], prefixes: list[int]) -> None:
    kernel, specified = _programs(case)
    drawn = draw(case, rng, lengths, prefixes)
    out, pool = kernel(*drawn)
    expected, written = specified(*drawn)
    tolerance = 2e-5 if case.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(out, np.float32),
        np.asarray(expected, np.float32),
        rtol=tolerance,
        atol=tolerance,
    )
    pools = [np.asarray(x, np.float32)[1:] for x in (pool, written)]
    np.testing.assert_array_equal(*pools)


def test_an_overflow_in_one_prompt_changes_no_other() -> None:
    case = FAST["page 128, narrow K and V, one kv head, sinks"]
    kernel, _ = _programs(case)
    q, k, v, pool, rows, sinks = draw(case, np.random.default_rng(0), [9, 7], [100, 30])
    expected, _ = kernel(q, k, v, pool, rows, sinks)
    k, v = k.at[4].set(jnp.nan), v.at[5, 0].set(jnp.inf)  # of the first prompt
    out, after = kernel(q, k, v, pool, rows, sinks)
    others = [0, 1, 2, 3, *range(9, 16)]
    np.testing.assert_array_equal(np.asarray(out)[others], np.asarray(expected)[others])
    assert np.isfinite(out).all()
    assert np.isfinite(after[rows.page_table[0, 0], 100:109]).all()


def draw_lengths(rng: np.random.Generator, case: Case) -> tuple[list[int], list[int]]:
    cuts = np.sort(rng.integers(0, case.queries + 1, case.batch))
    lengths = [int(n) for n in np.diff(np.append(0, cuts))]
    prefixes = [int(rng.integers(0, case.slots_per_row - n + 1)) for n in lengths]
    return lengths, prefixes


PACKED = Case(queries=80, batch=5)  # 3 blocks of 32 queries
FAST = {
    "bf16, window, sinks, page 32": Case(
        queries=40,
        batch=3,
        dtype=jnp.bfloat16,
        page_size=32,
        pages_per_row=10,
        window=150,
        sinks=True,
    ),
    "page 128, narrow K and V, one kv head, sinks": Case(
        queries=16,
        batch=2,
        heads=(8, 1),
        widths=(64, 48, 128),
        page_size=128,
        pages_per_row=3,
        sinks=True,
    ),
    "nothing written, page 64, every head its own, window": Case(
        queries=128, batch=3, heads=(2, 2), page_size=64, pages_per_row=6, writes=False, window=90
    ),
}
SLOW = {
    "page 16, bf16": Case(queries=80, batch=5, dtype=jnp.bfloat16),
    "page 64, bf16, group 8, one kv head": Case(
        queries=48,
        batch=4,
        heads=(8, 1),
        page_size=64,
        pages_per_row=5,
        dtype=jnp.bfloat16,
        sizes=BlockSizes(rows=256, keys=128),
    ),
    "sizes of a real model": Case(
        queries=300, batch=4, pages_per_row=40, dtype=jnp.bfloat16, sizes=BlockSizes()
    ),
    "two tiles, two widths, window, sinks": Case(
        queries=200,
        batch=3,
        heads=(8, 1),
        window=90,
        sinks=True,
        sizes=BlockSizes(rows=1024, keys=256),
    ),
    "four kv heads in turn, group 7": Case(
        queries=140, batch=2, heads=(28, 4), pages_per_row=10, sizes=BlockSizes()
    ),
    "window within a page": Case(queries=70, batch=3, window=5, dtype=jnp.bfloat16),
    "nothing written, bf16": Case(queries=70, batch=3, writes=False, dtype=jnp.bfloat16),
    "256 wide": Case(queries=40, batch=2, widths=(256, 256, 256), dtype=jnp.bfloat16),
    "pages of 1": Case(queries=40, batch=2, page_size=1, pages_per_row=150),
    "pages larger than a block of keys": Case(
        queries=40, batch=2, page_size=256, pages_per_row=2, dtype=jnp.bfloat16
    ),
}


@pytest.mark.slow
@settings(_SLOW_EXAMPLES, max_examples=6)
@given(drawn=row_lengths(batch=5, queries=80, slots=PACKED.slots_per_row), seed=st.integers(0, 99))
def test_any_rows_equal_the_reference(drawn: tuple[list[int], list[int]], seed: int) -> None:
    check(PACKED, np.random.default_rng(seed), *drawn)


@pytest.mark.slow_cases("bf16")
@pytest.mark.parametrize("name", FAST)
def test_every_feature_equals_the_reference(name: str) -> None:
    rng = np.random.default_rng(len(name))
    case = FAST[name]
    check(case, rng, *draw_lengths(rng, case))
    # One long row alone: whole blocks of keys that every query sees, or that a window cuts.
    others = [0] * (case.batch - 1)
    longest = case.slots_per_row - case.queries
    check(case, rng, [case.queries, *others], [longest, *others])


# Of these each setting is in another case.
@pytest.mark.exhaustive_cases(
    *("page 16, bf16", "page 64, bf16", "sizes of a real model", "window within a page"),
    "nothing written, bf16",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_shape_equals_the_reference(name: str) -> None:
    rng = np.random.default_rng(len(name))
    check(SLOW[name], rng, *draw_lengths(rng, SLOW[name]))


def test_no_queries_at_all_write_nothing() -> None:
    rng = np.random.default_rng(0)
    kernel, _ = _programs(PACKED)
    drawn = draw(PACKED, rng, [0] * 5, [0, 40, 0, 7, 320])
    out, pool = kernel(*drawn)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(pool, drawn[3])


def test_rows_past_the_page_table_write_to_no_page() -> None:
    """A write outside the reservation must not reach another row's page, nor be seen."""
    kernel, specified = _programs(PACKED)
    slots = PACKED.slots_per_row
    drawn = list(draw(PACKED, np.random.default_rng(0), [20, 3, 5, 2, 1], [slots - 20, 0, 3, 1, 9]))
    rows = drawn[4]
    drawn[4] = AttentionMetadata(
        page_table=rows.page_table,
        prefix_lens=rows.prefix_lens.at[0].set(slots - 4),  # 16 of its 20 tokens have no slot
        cu_q_lens=rows.cu_q_lens,
        q_positions=rows.q_positions,
    )
    drawn[3] = jnp.nan_to_num(drawn[3], nan=0.5)
    for got, expected in zip(kernel(*drawn), specified(*drawn), strict=True):
        if got.ndim == 4:  # the reference uses page 0 as a dummy, the kernel writes nothing
            got, expected = got[1:], expected[1:]
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "3 query heads over 2 kv heads"),
        ({"pool": (9, 16, 4, 64)}, "q is 64 wide, the pool 64"),
        ({"q_width": 256}, "q is 256 wide, the pool 128"),
        ({"dtype": jnp.float16}, "the pool holds float16"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"pool": (9, 48, 4, 128)}, "pages of 48"),
        ({"sizes": BlockSizes(rows=100)}, "rows=100"),
        ({"table": (64, 4096)}, r"a page table of \(64, 4096\)"),
    ],
)
def test_shapes_that_the_kernel_cannot_take_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    batch, pages = changes.get("table", (2, 4))
    pool = jnp.zeros(changes.get("pool", (9, 16, 4, 128)), changes.get("dtype", jnp.float32))
    q = jnp.zeros((8, changes.get("heads", 4), changes.get("q_width", 64)))
    rows = AttentionMetadata(
        page_table=jnp.zeros((batch, pages), jnp.int32),
        prefix_lens=jnp.zeros(batch, jnp.int32),
        cu_q_lens=jnp.zeros(batch + 1, jnp.int32),
        q_positions=jnp.zeros(8, jnp.int32),
    )
    with pytest.raises(ValueError, match=message):
        attend_packed(
            q,
            None,
            None,
            pool,
            rows,
            scale=changes.get("scale", 1.0),
            window=None,
            sinks=None,
            sizes=changes.get("sizes"),
        )
