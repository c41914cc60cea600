"""Expert parallelism of a model as data: each MoE's experts are split over groups of devices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from jspec.errors import ConfigError
from jspec.spec.model_spec import LayerSpec, ModelSpec, MoESpec


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


def on_expert_shards(spec: ModelSpec, shards: int, *, data_shards: int = 1) -> ModelSpec:
    """Return the model with every MoE's experts split over `shards` groups of devices.

    data_shards: data ranks among which the groups are divided; 1: each rank has all experts.
    Raises ConfigError if the number of experts is not divisible.
    """

    def moe_on(moe: MoESpec) -> MoESpec:
        if moe.num_experts % shards:
            raise ConfigError(
                f"ep_size is {shards}; expected a divisor of {moe.num_experts}, the number of "
                "experts"
            )
        return replace(moe, shards=shards, data_shards=data_shards)

    def layer_on(layer: LayerSpec) -> LayerSpec:
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        moes: dict[str, Any] = {
            name: moe_on(value) for name, value in values.items() if isinstance(value, MoESpec)
        }
        return replace(layer, **moes)

    return replace(spec, layers=tuple(map(layer_on, spec.layers)))
