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
) -> Caches:
    """Zeroed pools of num_pages pages, the dummy included."""
    layout = CacheLayout(
        page_size=page_size, dtype=jnp.dtype(dtype).name, shards=shards, lanes=ops.lanes
    )
    return empty_caches(groups, layout=layout, num_units=lambda _: num_pages)
