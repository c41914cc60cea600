"""What a decode step makes one H200 read at least: weights once, experts that are touched, and KV.

Of a mixture the experts that evenly drawn tokens touch: X * (1 - (1 - k / X) ** tokens) of X.
"""

from __future__ import annotations

import math

from benchmarks.step_parts import READ_BYTES_PER_SECOND
from jspec.models.params import Init
from jspec.models.registry import table_of
from jspec.spec.model_spec import ModelSpec, MoESpec


def experts_touched(moe: MoESpec, *, tokens: int) -> float:
    """How many experts of one layer `tokens` tokens reach, on average."""
    share = moe.top_k / moe.num_experts
    return float(moe.num_experts * (1 - (1 - share) ** tokens))


def read_bytes(spec: ModelSpec, *, batch: int, nodes: int, context: int, itemsize: int) -> float:
    """Of the target's forward for `batch` rows of `nodes` tokens after `context` others.

    Tables are looked up, not read; a layer with a window reads no more than that.
    """
    total = 0.0
    for weight in table_of(spec):
        if weight.init in (Init.TABLE, Init.IDS):
            continue
        size = float(math.prod(weight.shape))
        if "experts" in weight.path:
            moe = spec.layers[int(weight.path[1])].ffn
            assert isinstance(moe, MoESpec)
            size *= experts_touched(moe, tokens=batch * nodes) / moe.num_experts
        total += size * (weight.num_bits // 8 or itemsize)
    for layer in spec.layers:
        heads = layer.attention
        seen = context if heads.window is None else min(context, heads.window)
        total += batch * seen * 2 * heads.num_kv_heads * heads.head_dim * itemsize
    return total


def floor_ms(spec: ModelSpec, *, batch: int, nodes: int, context: int, itemsize: int) -> float:
    """Milliseconds of `read_bytes` at the rate that one H200 was seen to read."""
    found = read_bytes(spec, batch=batch, nodes=nodes, context=context, itemsize=itemsize)
    return 1e3 * found / READ_BYTES_PER_SECOND
