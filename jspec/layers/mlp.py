"""The gated MLP of Llama (SwiGLU, Shazeer 2020), with gate and up in one product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.layers.linear import Shard, linear
from jspec.pallas_kernels.fp8_product.api import Activations
from jspec.pallas_kernels.gated_mlp.reference import gated
from jspec.pallas_kernels.ops import Ops


def gated_mlp(
    params: dict[str, Any],
    x: Activations,
    *,
    shard: Shard,
    ops: Ops,
    of_prompts: bool = False,
    limit: float | None = None,
    gelu: bool = False,
) -> Float[Array, "*b E"]:
    """Return down(silu(gate(x)) * up(x)). gate_up has, per shard, gate columns, then up columns.
    limit: clip silu(gate) from above, and up to [-limit, limit]. gelu: instead of SiLU."""
    own = params["gate_up"]
    if gelu:
        gate, up = jnp.split(linear(own, x, ops=ops), 2, axis=-1)
        inner = jax.nn.gelu(gate, approximate=True) * up
    elif "bias" in own or "adapters" in own or limit is not None:
        inner = gated(*jnp.split(linear(own, x, ops=ops), 2, axis=-1), limit=limit)
    else:
        inner = ops.gated_product(x, own["kernel"], of_prompts=of_prompts)
    return linear(params["down"], inner, ops=ops, reduce=shard)
