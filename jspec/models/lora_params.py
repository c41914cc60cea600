"""The stacked weights of LoRA adapters, declared from a target's own parameter table, for every
plain product of a layer (`Op.LINEAR`, `Op.GATED`). A is sharded like its inputs, B like its
outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jspec.models.params import Init, ParamPath, ParamSpec, ParamTable, Part
from jspec.spec.lora_spec import LoRASpec
from jspec.spec.weight_format import Op

ROOT = "lora"  # of these weights in the target's params


def lora_params(table: ParamTable, lora: LoRASpec | None) -> ParamTable:
    """Declare A and B of the products of `table` with a module in `lora.modules`."""
    if lora is None:
        return ()
    products = adapted_products(table, lora)
    return tuple(weight for spec in products for weight in _weights_of(spec, lora))


def adapted_products(table: ParamTable, lora: LoRASpec) -> ParamTable:
    products = (spec for spec in table if is_adaptable(spec))
    return tuple(spec for spec in products if not modules_of(spec).isdisjoint(lora.modules))


def is_adaptable(spec: ParamSpec) -> bool:
    return spec.op in (Op.LINEAR, Op.GATED) and len(spec.shape) == 2 and bool(spec.layouts)


def module_of(part: Part) -> str:
    return part.name.removesuffix(".weight")


def modules_of(spec: ParamSpec) -> frozenset[str]:
    """Return the last parts of the names of a product's modules, in any layout: q_proj, k_proj."""
    parts = (part for layout in spec.layouts for part in layout)
    return frozenset(module_of(part).rsplit(".", 1)[-1] for part in parts)


def adaptable_modules(table: ParamTable) -> tuple[str, ...]:
    return tuple(
        sorted({name for spec in table if is_adaptable(spec) for name in modules_of(spec)})
    )


def path_of_product(spec: ParamSpec) -> ParamPath:
    return (ROOT, *spec.path[:-1])


def _weights_of(spec: ParamSpec, lora: LoRASpec) -> Iterator[ParamSpec]:
    parts, axes = spec.layouts[0], spec.axes or (None, None)
    yield ParamSpec(
        path=(*path_of_product(spec), "a"),
        shape=(spec.shape[0], len(parts) * lora.width),
        axes=(axes[0], None),
        init=Init.ZEROS,
    )
    for index, part in enumerate(parts):
        yield ParamSpec(
            path=(*path_of_product(spec), "b", index),
            shape=(lora.width, part.size),
            layouts=((replace(part, stack=0),),),  # its repeats give each shard its kv heads
            axes=(None, axes[1]),
            init=Init.ZEROS,
        )
