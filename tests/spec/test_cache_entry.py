"""The layout of each cache entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jspec.errors import ConfigError
from jspec.spec.cache_entry import (
    KV,
    CacheLayout,
    Latent,
    Record,
    State,
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
    assert axes_of(entry) == {"kv": ("units", None, "kv_heads", None)}
    assert entry.unit is Unit.PAGE
    assert bytes_per_unit(entry, layout) == 16 * 8 * 128 * 2


def test_a_latent_is_one_record_that_every_shard_holds() -> None:
    layout = CacheLayout(page_size=16, dtype="bfloat16", shards=4, lanes=128)
    entry = Latent(rank=512, rope_dim=64)
    (pool,) = entry.arrays(5, layout).values()
    assert pool.shape == (5, 16, 640)
    assert axes_of(entry) == {"latent": ("units", None, "latent")}
    assert bytes_per_unit(entry, layout) == 4 * 16 * 640 * 2


def test_a_state_has_a_record_a_row_and_one_for_each_node() -> None:
    entry = State(
        carried=(Record("state", (4, 2), ("heads", None), "float32"),),
        pending_size=6,
    )
    layout = CacheLayout(page_size=16, dtype="bfloat16", shards=2, num_nodes=7, num_path=3)
    shapes = {name: (x.shape, x.dtype) for name, x in entry.arrays(9, layout).items()}
    assert shapes == {
        "state": ((9, 4, 2), "float32"),
        "pending": ((9, 7, 6), "float32"),
        "path": ((9, 3), "int32"),
    }
    (snapshot,) = entry.snapshot.arrays(9, layout).items()
    assert snapshot == ("state", entry.arrays(9, layout)["state"])
    assert entry.snapshot.unit is Unit.SNAPSHOT
    assert axes_of(entry)["pending"] == ("units", None, "heads")
    assert entry.unit is Unit.SLOT
    assert bytes_per_unit(entry, layout) == 8 * 4 + 7 * 6 * 4 + 2 * 3 * 4


@pytest.mark.parametrize("make", [lambda: KV(0, 1, 1), lambda: Latent(0, 1), lambda: Latent(1, 0)])
def test_impossible_sizes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"a cache entry.s \w+ is 0; expected at least 1"):
        make()
