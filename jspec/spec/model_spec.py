"""A model as hashable host data: its layers and their sizes. No arrays, no jax. Layers with equal
specs share one compiled function."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from jspec.errors import ConfigError
from jspec.spec.cache_entry import Unit
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward
from jspec.spec.rope import RopeConfig

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
    """Return the model's cache groups: runs of layers with equal entry and window, in order,
    without layers that read another's cache. Of several groups, `name` i is the i-th's name."""
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
