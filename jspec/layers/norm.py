"""RMSNorm (Zhang and Sennrich, 2019) and the residual stream. A layer returns its last contribution
without adding it, so that a kernel can fuse the sum with the next norm (`Ops.add_norm`)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from jspec.device.fp8 import FP8Weight
from jspec.device.pytree import pytree
from jspec.device.weights import Weight
from jspec.layers.linear import PartialSum
from jspec.pallas_kernels.add_norm.reference import rms_norm
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.fp8_product.api import Activations
from jspec.pallas_kernels.ops import Ops


@pytree
class Residual:
    """The residual stream as two summands of one shape and dtype."""

    x: jax.Array  # [*b, E]
    # [*b, E], not yet added; None before the first layer
    delta: jax.Array | Mixed | PartialSum | None = None
    selected: jax.Array | None = None  # i32[T, K], by the last indexer (latent_attention/xla.py)

    def sum(self) -> jax.Array:
        if self.delta is None:
            return self.x
        return self.x + (self.delta if isinstance(self.delta, jax.Array) else self.delta.sum())


def norm(
    params: Mapping[str, jax.Array], x: Float[Array, "*b E"], *, eps: float
) -> Float[Array, "*b E"]:
    return rms_norm(x, params["scale"], eps=eps)


def norm_of_sum(
    params: Mapping[str, jax.Array], stream: Residual, *, eps: float, ops: Ops
) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"]]:
    if stream.delta is None:
        return stream.x, norm(params, stream.x, eps=eps)
    if isinstance(stream.delta, PartialSum):
        return stream.delta.add_and_norm(stream.x, params["scale"], eps=eps)
    if isinstance(stream.delta, Mixed):
        return ops.mixed_norm(stream.x, stream.delta, params["scale"], eps=eps)
    return ops.add_norm(stream.x, stream.delta, params["scale"], eps=eps)


def norm_for(
    reader: Weight | None,
    params: Mapping[str, jax.Array],
    stream: Residual,
    *,
    eps: float,
    ops: Ops,
) -> tuple[Float[Array, "*b E"], Activations]:
    """Apply `norm_of_sum`, in the form that the product with the weight `reader` takes."""
    delta = stream.delta
    if isinstance(delta, PartialSum) and isinstance(reader, FP8Weight):
        delta = delta.sum()  # the norm's own kernel also quantizes
    if not isinstance(delta, jax.Array):
        return norm_of_sum(params, stream, eps=eps, ops=ops)
    return ops.add_norm_for(reader, stream.x, delta, params["scale"], eps=eps)
