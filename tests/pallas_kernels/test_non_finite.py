"""NaN and infinities in K and V: they reach no query that does not see their row, and no pool.

The dense oracle multiplies only the keys that a query sees. So poison is put into rows that some
queries see and others do not, and every query whose oracle is finite must equal it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.kv_write.reference import LARGE, finite, pool_rows
from tests.pallas_kernels.test_attention import (
    CASES,
    Case,
    Row,
    attend_densely,
    call,
    draw_rows,
    pool_of,
    query_places,
)

# A window hides rows of the prefix, too.
MASKS = {
    "packed, window": CASES["packed, window and sinks"],
    "chain": CASES["nothing written"],
    "tree, window": CASES["tree, window, sinks"],
}
POISON = (np.nan, np.inf, -np.inf)


def check_queries_that_see_no_poison(case: Case, rows: list[Row], out: Any) -> bool:
    """Return True if a poisoned row had such a query, so that a mask kept the poison out."""
    options = {"window": None, **case.options}
    hidden_by_a_mask = False
    for row, places in zip(rows, query_places(case, rows), strict=True):
        expected = attend_densely(all_nan_where_poisoned(row), scale=0.3, sinks=None, **options)
        unseen = np.isfinite(expected).all(axis=(1, 2))
        found = np.asarray(out)[places][unseen]
        np.testing.assert_allclose(found, expected[unseen], rtol=2e-5, atol=2e-5)
        is_poisoned = not all(np.isfinite(kv).all() for kv in (row.prefix, row.new))
        hidden_by_a_mask |= is_poisoned and bool(unseen.any())
    return hidden_by_a_mask


def all_nan_where_poisoned(row: Row) -> Row:
    """Make whole rows NaN, so that the oracle of a query is NaN exactly if it sees the row."""

    def spread(kv: np.ndarray) -> np.ndarray:
        is_poisoned = ~np.isfinite(kv).all(axis=(1, 2, 3), keepdims=True)
        return np.where(is_poisoned, np.nan, kv)

    return replace(row, prefix=spread(row.prefix), new=spread(row.new))


def poison(rng: np.random.Generator, kv: np.ndarray, slots: Any) -> None:
    """Poison one number of each, in K or in V."""
    for slot in slots:
        head, which = rng.integers(kv.shape[1]), rng.integers(2)
        kv[slot, head, which, rng.integers(4)] = rng.choice(POISON)


def poison_some_new_rows(rng: np.random.Generator, rows: list[Row]) -> None:
    """Poison about a third of them, never a row's first."""
    for row in rows:
        poison(rng, row.new, [slot for slot in range(1, len(row.new)) if rng.random() < 0.3])


@pytest.mark.parametrize("name", MASKS)
def test_poison_in_a_pool_reaches_nobody_who_does_not_see_it(name: str) -> None:
    """Only in the reference: all others rely on writes of finite values only."""
    case = replace(MASKS[name], writes=False, sinks=False)
    hidden = []
    for seed in range(3):
        rng = np.random.default_rng([seed, len(name)])
        rows = draw_rows(rng, case)
        if "window" in name:  # what no window reaches
            poison(rng, rows[0].prefix, range(case.longest - 20))
        poison_some_new_rows(rng, rows)
        out, _ = call(case, rows, ops="reference", sinks=None)
        hidden.append(check_queries_that_see_no_poison(case, rows, out))
    assert any(hidden)


@pytest.mark.parametrize("ops", ["reference", "xla"])
@pytest.mark.parametrize("name", ["packed, page 4, several blocks", "tree"])
def test_poison_in_new_rows_enters_no_pool(name: str, ops: str) -> None:
    case = CASES[name]
    for seed in range(3):
        rng = np.random.default_rng([seed, len(name)])
        rows = draw_rows(rng, case)
        poison_some_new_rows(rng, rows)
        out, pool = call(case, rows, ops=ops, sinks=None)
        check_queries_that_see_no_poison(case, rows, out)
        given = pool_of(case, rows, with_new=True)
        written = np.zeros(given.shape[:2], bool)  # page, offset
        for row in rows:
            for slot in range(len(row.prefix) + len(row.new)):
                page, offset = divmod(slot, case.page_size)
                written[row.pages[page], offset] = True
        np.testing.assert_array_equal(np.asarray(pool)[written], as_finite(given[written]))
        for places in query_places(case, rows):  # and who sees such a row reads numbers
            assert np.isfinite(np.asarray(out)[places]).all()


def as_finite(x: np.ndarray) -> np.ndarray:
    return np.nan_to_num(x, nan=0.0, posinf=LARGE, neginf=-LARGE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_finite_keeps_every_bit_of_what_is_finite(dtype: Any) -> None:
    """All 65536 numbers of 16 bits, and as many of 32; replacements keep the sign."""
    words = np.arange(1 << 16, dtype=np.uint16)
    if dtype == jnp.float32:
        words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
        odd = np.asarray([np.inf, -np.inf, np.nan, -0.0, 1e-42, 3.4e38], np.float32)
        words[: len(odd)] = odd.view(np.uint32)
    x = jax.lax.bitcast_convert_type(jnp.asarray(words), dtype)
    found = jax.jit(finite)(x)
    wide = np.asarray(x).astype(np.float32)
    is_finite = np.isfinite(wide)
    bits = np.asarray(jax.lax.bitcast_convert_type(found, words.dtype))
    np.testing.assert_array_equal(bits[is_finite], words[is_finite])
    stand_ins = np.asarray(found).astype(np.float32)[~is_finite]
    large = float(jnp.asarray(LARGE, dtype))
    np.testing.assert_array_equal(stand_ins, np.nan_to_num(np.sign(wide[~is_finite])) * large)
    assert len(stand_ins) > 100


def test_a_number_too_large_for_the_pool_is_its_largest() -> None:
    k = jnp.asarray([[[1e6, -1e6, 2.0]]])
    rows = jax.jit(partial(pool_rows, width=4, dtype=jnp.float16))(k, k)
    assert rows.dtype == jnp.float16
    assert rows[0, 0].tolist() == [65504.0, -65504.0, 2.0, 0.0]
