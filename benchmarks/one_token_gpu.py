"""One token's mixture in one launch against the launches it stands for: checked, then timed.

    python -m benchmarks.one_token_gpu [--models qwen3-30b-a3b gpt-oss-20b] [--out FILE]

Checked: ids and weights equal, rows near those of the separate kernels and of float64 products,
every expert that no token goes to NaN, and the same bits a hundred times over. Timed as
mixture_gpu.py times it: a chain of 24 mixtures with their norms, the two programs in turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.experts_gpu import MODELS
from benchmarks.gpu_timing import seconds_per_call
from benchmarks.mixture_gpu import EPS, LAYERS, drawn, layers, spec_of, weights_of
from jspec.pallas_kernels.experts import few_gpu
from jspec.pallas_kernels.experts.plan import choose_few
from jspec.pallas_kernels.experts.reference import gated

ROUNDS = 5


def checked(name: str) -> dict[str, Any]:
    """Errors against the separate kernels and float64; raises AssertionError where they differ."""
    model, params = MODELS[name], weights_of(name)
    spec = spec_of(model)
    tuning = choose_few(1, num_experts=model.num_experts, size=model.size, inner=model.inner)
    assert tuning is not None and tuning.in_one_launch

    def run(in_one: bool) -> Any:
        kind = replace(tuning, in_one_launch=in_one)
        return jax.jit(
            lambda x, p: few_gpu.mixture_of_sum(
                x, x, p["scale"], p, eps=EPS, spec=spec, tuning=kind
            )
        )

    one, separate = run(True), run(False)
    worst = {"against_separate": 0.0, "against_float64": 0.0}
    for seed in range(4):
        x = jax.random.normal(jax.random.key(100 + seed), (1, model.size), jnp.bfloat16)
        _, expected = separate(x, params)
        chosen = np.asarray(expected.ids[0])
        is_chosen = jnp.zeros(model.num_experts, bool).at[chosen].set(True)
        poisoned = dict(params["experts"])
        for key, value in params["experts"].items():
            keep = is_chosen.reshape(-1, *[1] * (value.ndim - 1))
            poisoned[key] = jnp.where(keep, value, jnp.nan)
        _, found = one(x, params | {"experts": poisoned})
        assert np.array_equal(np.asarray(found.ids), np.asarray(expected.ids)), (found, expected)
        assert np.allclose(found.weights, expected.weights, rtol=1e-5, atol=1e-7)
        rows = np.asarray(found.rows, np.float64)
        other = np.asarray(expected.rows, np.float64)
        exact = _exact(x, params, chosen, spec.gate)
        for key, right in (("against_separate", other), ("against_float64", exact)):
            error = float(np.linalg.norm(rows - right) / np.linalg.norm(right))
            worst[key] = max(worst[key], error)
            assert error < 1e-2, (key, error)
        for _ in range(25):
            again = one(x, params)[1]
            assert np.array_equal(np.asarray(again.rows), np.asarray(found.rows))
        del poisoned
    return worst


def _exact(x: jax.Array, params: Any, chosen: np.ndarray, gate: Any) -> np.ndarray:
    """Each pair's row by float64 products, with inputs and inner rows rounded as in the kernel."""
    wide = np.asarray(x + x, np.float64)[0]
    normed = wide / np.sqrt(np.mean(wide * wide) + EPS)
    normed = np.asarray(jnp.asarray(normed, jnp.bfloat16), np.float64)
    experts, out = params["experts"], []
    for expert in chosen:
        sums = normed @ np.asarray(experts["gate_up"][expert], np.float64)
        if "gate_up_bias" in experts:
            sums = sums + np.asarray(experts["gate_up_bias"][expert], np.float64)
        first, up = np.split(sums.astype(np.float32), 2)
        inner = gated(jnp.asarray(first), jnp.asarray(up), gate=gate).astype(jnp.bfloat16)
        out.append(np.asarray(inner, np.float64) @ np.asarray(experts["down"][expert], np.float64))
    return np.stack(out)


def timed(name: str) -> dict[str, Any]:
    """Microseconds of a mixture and its norms, both programs in turns, and the medians' ratio."""
    model, params = MODELS[name], weights_of(name)
    x, _, floor = drawn(model, 1)
    tuning = choose_few(1, num_experts=model.num_experts, size=model.size, inner=model.inner)
    assert tuning is not None
    programs = {
        "separate": layers(name, replace(tuning, in_one_launch=False)),
        "one": layers(name, tuning),
    }
    found: dict[str, list[float]] = {key: [] for key in programs}
    for _ in range(ROUNDS):
        for key, run in programs.items():
            seconds = seconds_per_call(run, (x, params), LAYERS, samples=3)
            found[key].append(round(1e6 * seconds, 2))
    ratio = median(found["one"]) / median(found["separate"])
    return {"microseconds": found, "ratio": round(ratio, 4), "floor_microseconds": floor * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = []
    for name in options.models:
        cells.append({"model": name, "errors": checked(name)} | timed(name))
        print(cells[-1], flush=True)
        if options.out:
            write_result(options.out, {"cells": cells})


if __name__ == "__main__":
    main()
