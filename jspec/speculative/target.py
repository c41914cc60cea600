"""The interface of the target. All methods are pure and traced; arrays are arguments."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from jspec.layers.expert_use import ExpertCounter
from jspec.layers.linear import Shard
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_groups import CacheGroup

Params = dict[str, Any]  # one model's arrays by name
KVPool = tuple[Any, ...]  # the layers' caches (device.state.Caches)


class Target(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def table(self) -> ParamTable: ...

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
        lora_slots: Int[Array, "B"] | None = None,
        counter: ExpertCounter | None = None,
    ) -> tuple[Float[Array, "R E"], Float[Array, "T A"], KVPool]:
        """Return (last hidden after the final norm, aux features, pool with T new tokens).

        kept: the tokens whose last hidden is returned; None: all T
        lora_slots: the adapter slot of each row; None: no row has one
        counter: counts the tokens of each expert; None: nothing is counted
        """
        ...

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """Return f32 logits of this device's vocabulary shard."""
        ...

    def token_ids(self) -> Int[Array, "V"]:
        """Return the token id of each column of this device's vocabulary shard."""
        ...
