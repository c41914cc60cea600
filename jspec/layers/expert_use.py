"""The tokens of each expert in a step: their counts, and the choice among an expert's copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from jspec.config.expert_placement import LayerMap
from jspec.device.pytree import pytree

COPIES = "expert_copies"  # key in a target's params: by layer, `copies_of` its map


@pytree
class MoETokens:
    """Facts about the tokens of an MoE, apart from their hidden states."""

    is_real: jax.Array | None  # bool[T], False for padding; None: experts' tokens are not counted
    keys: jax.Array  # i32[T], >= 0, functions of a token's text alone: they select copies
    copies: jax.Array | None = None  # i32[X, 1 + C] of `copies_of`; None: there is no map

    def kept(self, kept: Int[Array, "R"] | None) -> MoETokens:
        """Return the entries of the kept tokens. kept ascends; padding repeats the last one."""
        if kept is None:
            return self
        is_real = self.is_real
        if is_real is not None:
            is_new = jnp.concatenate((jnp.ones((1,), bool), kept[1:] != kept[:-1]))
            is_real = jnp.take(is_real, kept, mode="clip") & is_new
        keys = jnp.take(self.keys, kept, mode="clip")
        return MoETokens(is_real=is_real, keys=keys, copies=self.copies)


class ExpertUse:
    """Counts of one layer; after its single call (while tracing), `counts` is set."""

    def __init__(self, tokens: MoETokens) -> None:
        self.counts: jax.Array | None = None  # u32[X], tokens of each expert
        self._tokens = tokens

    def physical(self, ids: Int[Array, "T k"], num_experts: int) -> Int[Array, "T k"]:
        """Count each expert's tokens, and return the physical experts that run them. The copy of a
        replicated expert depends on the token's key alone, not on the batch."""
        tokens = self._tokens
        if tokens.is_real is not None:
            self.counts = expert_counts(ids, tokens.is_real, num_experts)
        if tokens.copies is None:
            return ids
        found = jnp.take(tokens.copies, ids, axis=0, mode="clip")
        which = 1 + tokens.keys[:, None] % found[..., 0]
        return jnp.take_along_axis(found, which[..., None], axis=-1, mode="clip")[..., 0]


class ExpertCounter:
    """Counts of a whole forward pass, collected layer by layer while it is traced."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._layers: list[jax.Array | None] = []

    @classmethod
    def of(cls, counts: UInt32[Array, "1 L X"] | None) -> ExpertCounter | None:
        return None if counts is None else cls(counts.shape[-1])

    def add(self, layer: UInt32[Array, "X"] | None) -> None:
        """Add the counts of the next layer; None if it has no experts."""
        self._layers.append(layer)

    def counts(self) -> UInt32[Array, "L X"]:
        none = jnp.zeros((self._num_experts,), jnp.uint32)
        return jnp.stack([none if counts is None else counts for counts in self._layers])


def counted(
    counts: UInt32[Array, "1 L X"] | None, counter: ExpertCounter | None
) -> UInt32[Array, "1 L X"] | None:
    """Add a forward pass to a data rank's counts."""
    return counts if counts is None or counter is None else counts + counter.counts()


def expert_counts(
    ids: Int[Array, "T k"], is_real: Bool[Array, "T"], num_experts: int
) -> UInt32[Array, "X"]:
    """Return the number of real tokens of each expert.

    In:  ids [[2 0] [0 1] [0 1]], is_real [1 1 0], 3 experts
    Out: [2 1 1]
    """
    each = jnp.arange(num_experts, dtype=ids.dtype)
    is_given = jnp.any(ids[:, :, None] == each, axis=1) & is_real[:, None]
    return jnp.sum(is_given, axis=0, dtype=jnp.uint32)


def copies_of(placed: LayerMap, num_experts: int) -> np.ndarray:
    """Return for each expert the number of its copies and their places, padded with 0.

    In:  [0 2 1 2], which has 1 spare for 3 experts
    Out: i32 [[1 0 0] [1 2 0] [2 1 3]]
    """
    out = np.zeros((num_experts, 2 + len(placed) - num_experts), np.int32)
    for place, expert in enumerate(placed):
        out[expert, 0] += 1
        out[expert, out[expert, 0]] = place
    return out


def with_use(params: Mapping[str, Any], use: ExpertUse | None) -> dict[str, Any]:
    """Return a layer's params with `use` added to its MoE, if it has one."""
    if use is None or "moe" not in params:
        return dict(params)
    return {**params, "moe": {**params["moe"], "use": use}}
