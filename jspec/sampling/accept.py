"""The acceptance rule: a draft is accepted iff it equals the target's own choice. That choice
depends only on the noise of its position, so the text does not depend on the drafts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.device.batch import DraftTree


def accept_tree(
    tree: DraftTree,
    target_ids: Int[Array, "B N"],
    *,
    num_levels: int,
    may_accept: Bool[Array, "B"] | None = None,
) -> tuple[Int[Array, "B M"], Int[Array, "B"]]:
    """Return (node_path[B, S + 1], num_accepted[B]); node_path is 0 after num_accepted.

    In:  tokens [t7 a1 b1 a2], parents [-1 0 0 1], target_ids [a1 a2 x y]
    Out: node_path [0 1 3], num_accepted 2
    """
    current = jnp.zeros(tree.tokens.shape[:1], jnp.int32)
    alive = jnp.ones_like(current, bool) if may_accept is None else may_accept
    path = [current]
    num_accepted = jnp.zeros_like(current)
    for _ in range(num_levels):
        wanted = jnp.take_along_axis(target_ids, current[:, None], axis=1, mode="clip")
        matches = (tree.parents == current[:, None]) & (tree.tokens == wanted)
        alive = alive & jnp.any(matches, axis=1)
        child = jnp.argmax(matches, axis=1).astype(jnp.int32)
        current = jnp.where(alive, child, current)
        num_accepted = num_accepted + alive
        path.append(jnp.where(alive, child, 0))
    return jnp.stack(path, axis=1), num_accepted
