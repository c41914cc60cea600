"""Token embedding, replicated over shards."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embed(params: Mapping[str, jax.Array], token_ids: Int[Array, "*b"]) -> Float[Array, "*b E"]:
    """Return the embeddings of ids in [0, V); callers map padding to 0."""
    return jnp.take(params["table"], token_ids, axis=0, mode="clip")
