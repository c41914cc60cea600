"""The least bytes and operations of a decode step on one H200, as milliseconds.

`floor_ms` counts the bytes of a target's forward: weights once, active experts, and KV. Uniformly
drawn tokens touch X * (1 - (1 - k / X) ** tokens) of an MoE's X experts. `target_floor` and
`draft_floor` split a chain's step with any drafter into forwards: each matrix is read once, or
multiplied by the tokens, whichever takes longer; KV is read once per forward. Embedding tables are
indexed, not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import FLOPS_PER_SECOND, READ_BYTES_PER_SECOND
from jspec.config.limits import SpeculativeConfig
from jspec.models.decoder import Decoder
from jspec.models.params import Init, ParamSpec, ParamTable, with_formats
from jspec.models.registry import table_of
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.weight_format import MXFP4, Formats, Shape, WeightFormat, itemsize, num_bytes
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.block import BlockDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.ranked import EagleDrafter, StandaloneDrafter

ID_BYTES = 4  # of a token in a lookup's history


def experts_touched(moe: MoESpec, *, tokens: int) -> float:
    """Return the mean number of one layer's experts that `tokens` tokens use."""
    share = moe.top_k / moe.num_experts
    return float(moe.num_experts * (1 - (1 - share) ** tokens))


def weight_bytes(format: WeightFormat, shape: Shape) -> float:
    """Return the bytes of a weight without padding."""
    if isinstance(format, MXFP4):
        return math.prod(shape) * (0.5 + 1 / format.group)
    return float(num_bytes(format, shape))


def read_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    nodes: int,
    context: int,
    dtype: str,
    formats: Formats = (),
) -> float:
    """Return the bytes that the target's forward reads for `batch` rows of `nodes` tokens.

    They follow `context` others, of which a layer with a window reads only the window's.
    """
    total = 0.0
    for weight in with_formats(table_of(spec), formats):
        if weight.init in (Init.TABLE, Init.IDS):
            continue
        size = weight_bytes(weight.format_in(dtype), weight.shape)
        if "experts" in weight.path:
            moe = spec.layers[int(weight.path[1])].ffn
            assert isinstance(moe, MoESpec)
            size *= experts_touched(moe, tokens=batch * nodes) / moe.num_experts
        total += size
    for layer in spec.layers:
        heads = layer.attention
        seen = context if heads.window is None else min(context, heads.window)
        total += batch * seen * 2 * heads.num_kv_heads * heads.head_dim * itemsize(dtype)
    return total


def floor_ms(spec: ModelSpec, **step: Any) -> float:
    """Return the milliseconds of `read_bytes` at the measured rate of one H200."""
    return 1e3 * read_bytes(spec, **step) / READ_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Milliseconds of one or several forwards.

    By bytes, by operations, and as the sum of the longer of both over matrices (`ms`).
    """

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
        """Return the floor of one matrix times `tokens` tokens."""
        read = 1e3 * numbers * self.itemsize / READ_BYTES_PER_SECOND
        flops = 1e3 * 2 * numbers * tokens / FLOPS_PER_SECOND
        return Floor(bytes_ms=read, flops_ms=flops, ms=max(read, flops))

    def read(self, num_bytes: float) -> Floor:
        """Return the floor of reading alone."""
        ms = 1e3 * num_bytes / READ_BYTES_PER_SECOND
        return Floor(bytes_ms=ms, ms=ms)


def matrices(table: ParamTable, *, skip: tuple[str, ...] = ()) -> list[ParamSpec]:
    """Return the weights that a forward multiplies by, without tables, norms and id maps.

    skip: names in the paths of those to leave out.
    """
    return [
        spec
        for spec in table
        if len(spec.shape) >= 2
        and spec.init not in (Init.TABLE, Init.IDS)
        and not set(skip) & set(spec.path)
    ]


def products(rows: Rows, weights: Iterable[ParamSpec], *, tokens: int) -> Floor:
    """Return the floor of all `weights` times as many tokens."""
    return total(rows.product(math.prod(weight.shape), tokens) for weight in weights)


def total(floors: Iterable[Floor]) -> Floor:
    return sum(floors, Floor())


def kv_read(rows: Rows, groups: Iterable[CacheGroup]) -> Floor:
    """Return the floor of reading K and V of all committed tokens in every layer of `groups`."""
    entries = [(group.num_layers, group.entry) for group in groups]
    numbers = sum(n * e.num_heads * (e.qk_dim + e.v_dim) for n, e in entries)
    return rows.read(rows.batch * rows.context * numbers * rows.itemsize)


def target_floor(target: Decoder, rows: Rows, *, nodes: int) -> Floor:
    """Return the floor of verifying N nodes a row. Raises ValueError for an MoE (read_bytes)."""
    if any(isinstance(layer.ffn, MoESpec) for layer in target.spec.layers):
        raise ValueError("the target is a mixture of experts; expected a dense one")
    weights = matrices(target.table)
    return products(rows, weights, tokens=rows.batch * nodes) + kv_read(rows, target.cache_groups)


def draft_floor(drafter: Drafter, draft_shape: SpeculativeConfig, rows: Rows) -> Floor:
    """Return the floor of a drafter in one step: S - 1 forwards that propose, one that advances M
    tokens per row; of a block drafter, one forward of a block and K and V of M tokens per row.

    Raises ValueError for a drafter that is not known here.
    """
    if isinstance(drafter, NgramDrafter):
        return rows.read(rows.batch * rows.context * ID_BYTES)
    if isinstance(drafter, MultiLayerDrafter):
        return _multi_layer(drafter, draft_shape, rows)
    if isinstance(drafter, BlockDrafter):
        return _block(drafter, draft_shape, rows)
    if not isinstance(drafter, EagleDrafter | StandaloneDrafter):
        raise ValueError(f"the drafter is {type(drafter).__name__}; expected one of the registry")
    emitted = rows.batch * draft_shape.max_emitted
    if isinstance(drafter, StandaloneDrafter):
        emitted = 2 * rows.batch  # propose has written the rest (drafter.last_two)
    # EAGLE-3 projects the target's features once, by fc; EAGLE-1 joins them in every forward.
    head = matrices(tuple(w for w in drafter.table if "lm_head" in w.path))
    body = matrices(drafter.table, skip=("lm_head",))
    later = matrices(drafter.table, skip=("fc",))
    read = kv_read(rows, drafter.cache_groups)
    advance = products(rows, body, tokens=emitted) + products(rows, head, tokens=rows.batch) + read
    forward = products(rows, later, tokens=rows.batch) + read
    return total((advance, *[forward] * (draft_shape.num_steps - 1)))


def _block(drafter: BlockDrafter, draft_shape: SpeculativeConfig, rows: Rows) -> Floor:
    """Propose runs all layers over a block and scores S of its rows; advance runs fc and the
    products of K and V over the emitted tokens, whose logits are not needed."""
    spec = drafter.model.spec
    emitted = rows.batch * draft_shape.max_emitted
    block = rows.batch * spec.num_rows(draft_shape.num_steps)
    head = matrices(tuple(w for w in drafter.table if "lm_head" in w.path))
    fc = matrices(tuple(w for w in drafter.table if w.path[0] == "fc"))
    layers = matrices(tuple(w for w in drafter.table if w.path[0] == "layers"))
    own = spec.layer.layers[0].softmax_attention
    kv = spec.layer.hidden_size * own.num_kv_heads * own.head_dim * 2 * spec.layer.num_layers
    propose = (
        products(rows, layers, tokens=block)
        + products(rows, head, tokens=rows.batch * draft_shape.num_steps)
        + kv_read(rows, drafter.cache_groups)
    )
    return propose + products(rows, fc, tokens=emitted) + rows.product(kv, emitted)


def _multi_layer(drafter: MultiLayerDrafter, draft_shape: SpeculativeConfig, rows: Rows) -> Floor:
    """Advance runs every layer over what was emitted, and scores with the first; propose runs
    layer s over the s rows of a path, and scores with it."""
    head = matrices(tuple(w for w in drafter.table if "lm_head" in w.path))
    scores = products(rows, head, tokens=rows.batch)
    found = [scores]
    for layer, group in enumerate(drafter.cache_groups):
        own = matrices(tuple(w for w in drafter.table if w.path[:2] == ("layers", layer)))
        read = kv_read(rows, (group,))
        found += [products(rows, own, tokens=rows.batch * draft_shape.max_emitted), read]
        if layer:
            found += [products(rows, own, tokens=rows.batch * layer), read, scores]
    return total(found)
