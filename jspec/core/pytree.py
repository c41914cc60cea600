"""`@pytree`: a frozen, keyword-only dataclass that jax passes through jit as data.

Fields are arrays or nested pytrees. Compile-time settings never live in a pytree; they are
arguments of the function that is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Class decorator: freezes `cls`, makes its fields keyword-only, registers it with jax."""
    data = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [field.name for field in dataclasses.fields(data)]  # type: ignore[arg-type]
    jax.tree_util.register_dataclass(data, data_fields=names, meta_fields=[])
    return data
