"""Rows that start alike: their packing, and equal results when their prefix is read once.

The kernel runs in GPU interpret mode (unwritten memory is NaN), and on a GPU where one is.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.shared_prefixes import UNIT
from jspec.device.batch import SharedPrefixes
from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_plan import pack_queries
from jspec.pallas_kernels.attention.gpu_shared import (
    Packs,
    attend_shared,
    pack_rows,
    rows_a_pack,
    serves,
)
from jspec.pallas_kernels.attention.tuning import Tuning
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu

# Packs.


def shared_of(groups: list[int], lens: list[int]) -> SharedPrefixes:
    """Return shared prefixes. groups[i]: the row whose prefix row i has; lens[g]: units, 0 for
    none."""
    leaders = [groups.index(group) for group in groups]
    keys = [lens[group] * UNIT for group in groups]
    return SharedPrefixes(
        leaders=jnp.asarray(leaders, jnp.int32), num_keys=jnp.asarray(keys, jnp.int32)
    )


packed = jax.jit(pack_rows, static_argnames="capacity")


def arrays_of(packs: Packs) -> SimpleNamespace:
    names = ("rows", "num_keys", "pack_of", "place_of")
    return SimpleNamespace(**{name: np.asarray(getattr(packs, name)) for name in names})


@given(
    groups=st.sampled_from([1, 7, 24]).flatmap(
        lambda size: st.lists(st.integers(0, 4), min_size=size, max_size=size)
    ),
    lens=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    capacity=st.sampled_from([2, 4, 16]),
)
def test_every_row_is_in_one_pack_of_its_own_prefix_or_in_none(
    groups: list[int], lens: list[int], capacity: int
) -> None:
    packs = arrays_of(packed(shared_of(groups, lens), capacity=capacity))
    held: dict[int, set[int]] = {}
    for row, group in enumerate(groups):
        pack, place = packs.pack_of[row], packs.place_of[row]
        if pack < 0:
            continue
        assert lens[group] > 0
        assert packs.rows[pack, place] == row
        assert packs.num_keys[pack] == lens[group] * UNIT
        held.setdefault(int(pack), set()).add(group)
    assert all(len(of_pack) == 1 for of_pack in held.values())
    assert set(np.flatnonzero(packs.num_keys)) == set(held)
    sizes = [sum(g == group for g in groups) for group in range(5) if lens[group]]
    if sum(-(-size // capacity) for size in sizes) <= len(packs.num_keys):
        assert all((packs.pack_of[i] >= 0) == (lens[g] > 0) for i, g in enumerate(groups))
        assert len(held) == sum(-(-size // capacity) for size in sizes)


def test_the_packs_of_the_worked_example() -> None:
    shared = SharedPrefixes(
        leaders=jnp.asarray([0, 0, 2, 0, 3]), num_keys=jnp.asarray([128, 128, 0, 128, 0])
    )
    packs = arrays_of(pack_rows(shared, capacity=2))
    np.testing.assert_array_equal(packs.rows[:2], [[0, 1], [3, 0]])
    np.testing.assert_array_equal(packs.num_keys, [128, 128, 0, 0, 0])
    np.testing.assert_array_equal(packs.pack_of, [0, 0, -1, 1, -1])
    np.testing.assert_array_equal(packs.place_of, [0, 1, 0, 0, 0])


def test_a_tile_holds_rows_as_its_queries_allow() -> None:
    assert rows_a_pack(queries_per_row=4, group=4) == 4
    assert rows_a_pack(queries_per_row=1, group=8) == 8
    assert not serves(queries_per_row=16, group=4)


# The kernel.


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """groups, units: as in `shared_of`. own[b]: keys between the prefix and the call's."""

    groups: tuple[int, ...]
    units: tuple[int, ...]
    own: tuple[int, ...]
    queries: int
    heads: int = 8
    num_kv: int = 2
    page_size: int = 64
    width: int = 64
    tree: bool = False
    sinks: bool = False
    idle: tuple[int, ...] = ()  # rows of no query
    tuning: Tuning | None = None


CASES = {
    "a chain, a full pack and a half one": SharedCase(
        groups=(0, 0, 1, 0, 0, 0), units=(1, 0), own=(3, 70, 20, 64, 1, 0), queries=4
    ),
    "one query, sinks, two prefixes": SharedCase(
        groups=(0, 1, 0, 1, 2), units=(2, 1, 0), own=(5, 130, 64, 0, 9), queries=1, sinks=True,
        tuning=Tuning(splits=2),
    ),
    "a tree in small pages, a half pack, and an idle row": SharedCase(
        groups=(0, 0, 0, 1), units=(1, 0), own=(17, 2, 64, 0), queries=8, heads=4, num_kv=1,
        page_size=16, tree=True, idle=(3,),
    ),
    "wide heads, two consumers": SharedCase(
        groups=(0, 0), units=(3,), own=(40, 0), queries=4, num_kv=2, width=128, page_size=128,
        tuning=Tuning(consumers=2, stages=1),
    ),
}  # fmt: skip
IN_CI = ("one query, sinks, two prefixes", "a tree in small pages, a half pack, and an idle row")


def problem(case: SharedCase) -> tuple[jax.Array, jax.Array, AttentionMetadata, jax.Array | None]:
    """Return q, pool, rows and sinks; unwritten slots are NaN, padding queries 7."""
    rng = np.random.default_rng(len(case.groups) + case.queries)
    batch, size = len(case.groups), case.page_size
    prefix = [case.units[group] * UNIT for group in case.groups]
    committed = [0 if b in case.idle else prefix[b] + own for b, own in enumerate(case.own)]
    per_row = -(-(max(committed) + case.queries) // size)
    order = iter(rng.permutation(batch * per_row + sum(case.units) * UNIT // size) + 1)
    pool = np.full((batch * per_row + sum(case.units) * UNIT // size + 1, size,
                    2 * case.num_kv, case.width), np.nan, np.float32)  # fmt: skip
    table = np.zeros((batch, per_row), np.int32)
    first: dict[int, np.ndarray] = {}
    for b, group in enumerate(case.groups):
        if b in case.idle:
            continue
        length = committed[b] + case.queries
        num_pages, num_shared = -(-length // size), prefix[b] // size
        pages = np.array([next(order) for _ in range(num_pages - num_shared)], np.int32)
        if group not in first:
            first[group] = np.array([next(order) for _ in range(num_shared)], np.int32)
            pool[first[group]] = rng.standard_normal(pool[first[group]].shape)
        table[b, :num_pages] = np.concatenate([first[group], pages])
        for position in range(prefix[b], length):
            at = table[b, position // size], position % size
            pool[at] = rng.standard_normal(pool[at].shape)
    lens = [0 if b in case.idle else case.queries for b in range(batch)]
    positions = np.array(committed)[:, None] + np.arange(case.queries)
    fields: dict[str, Any] = {
        "page_table": table,
        "prefix_lens": np.array(committed, np.int32),
        # Rows of unequal length lie in places of equal length.
        "cu_q_lens": np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        "q_positions": positions.reshape(-1).astype(np.int32),
    }
    if case.tree:
        sees = np.tril(rng.random((batch, case.queries, case.queries)) < 0.5)
        words = ((sees | np.eye(case.queries, dtype=bool)) << np.arange(case.queries)).sum(axis=-1)
        fields["tail_mask"] = words.reshape(-1, 1).astype(np.uint32)
        fields["tail_positions"] = positions.astype(np.int32)
    q = rng.standard_normal((batch, case.queries, case.heads, case.width))
    q[list(case.idle)] = 7
    shared = shared_of(list(case.groups), list(case.units))
    rows = AttentionMetadata(**{k: jnp.asarray(v) for k, v in fields.items()}, shared=shared)
    sinks = jnp.asarray(rng.standard_normal(case.heads), jnp.float32) if case.sinks else None
    flat = q.reshape(-1, case.heads, case.width)
    return jnp.asarray(flat, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16), rows, sinks


def check(case: SharedCase, *, interpret: bool) -> None:
    q, pool, rows, sinks = problem(case)
    settings: dict[str, Any] = {"scale": case.width**-0.5, "sinks": sinks}
    settings["queries_per_row"] = case.queries
    sizes = (len(case.groups), case.num_kv, case.queries)
    found = attend_shared(
        pack_queries(q, *sizes, width=case.width),
        pool,
        rows,
        num_heads=case.heads,
        tuning=case.tuning,
        interpret=interpret,
        **settings,
    )
    wide = [x.astype(jnp.float32) for x in (q, pool)]
    expected = reference.attend(*wide, rows, window=None, **settings)
    live = np.repeat([b not in case.idle for b in range(len(case.groups))], case.queries)
    assert found.shape == q.shape
    assert found.dtype == q.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float32)[live], np.asarray(expected)[live], atol=0.02
    )
    assert np.isfinite(np.asarray(found, np.float32)).all()


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in CASES],
)
def test_a_prefix_read_once_gives_what_each_row_reads(name: str) -> None:
    check(CASES[name], interpret=True)


@needs_hopper
@pytest.mark.parametrize("name", CASES)
def test_a_prefix_read_once_gives_what_each_row_reads_on_a_gpu(name: str) -> None:
    check(CASES[name], interpret=False)


@needs_mosaic_gpu
def test_rows_that_share_nothing_are_refused() -> None:
    case = CASES["a chain, a full pack and a half one"]
    q, pool, rows, _ = problem(case)
    sizes = (len(case.groups), case.num_kv, 16)
    with pytest.raises(ValueError, match="16 queries a row of groups of 4"):
        attend_shared(
            pack_queries(jnp.tile(q, (4, 1, 1)), *sizes, width=case.width),
            pool, rows, num_heads=case.heads, queries_per_row=16, scale=1.0,
        )  # fmt: skip


@pytest.mark.slow
@needs_cuda_compiler
def test_the_kernel_runs_twice_and_no_pool_is_copied_on_an_h200() -> None:
    output = output_of("tests.pallas_kernels.gpu_shared_compile")
    assert output.count(": 2 of rows, 1 merges") == 2
