"""Flat i32 layouts of a step's input (one transfer instead of a dozen) and output (one get).

On the device both have a leading axis of data ranks, each with a batch of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.messages.request import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS, SAMPLING_FIELDS
from jspec.messages.sampling_fields import SamplingTable, packed_fields
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
        """Return the fields of a numpy or jax array."""
        out = {}
        offset = 0
        for name, shape in self.fields:
            count = math.prod(shape)
            out[name] = flat[offset : offset + count].reshape(shape)
            offset += count
        return out


@dataclass(frozen=True, slots=True)
class OutputColumns:
    """Named i32 columns of one row of a step's packed output, in order.

    A shape of () is one column, (n,) is n columns. `device.batch.pack_output` packs them.
    """

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
    max_emitted: int,
    features: StepOptions = PLAIN,
    *,
    hidden_words: int = 0,
) -> OutputColumns:
    """Return the output columns of a program, per row and round.

    max_emitted: M in a decode, 1 in a prefill.
    hidden_words: words of one hidden state.

    Only the first num_emitted of a row's emitted_ids are defined. The same holds for their
    log-probabilities (the bits of float32), which programs with LOGPROBS return, and for the hidden
    states that chose them, which programs with HIDDEN return. A prefill of either kind has T more
    entries than the batch, one per packed token, which emit nothing: they have the log-probability
    of the next prompt token, and the hidden state of the packed one.
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
            *(logprobs if StepOption.LOGPROBS in features else ()),
            *(hidden if StepOption.HIDDEN in features else ()),
        )
    )


def decode_layout(
    *, batch: int, num_grants: int, num_windows: int = 0, is_sharing: bool = False
) -> PackedLayout:
    """Return the layout that `device.batch.decode_batch` unpacks into a DecodeBatch.

    num_grants: page grants of each page space. num_windows: page spaces of windows.
    is_sharing: rows may share prefixes.
    """
    grants = ("grants", (num_grants, 3))
    shared = (("leaders", (batch,)), ("shared_keys", (batch,))) if is_sharing else ()
    return PackedLayout(
        (("slots", (batch,)), grants, *_window_grants(num_windows, num_grants), *shared)
    )


def settle_layout(*, batch: int, nodes: int, words: int) -> PackedLayout:
    """Return the layout that `device.batch.settle_batch` unpacks. words: W of a mask."""
    return PackedLayout((("slots", (batch,)), ("allowed", (batch, nodes, words))))


def draft_prefill_layout(*, batch: int) -> PackedLayout:
    """Return the layout of a DraftPrefillBatch."""
    return PackedLayout((("slots", (batch,)), ("counts", (batch,))))


def prefill_layout(
    *,
    tokens: int,
    rows: int,
    pages_per_row: int,
    num_windows: int = 0,
    num_grants: int = 0,
    words: int = 0,
    table: SamplingTable = SAMPLING_FIELDS,
) -> PackedLayout:
    """Return the layout that `device.batch.prefill_batch` unpacks.

    num_windows: page spaces of windows
    num_grants: page grants of each window space
    words: W of a mask; 0: no masks
    """
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
            *_window_grants(num_windows, num_grants),
            *((("allowed", (rows, words)),) if words else ()),
            *packed_fields(table, rows),
        )
    )


def recall_layout(*, tokens: int, rows: int) -> PackedLayout:
    """Return the layout of a RecallBatch."""
    return PackedLayout(
        (
            ("slots", (rows,)),
            ("starts", (rows,)),
            ("cu_q_lens", (rows + 1,)),
            ("next_ids", (rows,)),
            ("is_first", (rows,)),
            ("prompt_lens", (rows,)),
            ("token_ids", (tokens,)),
        )
    )


def _window_grants(num_windows: int, num_grants: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("window_grants", (num_windows, num_grants, 3)),) if num_windows else ()
