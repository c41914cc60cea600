"""Random weights generated on the devices, without files or host memory, for measurements."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jspec.device import hosts
from jspec.device.int8 import LARGEST
from jspec.device.mxfp4 import MXFP4Weight
from jspec.device.noise import mix32
from jspec.device.parallel import Parallel
from jspec.device.weights import W8A8Weight, Weight
from jspec.models.files.stored.tensors import value_at
from jspec.models.params import Init, ParamSpec
from jspec.models.placement import Tables, abstract_params, nested, place_of

# Small enough that a deep model's residual stream stays well inside bfloat16's range.
STD = 0.02
CODES_STD = 40.0  # of codes, whose largest is 448 in fp8 and 127 in int8
SMALL_SCALES = 4 * b"\x78"  # 2 ** (120 - 127): random mxfp4 bits then have a deviation of 0.023


def dummy_params(
    tables: Tables, *, mesh: Mesh, vocab_size: int, dtype: DTypeLike, column_major: bool = False
) -> dict[str, Any]:
    """Return arrays for {"target": table, "draft": table}, the same for any number of devices.

    Matrices and embeddings are normal with a standard deviation of 0.02, norms are 1, biases 0;
    draft_ids ascend evenly over the target's vocabulary.
    """
    shards = Parallel.of(mesh).model
    abstract = {
        model: abstract_params(table, dtype=dtype, shards=shards) for model, table in tables.items()
    }
    maker = _Maker(vocab_size)
    made = {
        model: nested(
            (
                spec.path,
                maker.make(
                    spec,
                    value_at(abstract[model], spec.path),
                    place_of(mesh, spec, column_major=column_major),
                    name=jax.tree_util.keystr(
                        tuple(jax.tree_util.DictKey(key) for key in (model, *spec.path))
                    ),
                ),
            )
            for spec in table
        )
        for model, table in tables.items()
    }
    return jax.block_until_ready(made)


class _Maker:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._programs: dict[Any, Any] = {}

    def make(
        self,
        spec: ParamSpec,
        like: Weight,
        place: Any,
        *,
        name: str,
    ) -> Weight:
        if isinstance(like, W8A8Weight):
            name = f"{name}['codes']"
            entries = spec.entries
            codes = self._drawn(hashed_codes, like.codes, place.codes, name=name, entries=entries)
            scales = jnp.full(like.scales.shape, STD / CODES_STD, device=place.scales)
            return replace(like, codes=codes, scales=scales)
        if isinstance(like, MXFP4Weight):
            name = f"{name}['codes']"
            codes = self._drawn(hashed_bits, like.codes, place, name=name, entries=spec.entries)
            small = jnp.full(
                like.scales.shape, int.from_bytes(SMALL_SCALES), like.scales.dtype, device=place
            )
            return replace(like, codes=codes, scales=small)
        if spec.init is Init.IDS:
            # Strictly ascending, since U <= V; the product needs 64 bits.
            ids = np.arange(like.shape[0], dtype=np.int64) * self._vocab_size // like.shape[0]
            return hosts.put(ids.astype(np.int32), place)
        if spec.init in (Init.ONES, Init.ZEROS):
            value = 1.0 if spec.init is Init.ONES else 0.0
            return jnp.full(like.shape, value, like.dtype, device=place)
        return self._drawn(hashed_normal, like, place, name=name, entries=spec.entries)

    def _drawn(
        self,
        draw_of: Callable[..., jax.Array],
        like: Any,
        place: NamedSharding | Format,
        *,
        name: str,
        entries: tuple[int, ...] | None = None,
    ) -> jax.Array:
        key = (like.shape, like.dtype, place, entries)
        if key not in self._programs:
            draw = partial(draw_of, shape=like.shape, dtype=like.dtype, entries=entries)
            self._programs[key] = jax.jit(draw, out_shardings=place)
        made: jax.Array = self._programs[key](np.uint32(zlib.crc32(name.encode())))
        return made


Entries = tuple[int, ...] | None  # index along the first axis for which each entry is drawn


def hashed_normal(
    seed: jax.Array, *, shape: tuple[int, ...], dtype: Any, entries: Entries = None
) -> jax.Array:
    """Return N(0, STD) from a hash of (seed, row, column); jax.random would keep 32-bit arrays."""
    bits = hashed_bits(seed, shape=shape, dtype=jnp.uint32, entries=entries)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)  # in (0, 1)
    drawn = jnp.sqrt(jnp.float32(2.0)) * jax.lax.erf_inv(2.0 * uniform - 1.0)
    return (STD * drawn).astype(dtype)


def hashed_codes(
    seed: jax.Array, *, shape: tuple[int, ...], dtype: Any, entries: Entries = None
) -> jax.Array:
    drawn = hashed_normal(seed, shape=shape, dtype=jnp.float32, entries=entries)
    codes = drawn * jnp.float32(CODES_STD / STD)
    if dtype == jnp.int8:
        codes = jnp.clip(jnp.round(codes), -LARGEST, LARGEST)
    return codes.astype(dtype)


def hashed_bits(
    seed: jax.Array, *, shape: tuple[int, ...], dtype: Any, entries: Entries = None
) -> jax.Array:
    rows = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    for axis in range(len(shape) - 2):  # leading axes count as more rows
        stack = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if entries is not None and not axis:
            stack = jnp.asarray(entries, jnp.uint32)[stack]
        rows = rows + stack * jnp.uint32(shape[axis + 1])
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return mix32(columns + mix32(mix32(rows + seed) ^ seed)).astype(dtype)
