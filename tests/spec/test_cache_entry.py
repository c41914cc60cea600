"""The layout of each cache entry."""

from __future__ import annotations

import pytest

from jspec.spec.cache_entry import (
    KV,
    CacheLayout,
    Unit,
    axes_of,
    bytes_per_unit,
    kv_heads_per_shard,
)


@pytest.mark.parametrize(("heads", "shards", "each"), [(8, 1, 8), (8, 4, 2), (2, 2, 1), (2, 8, 1)])
def test_kv_heads_are_replicated_beyond_their_number(heads: int, shards: int, each: int) -> None:
    assert kv_heads_per_shard(heads, shards) == each


def test_k_and_v_share_a_pool_of_whole_lanes() -> None:
    entry = KV(num_heads=2, qk_dim=96, v_dim=64)
    layout = CacheLayout(page_size=16, dtype="bfloat16", shards=4, lanes=128)
    (pool,) = entry.arrays(5, layout).values()
    assert (pool.shape, pool.dtype) == ((5, 16, 8, 128), "bfloat16")
    assert axes_of(entry) == {"kv": (None, None, "kv_heads", None)}
    assert entry.unit is Unit.PAGE
    assert bytes_per_unit(entry, layout) == 16 * 8 * 128 * 2
