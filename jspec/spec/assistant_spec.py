"""A draft model whose layers attend to its target's caches (Gemma 4's assistants). Host data."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.errors import ConfigError
from jspec.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec:
    """A draft model without K and V of its own."""

    layer: ModelSpec  # its layers; kv_of is a layer of the target, vocab_size the target's V
    target_size: int  # the target's E
    caches: tuple[int, ...]  # the index of each layer's cache among the target's
    embed_scale: float | None = None  # factor of the target's embeddings
    num_groups: int = 0  # equal groups of tokens; 0: every token is scored
    top_groups: int = 0  # groups whose tokens are scored

    def __post_init__(self) -> None:
        if any(layer.attention.kv_of is None for layer in self.layer.layers):
            raise ConfigError("an assistant has a layer with K and V of its own; expected none")
        if self.num_groups and (
            self.layer.vocab_size % self.num_groups or not 1 <= self.top_groups <= self.num_groups
        ):
            raise ConfigError(
                f"num_centroids is {self.num_groups} and centroid_intermediate_top_k "
                f"{self.top_groups}; expected a divisor of vocab_size {self.layer.vocab_size}, and "
                "at most as many"
            )
