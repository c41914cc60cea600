"""Expert parallelism of a model as data: each MoE's experts are split over groups of devices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from jspec.errors import ConfigError
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import LayerSpec, ModelSpec


def has_experts(spec: ModelSpec) -> bool:
    return most_experts(spec) > 0


def most_experts(spec: ModelSpec) -> int:
    """Return the largest number of experts of a layer; 0 for a model without MoE."""
    return max(experts_by_layer(spec), default=0)


def experts_by_layer(spec: ModelSpec) -> tuple[int, ...]:
    """Return the number of experts of each layer; 0 for a layer without MoE."""
    return tuple(
        sum(ffn.num_experts for ffn in layer.ffns if isinstance(ffn, MoESpec))
        for layer in spec.layers
    )


def places_experts(spec: ModelSpec) -> bool:
    ffns = (ffn for layer in spec.layers for ffn in layer.ffns)
    return any(isinstance(ffn, MoESpec) and ffn.num_placed is not None for ffn in ffns)


def on_expert_shards(
    spec: ModelSpec, shards: int, *, data_shards: int = 1, spares: int | None = None
) -> ModelSpec:
    """Return the model with every MoE's experts split over `shards` groups of devices.

    data_shards: data ranks among which the groups are divided. spares: physical experts beyond the
    model's, placed by a map. Raises ConfigError if the physical experts cannot be divided.
    """

    def moe_on(moe: MoESpec) -> MoESpec:
        placed = None if spares is None else moe.num_experts + spares
        moe = replace(moe, shards=shards, data_shards=data_shards, num_placed=placed)
        if moe.num_physical % shards:
            more = f", with ep_num_redundant_experts {spares}" if spares else ""
            raise ConfigError(
                f"ep_size is {shards}; expected a divisor of {moe.num_physical}, the number of "
                f"experts{more}"
            )
        return moe

    def layer_on(layer: LayerSpec) -> LayerSpec:
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        moes: dict[str, Any] = {
            name: moe_on(value) for name, value in values.items() if isinstance(value, MoESpec)
        }
        return replace(layer, **moes)

    return replace(spec, layers=tuple(map(layer_on, spec.layers)))
