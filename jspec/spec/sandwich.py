"""Layers with a norm before and after each sub-layer, and shared caches (Gemma 4). Host data."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.spec.layers.feed_forward import FeedForward, MoESpec
from jspec.spec.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichSpec(LayerSpec):
    """x + norm(attention(norm(x))), then x + norm(ffn(norm(x))), times a scalar of the layer."""

    # In parallel with the dense `ffn`, of the same x under another norm; both outputs are normed,
    # then added. The router reads x, normed with its own scale, and each expert has a factor.
    experts: MoESpec | None = None
    # Width of the layer's own token embedding, which one more sub-layer multiplies by a gate of x;
    # 0: no such sub-layer.
    token_size: int = 0

    @property
    def ffns(self) -> tuple[FeedForward, ...]:
        return (self.ffn,) if self.experts is None else (self.ffn, self.experts)


def cache_indices(spec: ModelSpec) -> tuple[int, ...]:
    """Return the index of each layer's cache among the model's: its own, or an earlier layer's."""
    sources = [layer.attention.kv_of for layer in spec.layers]
    own = [i for i, source in enumerate(sources) if source is None]
    return tuple(own.index(i if of is None else of) for i, of in enumerate(sources))
