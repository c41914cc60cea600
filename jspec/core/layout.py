"""One flat i32 array for everything a step needs from the host (one put instead of a dozen)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Named i32 fields, laid one behind the other in the order given."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.fields)

    def pack(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """i32[size]; every field must be there, in its shape."""
        parts = []
        for name, shape in self.fields:
            array = values[name]
            if array.shape != shape or array.dtype != np.int32:
                raise ValueError(f"{name} is {array.dtype}{array.shape}; expected int32{shape}")
            parts.append(array.reshape(-1))
        return np.concatenate(parts)

    def unpack(self, flat: Any) -> dict[str, Any]:
        """The fields again, of a numpy or a jax array alike."""
        out = {}
        offset = 0
        for name, shape in self.fields:
            count = math.prod(shape)
            out[name] = flat[offset : offset + count].reshape(shape)
            offset += count
        return out


def decode_layout(*, batch: int, num_grants: int) -> PackedLayout:
    return PackedLayout((("slots", (batch,)), ("grants", (num_grants, 3))))


def prefill_layout(
    *, tokens: int, rows: int, pages_per_row: int, num_stop_ids: int
) -> PackedLayout:
    return PackedLayout(
        (
            ("slots", (rows,)),
            ("starts", (rows,)),
            ("cu_q_lens", (rows + 1,)),
            ("is_final", (rows,)),
            ("next_ids", (rows,)),
            ("token_ids", (tokens,)),
            ("admitted", (rows,)),
            ("prompt_lens", (rows,)),
            ("page_table", (rows, pages_per_row)),
            ("seed", (rows, 2)),
            ("sampling_floats", (rows, 5)),
            ("sampling_ints", (rows, 2)),
            ("stop_ids", (rows, num_stop_ids)),
        )
    )
