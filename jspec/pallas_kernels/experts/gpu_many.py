"""An MoE layer for any number of tokens on an NVIDIA GPU (Triton), in seven launches; XLA needs 20.

    add_and_norm -> score -> choose -> count, deal -> gate_up -> down -> [mixed_norm, by the next]

Packed experts run so for any number of tokens; few are normed and scored in one launch.
Rounding is that of the separate kernels (gpu.py, add_norm/gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from jspec.pallas_kernels.add_norm.gpu import add_and_norm
from jspec.pallas_kernels.experts import tuning
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.experts.gpu_router import choose, norm_and_score, rule_of, score
from jspec.spec.layers.feed_forward import MoESpec


def moe_of_sum(
    x: Float[Array, "T E"],
    delta: Float[Array, "T E"],
    scale: Float[Array, "E"],
    params: Mapping[str, Mapping[str, Any]],
    *,
    eps: float,
    spec: MoESpec,
    run: Callable[..., Mixed],
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"], Mixed]:
    """Compute gpu_few.moe_of_sum for any number of tokens above 0. run: run_experts with tiles."""
    router, experts = params["router"], dict(params["experts"])
    if x.shape[0] <= tuning.MOST_TOKENS:
        total, normed, shares = norm_and_score(
            x, delta, scale, router["kernel"], eps=eps, interpret=interpret
        )
    else:
        total, normed = add_and_norm(x, delta, scale, eps=eps, interpret=interpret)
        shares = score(normed, router["kernel"], interpret=interpret)
    rule = rule_of(router, spec, dtype=x.dtype)
    ids, weights = choose(shares, router.get("bias"), **rule, interpret=interpret)
    mixed = run(normed, ids, weights, experts, gate=spec.gate, interpret=interpret)
    return total, normed, replace(mixed, bias=experts.get("down_bias"))
