"""Which experts the tokens of a step use: the counts of an engine that records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jspec.device.pytree import pytree


@pytree
class MoETokens:
    """The tokens of an MoE, apart from their hidden states."""

    is_real: jax.Array  # bool[T], False for padding

    def kept(self, kept: Int[Array, "R"] | None) -> MoETokens:
        """Return those of the kept tokens. kept: ascends; padding repeats a token before it."""
        if kept is None:
            return self
        is_new = jnp.concatenate((jnp.ones((1,), bool), kept[1:] != kept[:-1]))
        return MoETokens(is_real=jnp.take(self.is_real, kept, mode="clip") & is_new)


class ExpertUse:
    """Counts of one layer; after its single call (while tracing), `counts` is set."""

    def __init__(self, tokens: MoETokens) -> None:
        self.counts: jax.Array | None = None  # u32[X], tokens of each expert
        self._tokens = tokens

    def count(self, ids: Int[Array, "T k"], num_experts: int) -> None:
        self.counts = expert_counts(ids, self._tokens.is_real, num_experts)


class ExpertCounter:
    """Counts of a whole forward pass, layer by layer, while it is traced."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._layers: list[jax.Array | None] = []

    @classmethod
    def of(cls, counts: UInt32[Array, "1 L X"] | None) -> ExpertCounter | None:
        """Return a counter for a rank's counts so far; None for an engine without counts."""
        return None if counts is None else cls(counts.shape[-1])

    def add(self, layer: UInt32[Array, "X"] | None) -> None:
        """Add the counts of the next layer; None: it has no experts."""
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
    """Return how many real tokens each expert is given.

    In:  ids [[2 0] [0 1] [0 1]], is_real [1 1 0], 3 experts
    Out: [2 1 1]
    """
    each = jnp.arange(num_experts, dtype=ids.dtype)
    is_given = jnp.any(ids[:, :, None] == each, axis=1) & is_real[:, None]
    return jnp.sum(is_given, axis=0, dtype=jnp.uint32)


def with_use(params: Mapping[str, Any], use: ExpertUse | None) -> dict[str, Any]:
    """Return a layer's params, in which its MoE, if any, finds what it knows of its tokens."""
    if use is None or "moe" not in params:
        return dict(params)
    return {**params, "moe": {**params["moe"], "use": use}}
