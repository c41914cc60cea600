"""Random weights made where they live: no file is read, and nothing passes through the host.

For measurements: the shapes are a real model's, the text means nothing. It knows no model, only
shapes and the names of their last path parts.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding

from jspec.core import sharding
from jspec.core.noise import mix32

# Small enough that the residual stream of a deep model stays far inside bfloat16's range.
STD = 0.02


def dummy_params(
    abstract: dict[str, Any], *, mesh: Mesh, vocab_size: int, by_columns: bool = False
) -> dict[str, Any]:
    """Arrays for `abstract` ({"target": ..., "draft": ...} of shapes), sharded as the rules say.

    Matrices and tables are normal with a standard deviation of 0.02, norms are 1, biases 0;
    draft_ids ascend evenly over the target's vocabulary. The same shapes give the same weights,
    whatever the number of devices. by_columns: as sharding.param_places takes it.
    """
    places = sharding.param_places(mesh, abstract, by_columns=by_columns)
    maker = _Maker(vocab_size)
    made: dict[str, Any] = jax.tree_util.tree_map_with_path(maker.make, abstract, places)
    return jax.block_until_ready(made)


class _Maker:
    """Makes one array after the other; keeps one compiled program a shape and sharding."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._programs: dict[Any, Any] = {}

    def make(
        self, path: tuple[Any, ...], like: jax.ShapeDtypeStruct, place: NamedSharding | Format
    ) -> jax.Array:
        """The array at `path`, which alone decides its seed."""
        name = jax.tree_util.keystr(path)
        if name.endswith("['draft_ids']"):
            # Strictly ascending, since U <= V; the product needs 64 bits.
            ids = np.arange(like.shape[0], dtype=np.int64) * self._vocab_size // like.shape[0]
            return jax.device_put(ids.astype(np.int32), place)
        if len(like.shape) == 1:
            value = 0.0 if name.endswith("['bias']") else 1.0
            return jnp.full(like.shape, value, like.dtype, device=place)
        key = (like.shape, like.dtype, place)
        if key not in self._programs:
            draw = partial(hashed_normal, shape=like.shape, dtype=like.dtype)
            self._programs[key] = jax.jit(draw, out_shardings=place)
        made: jax.Array = self._programs[key](np.uint32(zlib.crc32(name.encode())))
        return made


def hashed_normal(seed: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """N(0, STD) by a hash of (seed, row, column): elementwise, so nothing larger is ever stored.

    jax.random would do, but keeps its bits in 32-bit arrays beside the result on some backends.
    """
    rows = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    bits = mix32(columns + mix32(mix32(rows + seed) ^ seed))
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)  # in (0, 1)
    drawn = jnp.sqrt(jnp.float32(2.0)) * jax.lax.erf_inv(2.0 * uniform - 1.0)
    return (STD * drawn).astype(dtype)
