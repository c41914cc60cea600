"""Products with LoRA adapters: each token has its own adapter, or none.

One product with A [in, parts * width] computes all adapters, and each token keeps the columns of
its own. The others become exact zeros, so a token's sum does not depend on other adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.device.pytree import pytree
from jspec.spec.lora_spec import LoRASpec

# Products that run after `attend`, on the kept tokens alone.
AFTER_ATTEND = frozenset({"gate", "out"})


@pytree
class Adapters:
    """The adapters of one product, and the columns that each of its tokens uses."""

    a: jax.Array  # [I, parts * width]
    b: tuple[jax.Array, ...]  # [width, O] of each part
    chosen: jax.Array  # bool[T, width]

    def product(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        low = jnp.split(x @ self.a, len(self.b), axis=-1)
        parts = [
            jnp.where(self.chosen, own, jnp.zeros((), own.dtype)) @ b
            for own, b in zip(low, self.b, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def chosen_columns(slots: Int[Array, "T"], lora: LoRASpec) -> Bool[Array, "T width"]:
    """Return the columns of each token's adapter; slot 0 has none."""
    owner = 1 + jnp.arange(lora.width, dtype=jnp.int32) // lora.rank
    return slots[:, None] == owner


def with_adapters(
    params: Mapping[str, Any],
    stacked: Mapping[str, Any],
    chosen: Bool[Array, "T width"],
    kept: Int[Array, "R"] | None,
) -> dict[str, Any]:
    """Return a layer's params with the adapters of each adapted product, for `linear`. stacked: by
    the layer's own paths. kept: as in `run_layer`."""
    after = chosen if kept is None else jnp.take(chosen, kept, axis=0, mode="clip")

    def bound(own: Any, weights: Mapping[str, Any], of_product: jax.Array) -> dict[str, Any]:
        if "a" not in weights:
            inner = {name: bound(own[name], each, of_product) for name, each in weights.items()}
            return {**own, **inner}
        b = tuple(weights["b"].values())
        return {**own, "adapters": Adapters(a=weights["a"], b=b, chosen=of_product)}

    attention = {
        name: bound(params["attention"][name], each, after if name in AFTER_ATTEND else chosen)
        for name, each in stacked.get("attention", {}).items()
    }
    others = {part: own for part, own in stacked.items() if part != "attention"}
    return {
        **bound(params, others, after),
        "attention": {**params["attention"], **attention},
    }
