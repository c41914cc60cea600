"""Hidden states in a step's output: numbers as i32 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Encoding of E numbers, with one float32 or two bfloat16 in a word."""

    width: int
    is_half: bool = False  # two bfloat16 per word, low half first

    def __post_init__(self) -> None:
        if self.width < 1 or (self.is_half and self.width % 2):
            raise ValueError(f"a row of {self.width} numbers; expected some, bfloat16 in pairs")

    @classmethod
    def of(cls, width: int, dtype: str) -> HiddenRows:
        return cls(width, is_half=dtype == "bfloat16" and width % 2 == 0)

    @property
    def words(self) -> int:
        return self.width // 2 if self.is_half else self.width

    def floats(self, bits: np.ndarray) -> np.ndarray:
        """Convert i32[..., words] to f32[..., E]."""
        bits = np.ascontiguousarray(bits)
        if not self.is_half:
            return bits.view(np.float32)
        halves = bits.view(np.uint32)
        low, high = halves << np.uint32(16), halves & np.uint32(0xFFFF0000)
        pairs = np.stack((low, high), axis=-1).view(np.float32)
        return pairs.reshape(*bits.shape[:-1], self.width)
