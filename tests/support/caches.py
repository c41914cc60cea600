"""Caches of the declared groups, as an engine allocates them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jspec.device.state import Caches, empty_caches
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import CacheLayout
from jspec.spec.cache_groups import CacheGroup


def empty_pools(
    groups: tuple[CacheGroup, ...],
    *,
    num_pages: int,
    page_size: int,
    shards: int,
    dtype: Any,
    ops: Ops,
    num_nodes: int = 1,
) -> Caches:
    """Zeroed pools of num_pages pages or slots, the dummy included."""
    layout = CacheLayout(
        page_size=page_size,
        dtype=jnp.dtype(dtype).name,
        shards=shards,
        lanes=ops.lanes,
        num_nodes=num_nodes,
        num_path=num_nodes,
    )
    return empty_caches(groups, layout=layout, num_units=lambda _: num_pages)


def accept_chain(caches: Caches, slots: jnp.ndarray, count: int, *, ops: Ops) -> Caches:
    """Accept all `count` tokens that the last step ran for one row; pages have them already."""
    path, last = jnp.arange(count, dtype=jnp.int32)[None], jnp.asarray([count - 1], jnp.int32)
    return tuple(
        ops.commit_state(cache, slots, path, last)
        if isinstance(cache, dict) and "path" in cache
        else cache
        for cache in caches
    )
