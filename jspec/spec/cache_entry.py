"""The cache of a layer as data, the only place that knows the layout of its arrays. No jax.

An entry has the model's part of a layout, `CacheLayout` the engine's. On the device it is one
array, or a dict by name (`device.state.empty_caches`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jspec.errors import ConfigError
from jspec.spec.axes import MODEL, Axes, mesh_axis
from jspec.spec.weight_format import Shape, itemsize

FP8 = "float8_e4m3fn"  # a stored dtype whose values are divided by scales (kv_write/reference.py)


class Unit(enum.Enum):
    PAGE = "a record a token, in pages"
    SLOT = "a record a row"
    SNAPSHOT = "a copy of a row's record"


class CacheArray(NamedTuple):
    shape: Shape  # of all shards; the first dimension counts units
    dtype: str
    axes: Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    page_size: int
    dtype: str  # of entries without their own
    shards: int = 1  # of the mesh axis of kv heads
    lanes: int = 1  # records are padded to a multiple of this width
    num_nodes: int = 1  # N, the most tokens of one step
    num_path: int = 1  # M, the most tokens of an accepted path

    def width(self, size: int) -> int:
        return -(-size // self.lanes) * self.lanes


class CacheEntry(Protocol):
    """The cache of one layer. Frozen and hashable, since it keys compiled programs."""

    @property
    def unit(self) -> Unit: ...

    def arrays(self, num_units: int, layout: CacheLayout) -> Mapping[str, CacheArray]:
        """Return the arrays for `num_units` pages or slots, dummies included."""
        ...


@dataclass(frozen=True, slots=True)
class KV:
    """K and V of one token, in one pool [num_pages, page_size, 2G, D] as wide as K
    (kv_write/reference.py): num_heads kv heads (G), of dimensions qk_dim and v_dim."""

    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: str | None = None  # None: the engine's

    def __post_init__(self) -> None:
        check_sizes(num_heads=self.num_heads, qk_dim=self.qk_dim, v_dim=self.v_dim)
        if self.qk_dim < self.v_dim:
            raise ConfigError(
                f"a cache entry's head dims are K {self.qk_dim} and V {self.v_dim}; expected V to "
                "be no wider"
            )

    @property
    def unit(self) -> Unit:
        return Unit.PAGE

    def arrays(self, num_units: int, layout: CacheLayout) -> Mapping[str, CacheArray]:
        heads = kv_heads_per_shard(self.num_heads, layout.shards) * layout.shards
        shape = (num_units, layout.page_size, 2 * heads, layout.width(self.qk_dim))
        dtype = self.dtype or layout.dtype
        return {"kv": CacheArray(shape, dtype, ("units", None, "kv_heads", None))}


@dataclass(frozen=True, slots=True)
class Latent:
    """The latent vector of one token, from which all heads' K and V follow (MLA, DeepSeek-V2).

    A pool is [num_pages, page_size, rank + rope_dim]: the normed latent, then the rotated part of
    K. An indexer has a second one [num_pages, page_size, index_dim]. Every shard has all of both.
    """

    rank: int
    rope_dim: int
    dtype: str | None = None  # of latents; None: the engine's
    index_dim: int = 0  # 0: no indexer

    def __post_init__(self) -> None:
        check_sizes(rank=self.rank, rope_dim=self.rope_dim)

    @property
    def unit(self) -> Unit:
        return Unit.PAGE

    def arrays(self, num_units: int, layout: CacheLayout) -> Mapping[str, CacheArray]:
        def records(size: int, dtype: str) -> CacheArray:
            shape = (num_units, layout.page_size, layout.width(size))
            return CacheArray(shape, dtype, ("units", None, "latent"))

        latent = records(self.rank + self.rope_dim, self.dtype or layout.dtype)
        if not self.index_dim:
            return {"latent": latent}
        return {"latent": latent, "index": records(self.index_dim, layout.dtype)}


class Record(NamedTuple):
    name: str
    shape: Shape
    axes: Axes
    dtype: str | None = None  # None: the engine's


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of one row, and the last step's data to fold into it
    (delta_rule/reference.py).

    `carried` is the state after the tokens folded so far, "pending" f32[slots, N, pending_size] has
    the data of each node of the last step, and "path" i32[slots, M] the accepted nodes, then -1.
    Every shard has the part of its heads.
    """

    carried: tuple[Record, ...]
    pending_size: int

    @property
    def unit(self) -> Unit:
        return Unit.SLOT

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.carried)

    def arrays(self, num_units: int, layout: CacheLayout) -> Mapping[str, CacheArray]:
        pending = (num_units, layout.num_nodes, self.pending_size)
        return {
            **self.snapshot.arrays(num_units, layout),
            "pending": CacheArray(pending, "float32", ("units", None, "heads")),
            "path": CacheArray((num_units, layout.num_path), "int32", ("units", None)),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of rows' recurrent states: a `State`'s `carried`, with nothing pending."""

    carried: tuple[Record, ...]

    @property
    def unit(self) -> Unit:
        return Unit.SNAPSHOT

    def arrays(self, num_units: int, layout: CacheLayout) -> Mapping[str, CacheArray]:
        return {
            name: CacheArray((num_units, *shape), dtype or layout.dtype, ("units", *axes))
            for name, shape, axes, dtype in self.carried
        }


def kv_heads_per_shard(num_kv_heads: int, shards: int) -> int:
    """Return G of one shard; heads are replicated if there are more shards than heads."""
    return max(num_kv_heads // shards, 1)


def axes_of(entry: CacheEntry) -> Mapping[str, Axes]:
    """Return the logical axes of each array, which are the same in every layout."""
    arrays = entry.arrays(1, CacheLayout(page_size=1, dtype="float32"))
    return {name: array.axes for name, array in arrays.items()}


def bytes_per_unit(entry: CacheEntry, layout: CacheLayout) -> int:
    """Return the bytes of a page or a slot in one layer, over all shards; some have it whole."""
    return sum(
        math.prod(x.shape) * itemsize(x.dtype) * (1 if _is_sharded(x.axes) else layout.shards)
        for x in entry.arrays(1, layout).values()
    )


def _is_sharded(axes: Axes) -> bool:
    return MODEL in map(mesh_axis, axes)


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"a cache entry's {name} is {value}; expected at least 1")
