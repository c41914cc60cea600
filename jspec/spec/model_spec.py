"""A model as hashable host data: its layers and their sizes. No arrays, no jax.

Parameter table, forward pass, cache groups and the memory per token derive from it. Layers with
equal specs share one compiled function.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jspec.errors import ConfigError
from jspec.spec.cache_entry import FP8, KV, CacheEntry, Latent, Record, State, Unit
from jspec.spec.cache_groups import CacheGroup
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
                f"RoPE turns {self.rotary_dim} numbers of a head; expected an even number from 2 "
                f"to {self.head_dim}"
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
    attends to the top_k tokens with the highest scores, of those that it sees; the token at the
    lower position wins ties. Queries follow from the low-rank queries of the attention.

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
                f"RoPE turns {self.rotary_dim or self.head_dim} numbers of a head; expected fewer "
                f"than {self.head_dim}"
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
                "numbers that RoPE turns"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A gated delta net (Gated DeltaNet, arXiv:2412.06464, as in Qwen3-Next): a recurrent layer.

    Queries, keys and values come from one projection, a causal convolution of conv_size tokens and
    SiLU. Each value head has a state [key_dim, value_dim], a decay and a step size; several share a
    key head. Outputs are normed head by head, then gated.
    """

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    window: ClassVar[int | None] = None
    kv_of: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads is {self.num_heads}; expected a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )
        if self.conv_size < 2:
            raise ConfigError(f"linear_conv_kernel_dim is {self.conv_size}; expected at least 2")

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def cache_entry(self) -> CacheEntry:
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        state = (self.num_heads, self.key_dim, self.value_dim)
        return State(
            carried=(
                Record("state", state, ("heads", None, None), "float32"),
                Record("conv", (self.conv_size - 1, self.conv_dim), (None, "heads")),
            ),
            pending_size=keys + values + self.num_heads + self.conv_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated MLP, silu(gate) * up (SwiGLU), or with GELU (GeGLU)."""

    inner: int  # intermediate_size
    bias: bool = False
    gelu: bool = False  # its approximation by tanh
    limit: float | None = None  # clamps silu(gate) from above and up to [-limit, limit]


class Routing(enum.Enum):
    """The weights of the chosen experts from a router's logits."""

    SOFTMAX_THEN_TOP = "softmax over all experts, then the top k as they are"
    SOFTMAX_THEN_TOP_NORMALIZED = "softmax over all experts, then the top k, summing to one"
    TOP_THEN_SOFTMAX = "the top k logits, softmax over those"
    SIGMOID_THEN_TOP = "sigmoid of each; the top k of that plus a bias, as they are without it"
    SIGMOID_THEN_TOP_NORMALIZED = "the same, summing to one"


class Gate(enum.Enum):
    """An expert's activation of its gate and up projections."""

    SILU = "silu(gate) * up"
    SILU_WITHIN_7 = "silu(gate), at most 7, times up within 7"
    GELU = "gelu(gate), by its approximation by tanh, times up"
    CLAMPED = "gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts (MoE), gated MLPs: each token runs through top_k of num_experts."""

    num_experts: int
    top_k: int
    inner: int  # moe_intermediate_size
    routing: Routing = Routing.SOFTMAX_THEN_TOP_NORMALIZED
    gate: Gate = Gate.SILU
    bias: bool = False  # in router and experts
    weight_scale: float = 1.0  # factor of the chosen experts' weights
    shared: DenseSpec | None = None  # one more MLP for every token, added to the experts' output
    shared_gate: bool = False  # that MLP's output times the sigmoid of one product with the token
    num_groups: int = 1  # equal groups of neighboring experts
    top_groups: int = 1  # number of best groups among whose experts the top k are chosen
    shards: int = 1  # of whole experts; `expert_shards.py` sets this and data_shards
    data_shards: int = 1  # data ranks that share the experts, each with some of the shards
    # Physical experts if a map places them; None: the experts are in their order.
    num_placed: int | None = None

    @property
    def num_physical(self) -> int:
        """The number of experts on all devices of a copy of the MoE, replicas included."""
        return self.num_experts if self.num_placed is None else self.num_placed

    @property
    def has_ranked_router(self) -> bool:
        """True if all experts compete and only the weights of a sigmoid are scaled."""
        is_grouped = self.top_groups != self.num_groups
        return not is_grouped and (self.has_router_bias or self.weight_scale == 1.0)

    @property
    def has_router_bias(self) -> bool:
        """True if a router bias takes part in the choice of experts but not in their weights."""
        return self.routing in (Routing.SIGMOID_THEN_TOP, Routing.SIGMOID_THEN_TOP_NORMALIZED)

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.top_k}; expected 1 to {self.num_experts}, the "
                f"number of experts"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"n_group is {self.num_groups} and topk_group {self.top_groups}; expected a "
                f"divisor of {self.num_experts}, the number of experts, and at most as many"
            )
        if self.top_k > (among := self.num_experts // self.num_groups * self.top_groups):
            raise ConfigError(
                f"num_experts_per_tok is {self.top_k}; expected at most {among}, the experts of "
                f"topk_group {self.top_groups} of n_group {self.num_groups} groups"
            )


FeedForward = DenseSpec | MoESpec
Mixer = AttentionSpec | DeltaNetSpec  # the part of a layer that reads other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """x + attention(norm(x)), then x + ffn(norm(x)); both norms are RMSNorms with `eps`."""

    attention: Mixer
    ffn: FeedForward
    eps: float = 1e-5

    @property
    def ffns(self) -> tuple[FeedForward, ...]:
        return (self.ffn,)

    @property
    def softmax_attention(self) -> AttentionSpec:
        """The layer's attention. Raises ConfigError for a recurrent layer."""
        if not isinstance(self.attention, AttentionSpec):
            raise ConfigError(
                f"the layer is a {type(self.attention).__name__}; expected one with attention"
            )
        return self.attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder: embedding, layers, final RMSNorm, lm_head. Names are Hugging Face's."""

    vocab_size: int  # V
    hidden_size: int  # E
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float = 1e-5
    embed_scale: float | None = None  # factor of embeddings
    logit_cap: float | None = None  # c in c tanh(logit / c)
    tie_word_embeddings: bool = False
    max_position: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    family: str = "llama"  # name in `models.registry`, for the stored names only

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_recurrent(self) -> bool:
        """True if a layer has a state for each row, instead of records of its tokens."""
        return any(layer.attention.cache_entry.unit is Unit.SLOT for layer in self.layers)

    @property
    def one_layer(self) -> LayerSpec:
        """The layer of a model with equal layers. Raises ConfigError for any other model."""
        if len(set(self.layers)) != 1:
            raise ConfigError(
                f"the model has {len(set(self.layers))} kinds of layers; expected all equal"
            )
        return self.layers[0]


def cache_groups(spec: ModelSpec, *, name: str) -> tuple[CacheGroup, ...]:
    """Return the model's cache groups: runs of layers with equal entry and window, in order.

    Layers that read another layer's cache are omitted. Two layers with a window between full ones
    give `name` 0, `name` 1, `name` 2.
    """
    mixers = (layer.attention for layer in spec.layers)
    kinds = [(own.cache_entry, own.window) for own in mixers if own.kv_of is None]
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return tuple(
        CacheGroup(name if len(runs) == 1 else f"{name} {i}", count, entry, window)
        for i, ((entry, window), count) in enumerate(runs)
    )


def cached_in(spec: ModelSpec, dtype: str | None) -> ModelSpec:
    """Return the model with K, V and latents cached in `dtype`. Recurrent states keep theirs."""

    def layer_in(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.attention, AttentionSpec):
            return layer
        return replace(layer, attention=replace(layer.attention, kv_dtype=dtype))

    return replace(spec, layers=tuple(map(layer_in, spec.layers)))


def uniform_decoder(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float = 1e-5,
    rope: RopeConfig = RopeConfig(),  # noqa: B008  (frozen)
    attention_bias: bool = False,
    tie_word_embeddings: bool = False,
    max_position: int = 2048,
    eos_token_ids: tuple[int, ...] = (),
    bos_token_id: int | None = None,
    family: str = "llama",
) -> ModelSpec:
    """Return a Llama-like decoder of equal layers; attention_bias is on q, k, v and the output."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )
    layer = LayerSpec(attention=attention, ffn=DenseSpec(inner=intermediate_size), eps=rms_norm_eps)
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        rms_norm_eps=rms_norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        max_position=max_position,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        family=family,
    )
