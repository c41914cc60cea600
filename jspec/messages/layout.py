"""One flat i32 array for everything a step needs from the host (one put instead of a dozen), and
one for what it hands back (one get)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.messages.features import PLAIN, Feature, StepFeatures
from jspec.messages.request import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS, SAMPLING_FIELDS
from jspec.messages.sampling_fields import SamplingTable, packed_fields


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Named i32 fields, laid one after the other in the order given."""

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


@dataclass(frozen=True, slots=True)
class OutputColumns:
    """What a row of a step's packed output holds: named i32 columns, side by side, in this order.

    A shape of () is one column, (n,) is n of them. `device.batch.pack_output` packs on the device.
    """

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        return sum(math.prod(shape) for _, shape in self.fields)

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """i32[..., width] → each field, [..., *its shape]; views. Raises ValueError for others."""
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
    features: StepFeatures = PLAIN,
    *,
    hidden_words: int = 0,
) -> OutputColumns:
    """Of each row and round. max_emitted: M in a decode, 1 in a prefill. hidden_words: of a row of
    hidden states.

    The first num_emitted of a row's emitted_ids count, the others may be anything; so do the first
    ones of what is known of them (float32's bits), which only a program with LOGPROBS says, and the
    hidden states that chose them, which one with HIDDEN says. The prefill of either has T rows more
    than the batch, one a packed token, which emit nothing: they say the first of the prompt token
    that follows, the second of the packed one.
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
            *(logprobs if Feature.LOGPROBS in features else ()),
            *(hidden if Feature.HIDDEN in features else ()),
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
    """A SettleBatch's; `device.batch.settle_batch` makes one of the fields. words: W of a mask."""
    return PackedLayout((("slots", (batch,)), ("allowed", (batch, nodes, words))))


def catch_up_layout(*, batch: int) -> PackedLayout:
    """A CatchUpBatch's."""
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
    """A PrefillBatch's; `device.batch.prefill_batch` makes one of the fields.

    num_grants: of each page space beside the full one, of which there are num_windows. words: W of
    a mask; 0: there are none.
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
    """A RecallBatch's."""
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
    """Without windows there is no such field, and nothing is sent."""
    return (("window_grants", (num_windows, num_grants, 3)),) if num_windows else ()
