"""Paged attention against a dense oracle in float64, with NaN in all that must not be read.

The oracle uses rows as plain lists of keys, without pages. Pages that no row owns, slots after the
written rows, padding queries' K and V, and the dummy page 0 are all NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.kv_write.api import KVScales

ATTEND = {name: jax.jit(OPS[name].attend, static_argnames="call") for name in ("reference", "xla")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled shape. queries: R with rows of equal length, else T of a packed call."""

    page_size: int
    batch: int
    queries: int
    packed: bool = False
    tail: int | None = None  # W
    heads: tuple[int, int] = (4, 2)  # H, G
    widths: tuple[int, int, int] = (8, 8, 8)  # D of K, V and the pool
    longest: int = 40  # of the prefixes
    options: dict[str, Any] = field(default_factory=dict)  # window
    sinks: bool = False
    writes: bool = True
    shares_pages: bool = False

    @property
    def num_queries(self) -> int:
        return self.queries if self.packed else self.batch * self.queries

    @property
    def pages_per_row(self) -> int:
        return -(-(self.longest + self.queries) // self.page_size) + 1


CASES = {
    "packed, page 4, several blocks": Case(
        page_size=4, batch=2, queries=9, packed=True, longest=600
    ),
    "packed, page 64, shared prefix": Case(
        page_size=64, batch=3, queries=10, packed=True, longest=300, shares_pages=True
    ),
    "packed, window and sinks": Case(
        page_size=16, batch=2, queries=11, packed=True, sinks=True, options={"window": 5}
    ),
    "packed, narrow K and V": Case(page_size=4, batch=2, queries=8, packed=True, widths=(6, 4, 8)),
    "rows, page 16, several blocks": Case(page_size=16, batch=4, queries=4, longest=530),
    "rows, one query, multi-query": Case(page_size=1, batch=2, queries=1, heads=(4, 1)),
    "rows, window, every head its own": Case(
        page_size=4, batch=2, queries=3, heads=(2, 2), longest=300, options={"window": 7}
    ),
    "tree": Case(page_size=4, batch=3, queries=6, tail=6),
    "tree, page 64, several blocks": Case(page_size=64, batch=2, queries=8, tail=8, longest=540),
    "tree, two words": Case(page_size=16, batch=1, queries=40, tail=40),
    "tree, all but the last rows older": Case(page_size=1, batch=2, queries=4, tail=12),
    "tree, window, sinks": Case(
        page_size=16,
        batch=2,
        queries=7,
        tail=7,
        sinks=True,
        options={"window": 6},
    ),
    "nothing written": Case(page_size=4, batch=2, queries=3, writes=False),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence as the oracle uses it."""

    prefix: np.ndarray  # f64[prefix, G, 2, D], K and V of the rows before this call
    new: np.ndarray  # f64[rows, G, 2, D]
    q: np.ndarray  # f64[rows, H, Dk]
    q_positions: np.ndarray  # i64[rows]
    tail_mask: np.ndarray | None  # bool[rows, W]
    tail_positions: np.ndarray | None  # i64[W]
    tail_start: int  # its first slot
    pages: list[int]


def draw_row(rng: np.random.Generator, case: Case, *, num_rows: int, prefix: int) -> Row:
    heads, groups = case.heads
    k_width, v_width, width = case.widths

    def draw_kv(count: int) -> np.ndarray:
        kv = rng.normal(0, 1.5, (count, groups, 2, width)).astype(np.float32).astype(np.float64)
        kv[:, :, 0, k_width:] = 0
        kv[:, :, 1, v_width:] = 0
        return kv

    q = rng.normal(0, 1.5, (num_rows, heads, k_width)).astype(np.float32)
    positions = prefix + np.arange(num_rows)
    mask = tail_positions = None
    if case.tail is not None:
        mask = rng.random((num_rows, case.tail)) < 0.4
        own = case.tail - case.queries + np.arange(num_rows)
        mask[np.arange(num_rows), own] = True
        mask[:, case.tail - case.queries + num_rows :] = False  # unwritten slots
        start = prefix + case.queries - case.tail
        tail_positions = start + np.sort(rng.integers(0, case.tail, case.tail))
        positions = tail_positions[own]
    return Row(
        prefix=draw_kv(prefix),
        new=draw_kv(num_rows),
        q=q.astype(np.float64),
        q_positions=positions,
        tail_mask=mask,
        tail_positions=tail_positions,
        tail_start=0 if case.tail is None else prefix + case.queries - case.tail,
        pages=[],
    )


def attend_densely(
    row: Row, *, scale: float, sinks: np.ndarray | None, window: int | None
) -> np.ndarray:
    """Return f64[rows, H, D]: query by query, head by head, over the keys that it sees."""
    keys = np.concatenate((row.prefix, row.new))
    num_prefix, num_rows = len(row.prefix), len(row.q)
    heads, groups, width = row.q.shape[1], keys.shape[1], keys.shape[3]
    out = np.zeros((num_rows, heads, width))
    for j in range(num_rows):
        seen = []
        for slot in range(len(keys)):
            position, sees = slot, slot <= num_prefix + j
            if row.tail_mask is not None and row.tail_positions is not None:
                w = slot - row.tail_start
                sees = w < 0 or bool(row.tail_mask[j, w])
                position = slot if w < 0 else int(row.tail_positions[w])
            if window is not None and row.q_positions[j] - position >= window:
                sees = False
            if sees:
                seen.append(slot)
        for h in range(heads):
            kv = keys[seen, h // (heads // groups)]
            scores = kv[:, 0, : row.q.shape[2]] @ row.q[j, h] * scale
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[h])))
            out[j, h] = weights @ kv[:, 1] / total
    return out


def row_lengths(rng: np.random.Generator, case: Case) -> list[int]:
    """Draw the queries of each row: unequal, with padding after them where it is allowed."""
    if case.tail is not None:
        return [case.queries] * case.batch
    if not case.packed:
        return [int(n) for n in rng.integers(1, case.queries + 1, case.batch)]
    cuts = np.sort(rng.integers(0, case.queries - 1, case.batch))
    return [int(n) for n in np.diff(np.append(0, cuts))]


def draw_rows(rng: np.random.Generator, case: Case) -> list[Row]:
    """Draw rows with separate pages, except for a shared prefix page; no row owns page 0."""
    lengths = row_lengths(rng, case)
    least = 0 if case.tail is None else case.tail - case.queries
    prefixes = [int(n) for n in rng.integers(least, case.longest + 1, case.batch)]
    prefixes[0] = case.longest
    if case.shares_pages:
        prefixes = [max(n, case.page_size) for n in prefixes]
    elif case.batch > 1:
        prefixes[1] = least
    if not case.writes:
        # Queries over written slots: the last rows of the prefix are their own.
        prefixes = [max(n, 1) for n in prefixes]
    free = list(rng.permutation(np.arange(1, case.batch * case.pages_per_row + 3)))
    rows: list[Row] = []
    for num_rows, prefix in zip(lengths, prefixes, strict=True):
        row = draw_row(rng, case, num_rows=num_rows, prefix=prefix)
        used = -(-(prefix + num_rows) // case.page_size)
        row.pages.extend(int(free.pop()) for _ in range(used))
        if case.shares_pages and rows:
            row.pages[0] = rows[0].pages[0]
            row.prefix[: case.page_size] = rows[0].prefix[: case.page_size]
        rows.append(row)
    return rows


def pool_of(case: Case, rows: list[Row], *, with_new: bool) -> np.ndarray:
    """Return an f32 pool, NaN wherever no row has written."""
    _, groups = case.heads
    num_pages = case.batch * case.pages_per_row + 3
    pool = np.full((num_pages, case.page_size, groups, 2, case.widths[2]), np.nan, np.float32)
    for row in rows:
        keys = np.concatenate((row.prefix, row.new)) if with_new else row.prefix
        for slot, kv in enumerate(keys):
            pool[row.pages[slot // case.page_size], slot % case.page_size] = kv
    return pool.reshape(num_pages, case.page_size, 2 * groups, -1)


def words_of(mask: np.ndarray) -> np.ndarray:
    """Pack bool[rows, W] into u32[rows, ceil(W / 32)]."""
    words = np.zeros((len(mask), -(-mask.shape[1] // 32)), np.uint32)
    for j, w in zip(*np.nonzero(mask), strict=True):
        words[j, w // 32] |= np.uint32(1 << (w % 32))
    return words


def query_places(case: Case, rows: list[Row]) -> list[np.ndarray]:
    """Return indices in [0, T) of each row's queries."""
    lengths = [len(row.q) for row in rows]
    starts = np.append(0, np.cumsum(lengths))
    if not case.packed:
        starts = np.arange(case.batch) * case.queries
    return [start + np.arange(n) for start, n in zip(starts, lengths, strict=False)]


def call(
    case: Case,
    rows: list[Row],
    *,
    ops: str,
    sinks: np.ndarray | None,
    pool: np.ndarray | None = None,
    scales: KVScales | None = None,
) -> Any:
    """Run one bundle; padding is NaN (K, V) or 7 (q). pool: another than f32."""
    (heads, groups), (k_width, v_width, _) = case.heads, case.widths
    q = np.full((case.num_queries, heads, k_width), 7, np.float32)
    k = np.full((case.num_queries, groups, k_width), np.nan, np.float32)
    v = np.full((case.num_queries, groups, v_width), np.nan, np.float32)
    positions = np.zeros(case.num_queries, np.int32)
    table = np.zeros((case.batch, case.pages_per_row), np.int32)
    mask = tail_positions = None
    if case.tail is not None:
        mask = np.zeros((case.num_queries, -(-case.tail // 32)), np.uint32)
        tail_positions = np.zeros((case.batch, case.tail), np.int32)
    for b, (row, places) in enumerate(zip(rows, query_places(case, rows), strict=True)):
        q[places], positions[places] = row.q, row.q_positions
        k[places], v[places] = row.new[:, :, 0, :k_width], row.new[:, :, 1, :v_width]
        table[b, : len(row.pages)] = row.pages
        if row.tail_mask is not None and mask is not None:
            mask[places] = words_of(row.tail_mask)
        if row.tail_positions is not None and tail_positions is not None:
            tail_positions[b] = row.tail_positions
    lengths = [len(row.q) for row in rows]
    prefixes = [len(row.prefix) for row in rows]
    new = (jnp.asarray(k), jnp.asarray(v)) if case.writes else (None, None)
    queries_per_row = None if case.packed else case.queries
    return ATTEND[ops](
        jnp.asarray(q),
        *new,
        jnp.asarray(pool_of(case, rows, with_new=not case.writes) if pool is None else pool),
        AttentionMetadata(
            page_table=jnp.asarray(table),
            prefix_lens=jnp.asarray(prefixes, jnp.int32),
            cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32),
            q_positions=jnp.asarray(positions),
            tail_mask=None if mask is None else jnp.asarray(mask),
            tail_positions=None if tail_positions is None else jnp.asarray(tail_positions),
        ),
        AttentionCall(queries_per_row=queries_per_row, scale=0.3, **case.options),
        None if sinks is None else jnp.asarray(sinks),
        scales,
    )


@pytest.mark.parametrize("ops", ATTEND)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_oracle_and_reads_no_poison(name: str, ops: str) -> None:
    case = CASES[name]
    for seed in range(4):
        rng = np.random.default_rng([seed, len(name)])
        rows = draw_rows(rng, case)
        sinks = rng.normal(0, 1, case.heads[0]).astype(np.float32) if case.sinks else None
        out, pool = call(case, rows, ops=ops, sinks=sinks)
        options = {"window": None, **case.options}
        for row, places in zip(rows, query_places(case, rows), strict=True):
            expected = attend_densely(row, scale=0.3, sinks=sinks, **options)
            np.testing.assert_allclose(np.asarray(out)[places], expected, rtol=2e-5, atol=2e-5)
        # Only page 0 and the slots of the new rows have changed.
        np.testing.assert_array_equal(np.asarray(pool)[1:], pool_of(case, rows, with_new=True)[1:])


@pytest.mark.parametrize("ops", ATTEND)
def test_rows_without_queries_and_padding_rows_change_nothing(ops: str) -> None:
    """A padding row of a batch has no pages and no length, and its output is not read."""
    case = CASES["tree"]
    rng = np.random.default_rng(0)
    rows = draw_rows(rng, case)
    padding = Row(
        prefix=rows[2].prefix[:0],
        new=np.full_like(rows[2].new, np.nan),
        q=rows[2].q,
        q_positions=rows[2].q_positions,
        tail_mask=rows[2].tail_mask,
        tail_positions=rows[2].tail_positions,
        tail_start=rows[2].tail_start,
        pages=[0, 0],
    )
    out, pool = call(case, rows, ops=ops, sinks=None)
    padded_out, padded_pool = call(case, [rows[0], padding, rows[1]], ops=ops, sinks=None)
    r = case.queries
    np.testing.assert_array_equal(padded_out[:r], out[:r])
    np.testing.assert_array_equal(padded_out[2 * r :], out[r : 2 * r])
    owned = rows[0].pages + rows[1].pages
    np.testing.assert_array_equal(np.asarray(padded_pool)[owned], np.asarray(pool)[owned])


FOUR_EACH = AttentionCall(queries_per_row=4, scale=1.0)


def test_rows_past_the_page_table_go_to_the_dummy_page() -> None:
    """A write outside the reservation must not reach another row's page."""
    pool = np.zeros((8, 4, 4, 8), np.float32)
    ones = jnp.ones((8, 2, 8))
    rows = AttentionMetadata(
        page_table=jnp.asarray([[3], [5]], jnp.int32),
        prefix_lens=jnp.asarray([2, 4], jnp.int32),  # row 0 has 2 slots left, row 1 none
        cu_q_lens=jnp.asarray([0, 4, 8], jnp.int32),
        q_positions=jnp.zeros(8, jnp.int32),
    )
    queries = jnp.ones((8, 4, 8))
    _, after = ATTEND["xla"](queries, ones, ones, jnp.asarray(pool), rows, FOUR_EACH)
    pages, offsets = np.nonzero(np.asarray(after)[1:, :, 0, 0])
    assert [pages.tolist(), offsets.tolist()] == [[2, 2], [2, 3]]  # page 3, its last two slots


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (8, 3, 8)}, "3 query heads over 2 kv heads"),
        ({"q": (8, 4, 9)}, "q is 9 wide, the pool 8"),
        ({"q": (7, 4, 8)}, "7 queries; expected 2 rows of 4"),
        ({"tail_mask": (8, 1)}, "tail_mask and tail_positions come together"),
        ({"tail_mask": (8, 1), "tail_positions": (2, 33)}, r"tail_mask is \(8, 1\)"),
    ],
)
def test_contradictory_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    tail_mask = jnp.zeros(changes["tail_mask"], jnp.uint32) if "tail_mask" in changes else None
    positions = (
        jnp.zeros(changes["tail_positions"], jnp.int32) if "tail_positions" in changes else None
    )
    q = jnp.zeros(changes.get("q", (8, 4, 8)))
    rows = AttentionMetadata(
        page_table=jnp.zeros((2, 2), jnp.int32),
        prefix_lens=jnp.zeros(2, jnp.int32),
        cu_q_lens=jnp.asarray([0, 4, 8], jnp.int32),
        q_positions=jnp.zeros(q.shape[0], jnp.int32),
        tail_mask=tail_mask,
        tail_positions=positions,
    )
    for ops in OPS.values():
        with pytest.raises(ValueError, match=message):
            ops.attend(q, None, None, jnp.zeros((4, 4, 4, 8)), rows, FOUR_EACH)
