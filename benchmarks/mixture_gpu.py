"""A whole mixture of a layer on a GPU, norms included: as a step runs it, and as shards run it.

    python -m benchmarks.mixture_gpu [--quick] [--models qwen3-30b-a3b gpt-oss-20b]
                                     [--tokens 1 4 8 16 32 64 256]

A program is 24 layers in a chain, each fed by the one before it, over one layer's weights: tokens
change from layer to layer, and their experts with them. "mixture" is what a step runs at so many
tokens; "by parts" is the same with XLA's router and sums, as a shard of a moe is run. Then each
kernel alone that up to 16 tokens have, on other ids in each call ("choose" with one of XLA's before
it). The floor is the bytes of the experts that were drawn for the calls alone. --quick leaves out
the tilings beside the planned one; with them each is timed as the moe. Writes
benchmarks/results/mixture_gpu.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.experts_gpu import MODELS, Model, parameters
from benchmarks.gpu_timing import READ_TB_S, seconds_per_call
from jspec.layers.linear import Shard
from jspec.layers.moe import moe
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import gpu_few
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.experts.gpu_mixed_norm import mixed_norm
from jspec.pallas_kernels.experts.gpu_router import SLICE, choose, norm_and_score
from jspec.pallas_kernels.experts.tuning import ExpertsTuning, choose_few
from jspec.spec.model_spec import MoESpec, Routing

LAYERS, EPS = 24, 1e-6
TOKENS = (1, 4, 8, 16, 32, 64, 256)
RESULT = Path(__file__).parent / "results" / "mixture_gpu.json"
CHANGES: dict[str, dict[str, int]] = {
    "three stages": {"num_stages": 3},
    "six stages": {"num_stages": 6},
    "rounds of 128": {"gate_up_k": 128, "down_k": 128},
    "rounds of 128, three stages": {"gate_up_k": 128, "down_k": 128, "num_stages": 3},
    "down 128 columns": {"down_n": 128},
    "down 32 columns": {"down_n": 32},
    "gate and up 32 columns": {"gate_up_n": 32},
    "gate and up 128 columns": {"gate_up_n": 128},
    "eight warps": {"num_warps": 8},
    "two warps": {"num_warps": 2},
}


def spec_of(model: Model) -> MoESpec:
    routing = Routing.TOP_THEN_SOFTMAX if model.bias else Routing.SOFTMAX_THEN_TOP_NORMALIZED
    return MoESpec(
        num_experts=model.num_experts,
        top_k=model.top_k,
        inner=model.inner,
        routing=routing,
        gate=model.gate,
        bias=model.bias,
    )


def weights_of(name: str) -> dict[str, Any]:
    """router, experts and the scale of a norm."""
    model = MODELS[name]
    keys = jax.random.split(jax.random.key(7), 3)
    router = {
        "kernel": jax.random.normal(keys[0], (model.size, model.num_experts), jnp.bfloat16)
        * jnp.bfloat16(model.size**-0.5)
    }
    experts = dict(parameters(name))
    if model.bias:
        router["bias"] = jax.random.normal(keys[1], (model.num_experts,), jnp.bfloat16)
        shape = (model.num_experts, model.size)
        experts["down_bias"] = jax.random.normal(keys[2], shape, jnp.bfloat16)
    return {"router": router, "experts": experts, "scale": jnp.ones(model.size, jnp.bfloat16)}


def layers(
    name: str, *, tuning: ExpertsTuning | None = None, by_parts: bool = False, count: int = LAYERS
) -> Callable[..., Any]:
    """A chain of `count` MoEs: few_gpu's with `tuning`, a step's, or by parts."""
    spec, ops, interpret = spec_of(MODELS[name]), OPS["gpu"], jax.default_backend() != "gpu"
    ops = OPS["gpu_interpret"] if interpret else ops

    @jax.jit  # traced once for all layers
    def one(x: jax.Array, params: Any) -> jax.Array:
        scale = params["scale"]
        if tuning is not None:
            total, mixed = gpu_few.moe_of_sum(
                x, x, scale, params, eps=EPS, spec=spec, tuning=tuning, interpret=interpret
            )
            return ops.mixed_norm(total, mixed, scale, eps=EPS)[1]
        if not by_parts:
            fused = ops.moe_of_sum(x, x, scale, params, eps=EPS, spec=spec)
            if fused is None:
                raise ValueError(f"{name}, {x.shape[0]} tokens: no kernel serves the whole mixture")
            return ops.mixed_norm(*fused, scale, eps=EPS)[1]
        total, normed = ops.add_norm(x, x, scale, eps=EPS)
        out = moe(params, normed, spec=spec, shard=Shard(), ops=ops)
        return ops.add_norm(total, out, scale, eps=EPS)[1]

    def chain(x: jax.Array, params: Any) -> jax.Array:
        for _ in range(count):
            x = one(x, params)
        return x

    return jax.jit(chain)


def drawn(model: Model, tokens: int) -> tuple[jax.Array, list[jax.Array], float]:
    """(tokens, ids of each call, the floor of a call in seconds)."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, model.size)), jnp.bfloat16)
    order = np.argsort(rng.random((LAYERS, tokens, model.num_experts)), axis=2)
    ids = order[..., : model.top_k]
    touched = np.mean([len(np.unique(call)) for call in ids])
    floor = float(touched) * model.expert_bytes / READ_TB_S / 1e12
    return x, [jnp.asarray(call, jnp.int32) for call in ids], floor


def kernels(name: str, tokens: int, tuning: ExpertsTuning) -> dict[str, Callable[..., Any]]:
    """Each kernel alone, LAYERS times: functions of (x, ids of the calls, params)."""
    model, interpret = MODELS[name], jax.default_backend() != "gpu"
    spec = spec_of(model)
    how: dict[str, Any] = {"tuning": tuning, "interpret": interpret}

    def score(x: jax.Array, params: Any) -> tuple[jax.Array, ...]:
        kernel = params["router"]["kernel"]
        return norm_and_score(x, x, params["scale"], kernel, eps=EPS, interpret=interpret)

    def rows(ids: jax.Array, width: int) -> jax.Array:
        return jnp.ones((ids.size, width), jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def one(kernel: str, x: jax.Array, ids: jax.Array, params: Any) -> Any:
        experts, bias = params["experts"], params["router"].get("bias")
        if kernel == "norm_and_score":
            return score(x, params)
        if kernel == "choose":
            shares = jnp.zeros((num_shares(model), tokens, model.num_experts)) + ids[0, 0]
            rule: dict[str, Any] = {"top_k": spec.top_k, "routing": spec.routing}
            return choose(shares, bias, dtype=x.dtype, interpret=interpret, **rule)
        if kernel == "gate_up":
            return gpu_few.gate_up(x, ids, experts, gate=spec.gate, **how)
        if kernel == "down":
            inner = rows(ids, model.inner)
            return gpu_few.down(inner, ids, experts["down"], size=model.size, **how)
        weights = jnp.ones(ids.shape, jnp.float32)
        mixed = Mixed(rows=rows(ids, model.size), weights=weights, ids=ids)
        return mixed_norm(x, mixed, params["scale"], eps=EPS, interpret=interpret)

    def all_calls(kernel: str, x: jax.Array, calls: list[jax.Array], params: Any) -> list[Any]:
        out = []
        for ids in calls:
            out.append(one(kernel, x, ids, params))
            if kernel.endswith("norm") or kernel == "norm_and_score":  # (sum, its norm, ...)
                x = out[-1][1]
        return out

    names = ("norm_and_score", "choose", "gate_up", "down", "mixed_norm")
    return {kernel: jax.jit(partial(all_calls, kernel)) for kernel in names}


def num_shares(model: Model) -> int:
    """How many shares the router's product has."""
    return -(-model.size // SLICE)


def measured(name: str, tokens: int, *, quick: bool) -> list[dict[str, Any]]:
    """Every program of one model and number of tokens; what fails says so."""
    model, params = MODELS[name], weights_of(name)
    x, calls, floor = drawn(model, tokens)
    planned = choose_few(
        tokens,
        num_experts=model.num_experts,
        size=model.size,
        inner=model.inner,
        is_packed=model.is_packed,
    )
    found: list[dict[str, Any]] = []

    def time(program: str, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        row: dict[str, Any] = {"model": name, "tokens": tokens, "program": program}
        try:
            seconds = seconds_per_call(run, arguments, LAYERS, samples=5)
            row |= {"microseconds": seconds * 1e6, "floor_microseconds": floor * 1e6}
        except Exception as failure:  # the other programs go on
            row["error"] = f"{type(failure).__name__}: {str(failure)[:200]}"
        found.append(row)
        print(row, flush=True)

    time("by parts", layers(name, by_parts=True), (x, params))
    time("mixture", layers(name), (x, params))
    if planned is None:
        return found
    for kernel, run in kernels(name, tokens, planned).items():
        time(kernel, run, (x, calls, params))
    for change, values in () if quick else CHANGES.items():
        tuning = replace(planned, **values)
        if tuning.problem(model.size, model.inner, is_packed=model.is_packed) is None:
            time(change, layers(name, tuning=tuning), (x, params))
            found[-1]["tuning"] = asdict(tuning)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        for tokens in arguments.tokens:
            rows += measured(name, tokens, quick=arguments.quick)
    for row in rows:
        if "microseconds" in row:
            share = row["floor_microseconds"] / row["microseconds"]
            times = f"{row['microseconds']:8.1f} us, floor {row['floor_microseconds']:7.1f}"
            print(f"{row['model']:14} {row['tokens']:>4} {row['program']:28} {times} {share:6.1%}")
    write_result(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
