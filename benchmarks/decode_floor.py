"""What a decode step makes one H200 read at least: weights once, experts that are touched, and KV.

Of a mixture the experts that evenly drawn tokens touch: X * (1 - (1 - k / X) ** tokens) of X.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_parts import READ_BYTES_PER_SECOND
from jspec.models.params import Init, with_formats
from jspec.models.registry import table_of
from jspec.spec.model_spec import ModelSpec, MoESpec
from jspec.spec.weight_format import Formats, itemsize, num_bytes


def experts_touched(moe: MoESpec, *, tokens: int) -> float:
    """How many experts of one layer `tokens` tokens reach, on average."""
    share = moe.top_k / moe.num_experts
    return float(moe.num_experts * (1 - (1 - share) ** tokens))


def read_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    nodes: int,
    context: int,
    dtype: str,
    formats: Formats = (),
) -> float:
    """Of the target's forward for `batch` rows of `nodes` tokens after `context` others.

    Tables are looked up, not read; a layer with a window reads no more than that.
    """
    total = 0.0
    for weight in with_formats(table_of(spec), formats):
        if weight.init in (Init.TABLE, Init.IDS):
            continue
        size = float(num_bytes(weight.format_in(dtype), weight.shape))
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
    """Milliseconds of `read_bytes` at the rate that one H200 was seen to read."""
    return 1e3 * read_bytes(spec, **step) / READ_BYTES_PER_SECOND
