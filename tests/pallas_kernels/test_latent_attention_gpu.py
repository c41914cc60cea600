"""The Hopper kernel of latents against the float64 definition, in GPU interpret mode.

Interpret mode checks for races and fills unwritten memory with NaN; slots that nothing wrote are
NaN as well. It takes no matrix operand from registers, so P is in shared memory there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.latent_attention import gpu
from tests.pallas_kernels.chips import needs_mosaic_gpu
from tests.pallas_kernels.test_attention_gpu import on_cpu

RANK, WIDTH, SCALE = 128, 192, 0.1


def sees_of(rng: np.random.Generator, queries: int, tree: bool) -> np.ndarray:
    """Return bool[queries, queries]: of a random tree, or of a chain."""
    if not tree:
        return np.tril(np.ones((queries, queries), bool))
    sees = np.eye(queries, dtype=bool)
    for node in range(1, queries):
        sees[node] |= sees[rng.integers(node)]
    return sees


def expected_of(q: np.ndarray, records: np.ndarray, sees: np.ndarray) -> np.ndarray:
    """Return f64[R, H, rank] of a row. records: of its prefix and new tokens."""
    scores = SCALE * np.einsum("rhd,kd->rhk", q, records)
    seen = np.pad(sees, ((0, 0), (len(records) - len(sees), 0)), constant_values=True)
    weights = np.where(seen[:, None], np.exp(scores - scores.max()), 0.0)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("rhk,kv->rhv", weights, records[:, :RANK])


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("heads", "queries", "page", "shares", "tree"),
    [
        (5, 14, 16, 2, True),  # two tiles, the second partly filled
        pytest.param(3, 1, 64, 3, False, marks=pytest.mark.slow),
        pytest.param(20, 4, 128, 1, False, marks=pytest.mark.slow),
        pytest.param(4, 16, 64, 1, True, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_equals_the_definition_and_reads_no_poison(
    heads: int,
    queries: int,
    page: int,
    shares: int,
    tree: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The second row has no request, the third few keys; the last of a chain is half padding."""
    rng = np.random.default_rng(0)
    prefix = np.asarray([200, 0, 40, 115])
    lens = np.asarray([queries, 0, queries, queries if tree else -(-queries // 2)])
    batch, pages_per_row = len(prefix), -(-220 // page)

    def drawn(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float64)

    pool = np.full((1 + batch * pages_per_row, page, WIDTH), np.nan)
    table = 1 + rng.permutation(batch * pages_per_row).reshape(batch, -1)
    records = [drawn(prefix[b] + lens[b], WIDTH) for b in range(batch)]
    for b in range(batch):
        for slot in range(prefix[b] + lens[b]):
            pool[table[b, slot // page], slot % page] = records[b][slot]
    q = drawn(batch * queries, heads, WIDTH)
    sees = [sees_of(rng, queries, tree) for _ in range(batch)]
    fields: dict[str, Any] = {}
    positions = prefix[:, None] + np.arange(queries)
    if tree:
        words = np.asarray([(x * (1 << np.arange(queries))).sum(axis=-1) for x in sees])
        fields["tail_mask"] = jnp.asarray(words.reshape(-1, 1), jnp.uint32)
        fields["tail_positions"] = jnp.asarray(positions, jnp.int32)
    rows = AttentionMetadata(
        page_table=jnp.asarray(table, jnp.int32),
        prefix_lens=jnp.asarray(prefix, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lens)), jnp.int32),
        q_positions=jnp.asarray(positions.reshape(-1), jnp.int32),
        **fields,
    )

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, rows: AttentionMetadata) -> jax.Array:
        how: Any = {"queries_per_row": queries, "rank": RANK, "scale": SCALE, "interpret": True}
        return gpu.attend_rows(q, pool, rows, shares=shares, **how)

    with on_cpu():
        given = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16), rows
        found = np.asarray(run(*given).astype(jnp.float32)).reshape(batch, queries, heads, RANK)
    for b in (0, 2, 3):
        of_row = q.reshape(batch, queries, heads, WIDTH)[b, : lens[b]]
        expected = expected_of(of_row, records[b], sees[b][: lens[b], : lens[b]])
        np.testing.assert_allclose(found[b, : lens[b]], expected, rtol=0.02, atol=0.02)
        assert not found[b, lens[b] :].any()
    assert not found[1].any()
    assert "RACE DETECTED" not in capfd.readouterr().out
