"""Draft trees for tests, written with parents."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.device.batch import DraftTree


def tree_of(tokens: list[list[int]], parents: list[list[int]]) -> DraftTree:
    depths = np.zeros((len(parents), len(parents[0])), np.int32)
    for b, row in enumerate(parents):
        for i, parent in enumerate(row[1:], start=1):
            depths[b, i] = depths[b, parent] + 1
    return DraftTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        depths=jnp.asarray(depths),
    )


@st.composite
def shallow_parents(draw: st.DrawFn, *, nodes: int, levels: int) -> list[int]:
    """Draw the parents of a tree at most `levels` deep."""
    parents, depths = [-1], [0]
    for i in range(1, nodes):
        parent = draw(st.sampled_from([j for j in range(i) if depths[j] < levels]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents
