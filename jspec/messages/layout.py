"""Flat i32 layouts of a step's input and output, so that each is a single transfer. On the device
both have a leading axis of data ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.messages.request import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from jspec.messages.step_options import PLAIN, StepOption, StepOptions


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Named i32 fields, concatenated in order."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.fields)

    def pack(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """Return i32[size]. Raises ValueError for a field of another shape or dtype."""
        parts = []
        for name, shape in self.fields:
            array = values[name]
            if array.shape != shape or array.dtype != np.int32:
                raise ValueError(f"{name} is {array.dtype}{array.shape}; expected int32{shape}")
            parts.append(array.reshape(-1))
        return np.concatenate(parts)

    def unpack(self, flat: Any) -> dict[str, Any]:
        out = {}
        offset = 0
        for name, shape in self.fields:
            count = math.prod(shape)
            out[name] = flat[offset : offset + count].reshape(shape)
            offset += count
        return out


@dataclass(frozen=True, slots=True)
class OutputColumns:
    """Named i32 columns of one row of a step's packed output. Shape (n,) takes n columns."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        return sum(math.prod(shape) for _, shape in self.fields)

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Split i32[..., width] into views [..., *shape]. Raises ValueError for another width."""
        if packed.shape[-1] != self.width:
            raise ValueError(f"the output is {packed.shape}; expected {self.width} columns")
        out = {}
        offset = 0
        for name, shape in self.fields:
            end = offset + math.prod(shape)
            out[name] = packed[..., offset:end].reshape(*packed.shape[:-1], *shape)
            offset = end
        return out


def output_columns(
    max_emitted: int,  # M in a decode, 1 in a prefill
    options: StepOptions = PLAIN,
    *,
    hidden_words: int = 0,  # of one hidden state
) -> OutputColumns:
    """Return the output columns of a program, per row and round.

    Only the first num_emitted of a row's emitted_ids, their log-probabilities (float32 bits, with
    LOGPROBS) and the hidden states that chose them (with HIDDEN) are defined. With either option, a
    prefill's output has T more rows, one per packed token, with the log-probability of the next
    prompt token and the hidden state of the packed one.
    """
    logprobs = (
        ("logprobs", (max_emitted,)),
        ("top_logprobs", (max_emitted, MAX_TOP_LOGPROBS)),
        ("top_ids", (max_emitted, MAX_TOP_LOGPROBS)),
        ("watched_logprobs", (max_emitted, MAX_LOGPROB_IDS)),
    )
    hidden = (("hidden", (max_emitted, hidden_words)),)
    return OutputColumns(
        (
            ("num_emitted", ()),
            ("emitted_ids", (max_emitted,)),
            *(logprobs if StepOption.LOGPROBS in options else ()),
            *(hidden if StepOption.HIDDEN in options else ()),
        )
    )
