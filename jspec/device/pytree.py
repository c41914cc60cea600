"""`@pytree`: a frozen, keyword-only dataclass that jax passes through jit as data. `static()` is
for the memory layout of the other fields alone; other settings are arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Declare a compile-time field. It must be hashable, and equal for arrays of equal layout."""
    return dataclasses.field(metadata={"static": True}, default=default)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, static)
)
def pytree(cls: type[T]) -> type[T]:
    data = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names: dict[bool, list[str]] = {False: [], True: []}
    for field in dataclasses.fields(data):  # type: ignore[arg-type]
        names["static" in field.metadata].append(field.name)
    jax.tree_util.register_dataclass(data, data_fields=names[False], meta_fields=names[True])
    return data
