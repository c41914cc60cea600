"""Matrix products, and the one collective that tensor parallelism needs.

Inside a step's shard_map a row-parallel product ends in an all-reduce over the model's axes
(`spec/axes.py`); without axes there is no shard_map. GPUs with `Peers` sum the residual stream of a
small step in a kernel, which may leave the sum to the next norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jspec.device.peers import Area, Peers
from jspec.device.pytree import pytree
from jspec.device.weights import Weight
from jspec.pallas_kernels.fp8_product.api import Activations, values_of
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.peer_sum.gpu import (
    gather_over_peers,
    sum_add_and_norm,
    sum_over_peers,
)
from jspec.spec.axes import MeshAxis

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """The number of shards of a model, and the mesh axes over which it is sharded.

    peers: of a layer (`of_layer`), or of a gather (`sharing`). defers: `reduce` leaves the sum to
    the next norm.
    """

    size: int = 1
    axis: MeshAxis | None = None
    peers: Peers | None = None
    defers: bool = False

    def of_layer(self, params: Mapping[str, Any], *, defers: bool = False) -> Shard:
        """Return the shard for a layer's sums. params: the layer's, from `with_peers`."""
        peers = params.get("peers")
        return self if peers is None else replace(self, peers=peers, defers=defers)

    @property
    def alone(self) -> Shard:
        return Shard(self.size, self.axis)

    def exchanges(self, num_words: int, area: Area) -> bool:
        """Return whether the peers can exchange num_words words per shard in an area."""
        return self.peers is not None and num_words <= self.peers.of(area).most_words

    def sum(self, x: jax.Array) -> jax.Array:
        if self.axis is None:
            return x
        if self.peers is not None and self.peers.serve(x):
            return sum_over_peers(x, self.peers)
        return jax.lax.psum(x, self.axis)

    def reduce(self, x: jax.Array) -> jax.Array | PartialSum:
        if self.defers and self.peers is not None and self.peers.serve(x):
            return PartialSum(x=x, peers=self.peers)
        return self.sum(x)


@pytree
class PartialSum:
    """This device's summand of a row-parallel product."""

    x: jax.Array  # [T, E]
    peers: Peers

    def sum(self) -> jax.Array:
        return sum_over_peers(self.x, self.peers)

    def add_and_norm(
        self, x: Float[Array, "T E"], scale: Float[Array, "E"], *, eps: float
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
        """Return (y, RMSNorm(y) * scale) for y = x + the sum."""
        return sum_add_and_norm(x, self.x, scale, self.peers, eps=eps)


def with_peers(params: Mapping[str, Any], peers: Peers | None) -> Mapping[str, Any]:
    """Return a step's params, {"target": ..., "draft": ...}, with `peers` added to every layer."""
    if peers is None:
        return params
    areas = {"target": Area.TARGET, "draft": Area.DRAFT}
    return {name: _in_layers(part, peers.of(areas[name])) for name, part in params.items()}


def _in_layers(params: Any, peers: Peers) -> Any:
    """Skip adapters: their layers are their own, and `paged_layer` joins them to these."""
    if not isinstance(params, Mapping):
        return params
    return {
        name: {i: {**layer, "peers": peers} for i, layer in part.items()}
        if name == "layers"
        else (part if name == "lora" else _in_layers(part, peers))
        for name, part in params.items()
    }


def sharing(part: T, peers: Peers | None) -> T:
    """Return a part of a step with `peers` set in the shards of its nested dataclasses."""
    if peers is None or isinstance(part, type) or not is_dataclass(part):
        return part
    if isinstance(part, Shard):
        return replace(part, peers=peers) if part.axis is not None else part
    own = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    new = {name: sharing(value, peers) for name, value in own.items()}
    changed = {name: value for name, value in new.items() if value is not own[name]}
    whole: Any = part
    return cast(T, replace(whole, **changed)) if changed else part


def gathered(shard: Shard, *arrays: jax.Array, area: Area = Area.CHOICE) -> tuple[jax.Array, ...]:
    """Return all shards' arrays of 32 bits and one shape, each [shards, ...], by one all-gather."""
    if shard.axis is None or shard.size == 1:
        return tuple(x[None] for x in arrays)
    words = jnp.stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays])
    if shard.peers is not None and shard.exchanges(words.size, area):
        flat = gather_over_peers(words.reshape(-1), shard.peers.of(area))
        found = flat.reshape(shard.size, *words.shape).swapaxes(0, 1)
    else:
        found = jax.lax.all_gather(words, shard.axis, axis=1)
    return tuple(
        jax.lax.bitcast_convert_type(part, x.dtype) for part, x in zip(found, arrays, strict=True)
    )


def linear(
    params: Mapping[str, Weight],
    x: Activations,
    *,
    ops: Ops,
    reduce: Shard | None = None,
) -> Any:  # an array, or a PartialSum if `reduce` defers
    """Return x @ kernel (+ bias, adapters), summed over shards (row-parallel) with `reduce`."""
    kernel = params["kernel"]
    if reduce is not None and "adapters" not in params and ops.sums_halves(kernel, reduce.size):
        halves = jnp.split(kernel, 2, axis=1)
        y = jnp.concatenate([reduce.sum(values_of(x) @ half) for half in halves], axis=-1)
        return y + params["bias"] if "bias" in params else y
    y = ops.product(x, kernel, axis=None if reduce is None else reduce.axis)
    if "adapters" in params:
        y = y + params["adapters"].product(values_of(x))
    if "bias" in params:
        return (y if reduce is None else reduce.sum(y)) + params["bias"]
    return y if reduce is None else reduce.reduce(y)


def logits_of(hidden: Float[Array, "*b E"], kernel: Float[Array, "E V"]) -> Float[Array, "*b V"]:
    """Return hidden @ kernel in float32, so that sampling never sees rounded logits."""
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


def all_columns(shard: Shard, x: Float[Array, "*b o"]) -> Float[Array, "*b O"]:
    """Return all columns of a column-parallel product, of which each shard has some, row-major.
    Peers exchange pairs of values in the draft's area."""
    if shard.axis is None:
        return x
    is_paired = x.dtype == jnp.bfloat16 and x.shape[-1] % 2 == 0
    if is_paired and shard.exchanges(x.size // 2, Area.DRAFT):
        pairs = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int32)
        (found,) = gathered(shard, pairs, area=Area.DRAFT)
        columns = jax.lax.bitcast_convert_type(found, x.dtype).reshape(shard.size, *x.shape)
        return jnp.moveaxis(columns, 0, -2).reshape(*x.shape[:-1], -1)
    whole = jax.lax.all_gather(x, shard.axis, axis=x.ndim - 1, tiled=True)
    return with_layout_constraint(whole, Layout(major_to_minor=tuple(range(x.ndim))))
