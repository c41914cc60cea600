"""Checks of new weights: same architecture, finite values."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device.weights import Weight
from jspec.engine.weights.weight_stream import Put, PutParts, ReadPart
from jspec.errors import CheckpointError, shown
from jspec.models.files.tensor_files import LISTED, HostArray
from jspec.models.params import ParamSpec

# The bits that are all set in infinities and NaNs of short types.
EXPONENTS: dict[np.dtype[Any], np.unsignedinteger[Any]] = {
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(jnp.bfloat16): np.uint16(0x7F80),
    np.dtype(jnp.float8_e4m3fn): np.uint8(0x7F),  # NaN alone: it has no infinity
}


class Finite:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad: set[str] = set()

    def checking(self, put: Put) -> Put:
        return lambda spec, value: put(spec, self._checked(spec, value))

    def checking_parts(self, put: PutParts) -> PutParts:
        def checked(spec: ParamSpec, read: ReadPart) -> Weight:
            return put(spec, lambda part: self._checked(spec, read(part)))

        return checked

    def _checked(self, spec: ParamSpec, value: Weight) -> Weight:
        if not all(map(is_finite, jax.tree.leaves(value))):
            with self._lock:
                self._bad.add(_named(spec))
        return value

    def check(self) -> None:
        if self._bad:
            lines = [f"{name} has values that are not finite" for name in sorted(self._bad)]
            more = len(lines) - LISTED
            lines = lines[:LISTED] + ([f"{more} more weights have such values"] if more > 0 else [])
            raise CheckpointError("\n  ".join(("the new weights cannot serve", *lines)))


def is_finite(value: HostArray) -> bool:
    """Return whether all values are finite, blockwise, without a copy of the whole array."""
    if value.dtype.kind in "iub":
        return True
    rows = value.reshape(-1) if value.flags.c_contiguous else value.T.reshape(-1)
    step = 1 << 20
    return all(_all_finite(rows[i : i + step]) for i in range(0, rows.size, step))


def _all_finite(rows: HostArray) -> bool:
    exponent = EXPONENTS.get(rows.dtype)
    if exponent is None:
        return bool(np.isfinite(rows).all())
    # Integers are several times faster than short floats here.
    return not bool(((rows.view(exponent.dtype) & exponent) == exponent).any())


def _named(spec: ParamSpec) -> str:
    parts = spec.layouts[0] if spec.layouts else ()
    return " or ".join(part.name for part in parts) or ".".join(map(str, spec.path))


def differences(served: Any, other: Any, name: str = "") -> list[str]:
    """Return a line for each value in which two dataclass trees differ."""
    if served == other:
        return []
    if type(served) is type(other) and dataclasses.is_dataclass(served):
        fields = (field.name for field in dataclasses.fields(served))
        return [
            line
            for field in fields
            for line in differences(
                getattr(served, field), getattr(other, field), f"{name}.{field}".lstrip(".")
            )
        ]
    if isinstance(served, tuple) and isinstance(other, tuple) and len(served) == len(other):
        pairs = enumerate(zip(served, other, strict=True))
        lines = [line for i, (a, b) in pairs for line in differences(a, b, f"{name}[{i}]")]
        return lines[:LISTED]
    if isinstance(served, tuple) and isinstance(other, tuple):
        return [f"{name} has {len(other)} entries; expected {len(served)}"]
    return [f"{name} is {shown(other)}; expected {shown(served)}"]


def as_host(name: str, array: Any) -> HostArray:
    """Convert an array of numpy, jax or a DLPack library (torch) to numpy."""
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError):  # torch's bfloat16, or a tensor on a GPU
        try:
            return np.asarray(jax.dlpack.from_dlpack(array))
        except Exception as error:
            raise CheckpointError(
                f"{name} is a {type(array).__name__} that cannot be read ({error}); "
                "expected an array of numpy or jax"
            ) from error
