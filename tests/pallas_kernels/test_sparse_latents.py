"""Sparse attention over latents (latent_attention/xla.py) against its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.latent_attention import xla as sparse
from jspec.pallas_kernels.latent_attention.xla import Index
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.tree import pack_bits

HEADS, RANK, ROPE, INDEX_HEADS, INDEX_DIM, SLOTS = 2, 6, 2, 3, 4, 48
PARENTS = (-1, 0, 0, 1, 2, 3, 4, 1)  # a tree whose siblings lie between a node and its parent


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows with a prefix and new tokens, as they lie in one call."""

    page_size: int
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    queries_per_row: int | None = None
    parents: tuple[int, ...] | None = None
    top_k: int = 5

    @property
    def num_queries(self) -> int:
        per_row = self.queries_per_row
        return 24 if per_row is None else per_row * len(self.q_lens)

    def places(self) -> list[tuple[int, int, int]]:
        """Return (query, row, index in its row) of each real query."""
        starts = np.cumsum((0, *self.q_lens))
        if self.queries_per_row is not None:
            starts = np.arange(len(self.q_lens)) * self.queries_per_row
        return [
            (int(starts[row]) + i, row, i) for row, n in enumerate(self.q_lens) for i in range(n)
        ]

    def seen(self, row: int, within: int) -> list[int]:
        prefix = list(range(self.prefix_lens[row]))
        if self.parents is None:
            return [*prefix, *range(len(prefix), len(prefix) + within + 1)]
        path, node = [], within
        while node >= 0:
            path.append(len(prefix) + node)
            node = self.parents[node]
        return prefix + path[::-1]


def ancestors_of(parents: tuple[int, ...]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def rows_of(case: Case) -> AttentionMetadata:
    batch, pages = len(case.q_lens), SLOTS // case.page_size
    table = np.random.default_rng(1).permutation(batch * pages).reshape(batch, pages) + 1
    tail: dict[str, Any] = {}
    if case.parents is not None:
        mask = np.broadcast_to(ancestors_of(case.parents), (batch, *(len(case.parents),) * 2))
        words = np.asarray(pack_bits(jnp.asarray(mask)))
        tail["tail_mask"] = jnp.asarray(words.reshape(batch * len(case.parents), -1))
        tail["tail_positions"] = jnp.zeros((batch, len(case.parents)), jnp.int32)
    return AttentionMetadata(
        page_table=jnp.asarray(table, jnp.int32),
        prefix_lens=jnp.asarray(case.prefix_lens, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum((0, *case.q_lens)), jnp.int32),
        q_positions=jnp.zeros(case.num_queries, jnp.int32),
        **tail,
    )


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """float64: q [T, H, D]; records [B, C, D]; index queries, weights; keys [B, C, Di]."""

    q: np.ndarray
    records: np.ndarray
    queries: np.ndarray
    weights: np.ndarray
    keys: np.ndarray


def arrays_of(case: Case, *, whole: bool) -> Arrays:
    """Draw values; whole: small integers in the index, so that many scores are equal."""
    rng, T, B = np.random.default_rng(case.num_queries), case.num_queries, len(case.q_lens)

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(np.float64)

    def index(*shape: int) -> np.ndarray:
        return rng.integers(-1, 2, shape).astype(np.float64) if whole else drawn(*shape)

    return Arrays(
        q=drawn(T, HEADS, RANK + ROPE),
        records=drawn(B, SLOTS, RANK + ROPE),
        queries=index(T, INDEX_HEADS, INDEX_DIM),
        weights=index(T, INDEX_HEADS),
        keys=index(B, SLOTS, INDEX_DIM),
    )


def expected(case: Case, given: Arrays) -> tuple[dict[int, set[int]], dict[int, np.ndarray]]:
    """Return the selected slots, and the outputs, of each real query, by definition."""
    slots, outputs = {}, {}
    for query, row, within in case.places():
        seen = np.asarray(case.seen(row, within))
        heights = np.maximum(given.keys[row, seen] @ given.queries[query].T, 0)
        order = np.argsort(-(heights @ given.weights[query]), kind="stable")[: case.top_k]
        chosen = np.sort(seen[order])
        records = given.records[row, chosen]
        scores = given.q[query] @ records.T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        slots[query] = set(chosen.tolist())
        outputs[query] = weights @ records / weights.sum(-1, keepdims=True)
    return slots, outputs


def run(case: Case, given: Arrays) -> tuple[np.ndarray | None, np.ndarray]:
    """Return (selected slots, outputs) of a call whose pools have NaN where nothing is written."""
    rows, ops = rows_of(case), Ops()
    call = AttentionCall(queries_per_row=case.queries_per_row, scale=1.0)
    table = np.asarray(rows.page_table)

    def pool(values: np.ndarray) -> jax.Array:
        stored = np.full((1 + table.size, case.page_size, values.shape[-1]), np.nan, np.float32)
        for row, length in enumerate(case.prefix_lens):
            for slot in range(length):
                page = table[row, slot // case.page_size]
                stored[page, slot % case.page_size] = values[row, slot]
        return jnp.asarray(stored)

    def new(values: np.ndarray) -> jax.Array:
        found = np.zeros((case.num_queries, values.shape[-1]), np.float32)
        for query, row, within in case.places():
            found[query] = values[row, case.prefix_lens[row] + within]
        return jnp.asarray(found)

    def both(given: tuple[jax.Array, ...]) -> tuple[jax.Array | None, jax.Array]:
        index = Index(queries=given[0], weights=given[1], keys=given[2])
        selected, _ = ops.select_latents(index, given[3], rows, call, top_k=case.top_k)
        out, _ = ops.attend_selected(given[4], given[5], selected, given[6], rows, call, rank=RANK)
        return selected, out

    arrays = (
        *(jnp.asarray(x, jnp.float32) for x in (given.queries, given.weights)),
        *(new(given.keys), pool(given.keys), jnp.asarray(given.q, jnp.float32)),
        *(new(given.records), pool(given.records)),
    )
    with jax.default_matmul_precision("highest"):
        selected, out = jax.jit(both)(arrays)
    return None if selected is None else np.asarray(selected), np.asarray(out)


CHUNKS = Case(page_size=4, prefix_lens=(9, 0, 30), q_lens=(7, 12, 3))
CHAINS = Case(page_size=8, prefix_lens=(17, 0, 40), q_lens=(4, 4, 4), queries_per_row=4)
TREES = Case(
    page_size=16, prefix_lens=(11, 2, 33), q_lens=(8, 8, 8), queries_per_row=8, parents=PARENTS
)
CASES = {"chunks": CHUNKS, "chains": CHAINS, "trees": TREES}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a case has several blocks of queries and of keys."""
    monkeypatch.setattr(sparse, "BLOCK_QUERIES", 10)
    monkeypatch.setattr(sparse, "BLOCK_KEYS", 16)


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "ties"])
@pytest.mark.parametrize("name", CASES)
def test_the_best_tokens_are_attended(name: str, whole: bool) -> None:
    case = CASES[name]
    given = arrays_of(case, whole=whole)
    selected, out = run(case, given)
    assert selected is not None
    slots, outputs = expected(case, given)
    for query, found in slots.items():
        assert set(selected[query].tolist()) - {-1} == found, query
        np.testing.assert_allclose(out[query], outputs[query], rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", CASES)
def test_few_tokens_are_attended_to_densely_to_the_bit(name: str) -> None:
    """44: all tokens of the call; 48: all that a row can have, so that nothing is selected."""
    some, every = (replace(CASES[name], top_k=top_k) for top_k in (44, SLOTS))
    given = arrays_of(some, whole=False)
    (selected, out), (nothing, dense) = run(some, given), run(every, given)
    assert selected is not None
    assert nothing is None
    np.testing.assert_array_equal(out, dense)
    for query, value in expected(some, given)[1].items():
        np.testing.assert_allclose(out[query], value, rtol=1e-5, atol=1e-5)
