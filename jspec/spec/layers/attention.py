"""Attention of one layer as host data: grouped-query and latent attention, and its indexer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jspec.errors import ConfigError
from jspec.spec.cache_entry import FP8, KV, CacheEntry, Latent
from jspec.spec.rope import QueryGrowth, RopeConfig


class HeadGate(enum.Enum):
    """Gate on the output of attention."""

    OF_HEADS = "one number a head"
    OF_NUMBERS = "one number for each of a head's"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    rope: RopeConfig = field(default_factory=RopeConfig)
    # A query sees keys with q_position - key_position < window, itself included; None: all.
    window: int | None = None
    sinks: bool = False  # each head has a learned logit in its softmax, which adds nothing
    qk_norm: bool = False  # RMSNorm of every query and key head before RoPE, one scale each
    norms_span_heads: bool = False  # qk_norm norms all heads of a token as one vector
    v_norm: bool = False  # RMSNorm of every value head, without a scale
    k_is_v: bool = False  # one projection is both
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # of scores before their softmax; None: head_dim ** -0.5
    v_dim: int | None = None  # dimensions of a value head, at most head_dim; None: head_dim
    value_scale: float = 1.0  # factor of V
    rotary_dim: int | None = None  # leading head dimensions with RoPE; None: all
    growth: QueryGrowth | None = None
    gate: HeadGate | None = None  # sigmoids of a projection of the layer's normed input
    kv_of: int | None = None  # an earlier layer whose cached K and V this one reads
    kv_dtype: str | None = None  # of K and V, set by `cached_in`; None: the engine's dtype

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_heads}; expected a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number")
        if not 1 <= self.value_dim <= self.head_dim:
            raise ConfigError(
                f"v_head_dim is {self.v_dim}; expected 1 to {self.head_dim}, the head_dim"
            )
        if self.rotary_dim is not None and (
            self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim
        ):
            raise ConfigError(
                f"RoPE rotates {self.rotary_dim} dimensions of a head; expected an even number "
                f"from 2 to {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"sliding_window is {self.window}; expected at least 1")

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def has_kv_scales(self) -> bool:
        """True if the layer has k_scale and v_scale, by which cached values are divided."""
        return self.kv_dtype == FP8 and self.kv_of is None

    @property
    def cache_entry(self) -> CacheEntry:
        return KV(self.num_kv_heads, self.head_dim, self.value_dim, self.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """The indexer of DeepSeek Sparse Attention (DSA, DeepSeek-V3.2), which selects tokens.

    A token's score is the sum over num_heads of weight * relu(index query . index key). A query
    attends to the top_k highest scores that it sees; the lower position wins ties.
    """

    num_heads: int
    head_dim: int  # of index queries and of a token's one index key, which is cached
    top_k: int
    interleaved: bool = False  # RoPE rotates neighboring pairs of a head's first dimensions
    norm_eps: float = 1e-6  # of the keys' LayerNorm; the published code has it as a constant

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"index_topk is {self.top_k}; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Multi-head latent attention (MLA) of one layer: heads whose K and V follow from a latent.

    Sizes are those of the heads: num_kv_heads is num_heads, and head_dim has the dimensions without
    RoPE, then the rotary_dim dimensions with RoPE. Only the latent is cached.
    """

    kv_rank: int  # of the latent
    q_rank: int | None = None  # of the queries' low-rank projection; None: a full one
    interleaved: bool = False  # RoPE rotates neighboring pairs, not pairs of the two halves
    norm_eps: float = 1e-6  # of the low-rank norms; the published code has it as a constant
    indexer: IndexerSpec | None = None  # selects the tokens to attend to; None: all
    reuses_selection: bool = False  # attends to what the last layer with an indexer selected

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"num_key_value_heads is {self.num_kv_heads}; expected {self.num_heads}, the "
                "number of heads: each has its own part of the latent"
            )
        if self.rotary_dim is None or self.rotary_dim == self.head_dim:
            raise ConfigError(
                f"RoPE rotates {self.rotary_dim or self.head_dim} dimensions of a head; expected "
                f"fewer than {self.head_dim}"
            )
        others = (self.window, self.gate, self.sinks, self.qk_norm, self.qkv_bias, self.out_bias)
        if any(others) or self.value_scale != 1.0:
            raise ConfigError(
                "latent attention has a window, gate, sinks, norms of heads, a bias or a value "
                "scale; expected none of these"
            )
        if self.indexer is not None:
            self._check_indexer(self.indexer)

    def _check_indexer(self, indexer: IndexerSpec) -> None:
        if self.q_rank is None:
            raise ConfigError(
                "q_lora_rank is missing; expected one: an indexer reads the low-rank queries"
            )
        if indexer.head_dim < self.rope_dim:
            raise ConfigError(
                f"index_head_dim is {indexer.head_dim}; expected at least {self.rope_dim}, the "
                "dimensions that RoPE rotates"
            )
        if self.reuses_selection:
            raise ConfigError(
                "a layer has an indexer and reuses a selection; expected one of the two"
            )

    @property
    def is_sparse(self) -> bool:
        return self.indexer is not None or self.reuses_selection

    @property
    def nope_dim(self) -> int:
        """Dimensions of a query or key head without RoPE."""
        return self.head_dim - self.rope_dim

    @property
    def rope_dim(self) -> int:
        return self.rotary_dim or 0

    @property
    def cache_entry(self) -> CacheEntry:
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return Latent(self.kv_rank, self.rope_dim, self.kv_dtype, index_dim)
