"""What a chain's step with any drafter makes one H200 move and multiply, forward by forward.

A forward's weights are read once, or multiplied by its tokens, whichever takes longer, matrix by
matrix; KV is read once a forward. Tables are looked up, not read. The rates are step_parts'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.step_parts import FLOPS_PER_SECOND, READ_BYTES_PER_SECOND
from jspec.config.limits import SpeculativeConfig
from jspec.models.decoder import Decoder
from jspec.models.heads.eagle3 import Eagle3Head
from jspec.models.params import Init, ParamSpec, ParamTable
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import MoESpec
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.eagle import EagleDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.standalone import StandaloneDrafter

ID_BYTES = 4  # of a token in a lookup's history


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Milliseconds of one forward, or of several: by its bytes, by its operations, and by what of
    each matrix takes longer (`ms`)."""

    bytes_ms: float = 0.0
    flops_ms: float = 0.0
    ms: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(
            bytes_ms=self.bytes_ms + other.bytes_ms,
            flops_ms=self.flops_ms + other.flops_ms,
            ms=self.ms + other.ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """B rows of `context` committed tokens, weights and KV of `itemsize` bytes a number."""

    batch: int
    context: int
    itemsize: int

    def product(self, numbers: float, tokens: int) -> Floor:
        """One matrix times `tokens` tokens."""
        read = 1e3 * numbers * self.itemsize / READ_BYTES_PER_SECOND
        flops = 1e3 * 2 * numbers * tokens / FLOPS_PER_SECOND
        return Floor(bytes_ms=read, flops_ms=flops, ms=max(read, flops))

    def read(self, num_bytes: float) -> Floor:
        """Nothing but reading."""
        ms = 1e3 * num_bytes / READ_BYTES_PER_SECOND
        return Floor(bytes_ms=ms, ms=ms)


def matrices(table: ParamTable, *, skip: tuple[str, ...] = ()) -> list[ParamSpec]:
    """The weights that a forward multiplies by: neither tables nor norms nor maps of ids. skip:
    names in the paths of those that are left out."""
    return [
        spec
        for spec in table
        if len(spec.shape) >= 2
        and spec.init not in (Init.TABLE, Init.IDS)
        and not set(skip) & set(spec.path)
    ]


def products(rows: Rows, weights: Iterable[ParamSpec], *, tokens: int) -> Floor:
    """All of `weights` times as many tokens."""
    return total(rows.product(math.prod(weight.shape), tokens) for weight in weights)


def total(floors: Iterable[Floor]) -> Floor:
    return sum(floors, Floor())


def kv_read(rows: Rows, groups: Iterable[CacheGroup]) -> Floor:
    """K and V of all committed tokens of all rows in every layer of `groups`, once."""
    entries = [(group.num_layers, group.entry) for group in groups]
    numbers = sum(n * e.num_heads * (e.qk_dim + e.v_dim) for n, e in entries)
    return rows.read(rows.batch * rows.context * numbers * rows.itemsize)


def target_floor(target: Decoder, rows: Rows, *, nodes: int) -> Floor:
    """Return the floor of verifying N nodes a row. Raises ValueError for an MoE (decode_floor)."""
    if any(isinstance(layer.ffn, MoESpec) for layer in target.spec.layers):
        raise ValueError("the target is a mixture of experts; expected a dense one")
    weights = matrices(target.table)
    return products(rows, weights, tokens=rows.batch * nodes) + kv_read(rows, target.cache_groups)


def draft_floor(drafter: Drafter, spec: SpeculativeConfig, rows: Rows) -> Floor:
    """Of a chain: S - 1 forwards that propose, and one that advances over M tokens a row.

    Raises ValueError for a drafter that is not known here.
    """
    if isinstance(drafter, NgramDrafter):
        return rows.read(rows.batch * rows.context * ID_BYTES)
    if isinstance(drafter, MultiLayerDrafter):
        return _multi_layer(drafter, spec, rows)
    if not isinstance(drafter, EagleDrafter | StandaloneDrafter):
        raise ValueError(f"the drafter is {type(drafter).__name__}; expected one of the registry")
    emitted = rows.batch * spec.max_emitted
    if isinstance(drafter, StandaloneDrafter):
        emitted = 2 * rows.batch  # propose has written the rest (drafter.last_two)
    # EAGLE-3 projects the target's features once; EAGLE-1 joins tokens and features in a forward.
    is_eagle3 = isinstance(drafter, EagleDrafter) and isinstance(drafter.head, Eagle3Head)
    head = matrices(tuple(w for w in drafter.table if "lm_head" in w.path))
    body = matrices(drafter.table, skip=("lm_head",))
    later = matrices(drafter.table, skip=("fc",) if is_eagle3 else ())
    read = kv_read(rows, drafter.cache_groups)
    advance = products(rows, body, tokens=emitted) + products(rows, head, tokens=rows.batch) + read
    forward = products(rows, later, tokens=rows.batch) + read
    return total((advance, *[forward] * (spec.num_steps - 1)))


def _multi_layer(drafter: MultiLayerDrafter, spec: SpeculativeConfig, rows: Rows) -> Floor:
    """Advance runs every layer over what was emitted, and scores with the first; propose runs
    layer s over the s rows of a path, and scores with it."""
    head = matrices(tuple(w for w in drafter.table if "lm_head" in w.path))
    scores = products(rows, head, tokens=rows.batch)
    found = [scores]
    for layer, group in enumerate(drafter.cache_groups):
        own = matrices(tuple(w for w in drafter.table if w.path[:2] == ("layers", layer)))
        read = kv_read(rows, (group,))
        found += [products(rows, own, tokens=rows.batch * spec.max_emitted), read]
        if layer:
            found += [products(rows, own, tokens=rows.batch * layer), read, scores]
    return total(found)
