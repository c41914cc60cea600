"""The target as a step sees it: whatever model it is, it runs rows over its caches.

All methods are pure and traced inside the step; the objects are static (frozen, hashable), arrays
come as arguments.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from jspec.layers.linear import Shard
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_groups import CacheGroup

Params = dict[str, Any]  # one model's arrays, by name
KVPool = tuple[jax.Array, ...]  # one array a layer


class Target(Protocol):
    """A model whose text is served."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def hidden_size(self) -> int:
        """E."""
        ...

    @property
    def shard(self) -> Shard:
        """Which part of every split weight this device holds."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What it keeps for each token."""
        ...

    @property
    def ops(self) -> Ops:
        """The platform's kernels."""
        ...

    @property
    def table(self) -> ParamTable:
        """Its weights."""
        ...

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        kv: KVPool,
        rows: AttentionRows,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], Float[Array, "T A"], KVPool]:
        """(last hidden after the final norm, aux features, pool with the T new rows).

        kept: the tokens whose last hidden is asked for; None: all T.
        """
        ...

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """f32 logits over this device's vocabulary shard."""
        ...

    def token_ids(self) -> Int[Array, "V"]:
        """Token id of each column of this device's vocabulary shard."""
        ...
