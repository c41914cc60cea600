"""Arrays from a parameter table: their placement on a mesh, abstract arrays, random arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jspec.device.parallel import partition_spec
from jspec.device.weights import W8A8Weight, abstract_weight, w8a8_weight
from jspec.models.params import Init, Order, ParamPath, ParamSpec, ParamTable
from jspec.spec.weight_format import W8A8

Tables = Mapping[str, ParamTable]


def nested(values: Iterable[tuple[ParamPath, Any]]) -> dict[str, Any]:
    """Return the params tree of (path, value) pairs: plain dicts, layers keyed by their number."""
    tree: dict[str, Any] = traverse_util.unflatten_dict(dict(values))
    return tree


def param_specs(tables: Tables, params: Any) -> Any:
    known = {(model, *spec.path): _partition_of(spec) for model in tables for spec in tables[model]}
    return _by_path(known, params, other=PartitionSpec())


def _partition_of(spec: ParamSpec) -> Any:
    split = partition_spec(spec.axes)
    if isinstance(spec.format, W8A8):
        scales = partition_spec(spec.format.scale_axes(spec.axes))
        return w8a8_weight(spec.format, codes=split, scales=scales)
    return split


def place_of(mesh: Mesh, spec: ParamSpec, *, column_major: bool) -> Any:
    """Return a weight's placement (NamedSharding, Format, or a W8A8Weight of them).

    column_major: weights in the backend's order are column-major. Embedding tables are row-major,
    as a TPU step needs them.
    """
    partition = _partition_of(spec)
    if isinstance(partition, W8A8Weight):
        codes, scales = (NamedSharding(mesh, x) for x in (partition.codes, partition.scales))
        *stack, length, width = range(len(spec.shape))
        turned = Layout(major_to_minor=(*stack, width, length))
        return replace(partition, codes=Format(turned, codes), scales=scales)
    split = NamedSharding(mesh, partition)
    if spec.init is Init.TABLE:
        return Format(Layout(major_to_minor=(0, 1)), split)
    is_column_major = spec.order is Order.COLUMNS or (spec.order is Order.BACKENDS and column_major)
    return Format(Layout(major_to_minor=(1, 0)), split) if is_column_major else split


def param_places(mesh: Mesh, tables: Tables, params: Any, *, column_major: bool) -> Any:
    known = {
        (model, *spec.path): place_of(mesh, spec, column_major=column_major)
        for model in tables
        for spec in tables[model]
    }
    return _by_path(known, params, other=NamedSharding(mesh, PartitionSpec()))


def _by_path(known: Mapping[ParamPath, Any], params: Any, *, other: Any) -> Any:
    def value(keys: tuple[Any, ...], _: Any) -> Any:
        path = path_of(keys)
        found = known.get(path, known.get(path[:-1], other))
        return getattr(found, str(path[-1])) if isinstance(found, W8A8Weight) else found

    return jax.tree_util.tree_map_with_path(value, params)


def path_of(path: tuple[Any, ...]) -> ParamPath:
    return tuple(getattr(k, "key", getattr(k, "name", getattr(k, "idx", ""))) for k in path)


def abstract_params(table: ParamTable, *, dtype: DTypeLike, shards: int = 1) -> dict[str, Any]:
    return nested(
        (spec.path, abstract_weight(spec.format_in(dtype), spec.physical_shape(shards)))
        for spec in table
    )


def init_params(table: ParamTable, *, seed: int, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Return random unsharded dense weights by `Init`, a function of table and seed."""
    values: dict[ParamPath, Any] = {}
    for i, spec in enumerate(table):
        key = jax.random.fold_in(jax.random.key(seed), i)
        (array,) = spec.format_in(dtype).arrays(spec.shape).values()
        values[spec.path] = _drawn(key, spec, dtype=array.dtype)
    for spec in table:
        if spec.tied_to is not None:
            values[spec.path] = values[spec.tied_to].T
    return nested(values.items())


def _drawn(key: jax.Array, spec: ParamSpec, *, dtype: DTypeLike) -> jax.Array:
    if spec.init is Init.IDS:
        return jnp.arange(spec.shape[0], dtype=jnp.int32)
    if spec.init in (Init.ONES, Init.ZEROS):
        return jnp.full(spec.shape, 1.0 if spec.init is Init.ONES else 0.0, dtype)
    scale = 1.0 if spec.init is Init.TABLE else spec.shape[-2] ** -0.5
    return (jax.random.normal(key, spec.shape, jnp.float32) * scale).astype(dtype)
