"""The experts' kernel for many tokens on Hopper: in the GPU interpreter with its race detector,
compiled for an H200, and run where there is one. Poison: experts without tokens, rows that no pair
has, and memory that nobody wrote are NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.model_spec import Gate
from jspec.pallas_kernels.experts import grouped_gpu
from jspec.pallas_kernels.experts.grouped_plan import GroupedTuning
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu
from tests.pallas_kernels.expert_cases import (
    XLA,
    Mixture,
    check_against_xla,
    draw,
)

SMALL = GroupedTuning(gate_up_n=64, down_n=64, num_programs=2)
BF16 = jnp.bfloat16
CASES = {
    "partial blocks": (Mixture(40, 2, 3, 128, 64, Gate.CLAMPED, bias=True, dtype=BF16), SMALL),
    "one pair": (Mixture(1, 1, 4, 64, 64, dtype=BF16), SMALL),
    "several blocks an expert": (
        Mixture(200, 2, 3, 128, 192, dtype=BF16),
        replace(SMALL, gate_up_n=96, down_n=128, num_programs=3),
    ),
    "two consumers": (
        Mixture(300, 2, 3, 128, 192, Gate.CLAMPED, bias=True, dtype=BF16),
        replace(SMALL, tile_m=128, gate_up_n=48, down_n=128, num_programs=3),
    ),
    "three consumers": (
        Mixture(300, 2, 3, 64, 64, Gate.SILU_WITHIN_7, dtype=BF16),
        replace(SMALL, tile_m=192),
    ),
}
SKEWS = (0.0, 1.0)  # any experts; every token to the same ones


def interpreter_params() -> Any:
    return plgpu.InterpretGPUParams(
        detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan"
    )


def interpreted(tuning: GroupedTuning) -> Any:
    run = partial(grouped_gpu.run_experts, tuning=tuning, interpret=interpreter_params())
    return jax.jit(run, static_argnames="gate")


@needs_mosaic_gpu
@pytest.mark.parametrize("name", CASES)
def test_interpreted_it_equals_xla_without_a_race(name: str) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    mixture, tuning = CASES[name]
    run = interpreted(tuning)
    for skew in SKEWS:
        check_against_xla(run, mixture, draw(mixture, seed=1, skew=skew))
        assert not interpreter.get_races().races_found


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 40, 256, 1024])
@pytest.mark.parametrize("tile_m", [64, 128, 192])
@pytest.mark.parametrize("model", ["qwen", "gpt-oss"])
def test_equals_xla_on_the_chip(model: str, tile_m: int, tokens: int) -> None:
    """An eighth of the experts, so that XLA's dense form stays small."""
    mixture = Mixture(tokens, 8, 16, 2048, 768, dtype=BF16)
    tuning = GroupedTuning(tile_m=tile_m)
    if model == "gpt-oss":
        mixture = Mixture(tokens, 4, 4, 2880, 2880, Gate.CLAMPED, bias=True, dtype=BF16)
        tuning = GroupedTuning(tile_m=tile_m, gate_up_n=96, down_n=240)
    if tile_m == 192:
        tuning = replace(tuning, gate_up_n=96, down_n=192 if model == "gpt-oss" else 128)
    run = jax.jit(partial(grouped_gpu.run_experts, tuning=tuning), static_argnames="gate")
    for skew in SKEWS:
        drawn = draw(mixture, seed=3, skew=skew)
        expected = XLA(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=mixture.gate)
        out = run(
            drawn.x, drawn.ids, drawn.weights, drawn.with_nan_in_untouched(), gate=mixture.gate
        )
        found, wanted = (np.asarray(x, np.float32) for x in (out, expected))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())
