"""The experts' kernels for a GPU, interpreted: against XLA's grouped product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import gpu as experts_gpu
from jspec.pallas_kernels.experts.tuning import ExpertsTuning, choose_experts, choose_packed
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_30B_A3B
from jspec.spec.layers.feed_forward import Gate
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.expert_cases import (
    MANY,
    XLA,
    Mixture,
    check_a_poisoned_token,
    check_against_xla,
    draw,
    drawn_moes,
    rounded_case,
)

SMALL = ExpertsTuning(gate_up_n=16, gate_up_k=16, down_n=16, down_k=16)


def summed(*arguments: Any, gate: Gate) -> jax.Array:
    mixed = experts_gpu.run_experts(*arguments, gate=gate, tuning=SMALL, interpret=True)
    return mixed.sum()


KERNEL = jax.jit(summed, static_argnames="gate")
QWEN = {"num_experts": 128, "size": 2048, "inner": 768}
GPT_OSS = dict(zip(("size", "inner"), GPT_OSS_20B.widths, strict=True)) | {"num_experts": 32}


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(drawn_moes)
def test_equals_xla_and_reads_no_untouched_expert(case: tuple[Mixture, int, float]) -> None:
    moe, seed, skew = case
    check_against_xla(KERNEL, moe, draw(moe, seed=seed, skew=skew))


@pytest.mark.parametrize("token", [0, 39])
def test_a_poisoned_token_changes_no_other(token: int) -> None:
    check_a_poisoned_token(KERNEL, MANY, draw(MANY, seed=1, skew=0.5), token=token)


def test_products_are_rounded_before_the_bias() -> None:
    drawn, expected = rounded_case()
    out = KERNEL(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=Gate.SILU)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


@pytest.mark.parametrize(
    ("shape", "pairs", "tile_m"),
    [
        (QWEN, 8, 16),
        (QWEN, 8 * 8192, 128),
        (GPT_OSS, 4, 16),
        (QWEN, 8 * 128, 16),
        (QWEN, 8 * 256, 32),
        (GPT_OSS, 4 * 128, 32),
        (GPT_OSS, 4 * 256, 64),
        (GPT_OSS, 4 * 512, 64),
        (GPT_OSS, 4 * 520, 128),
    ],
)
def test_real_sizes_are_served(shape: dict[str, int], pairs: int, tile_m: int) -> None:
    tuning = choose_experts(pairs, **shape)
    assert tuning is not None
    assert tuning.tile_m == tile_m
    assert tuning.problem(shape["size"], shape["inner"]) is None


@pytest.mark.parametrize(
    ("pairs", "rows"), [(4, 8), (4 * 64, 16), (4 * 128, 24), (4 * 256, 48), (4 * 512, 64)]
)
def test_packed_experts_have_blocks_that_few_exceed(pairs: int, rows: int) -> None:
    assert choose_packed(pairs, **GPT_OSS, is_packed=True) == rows


def test_packed_experts_of_many_tokens_or_of_odd_sizes_are_unpacked_first() -> None:
    assert choose_packed(4 * 513, **GPT_OSS, is_packed=True) is None
    assert choose_packed(4, **{**GPT_OSS, "size": 96}, is_packed=True) is None
    assert choose_experts(4 * 513, **GPT_OSS) is not None


def test_few_pairs_get_narrow_tiles_so_that_every_multiprocessor_has_work() -> None:
    one, many = choose_experts(8, **QWEN), choose_experts(512, **QWEN)
    assert one is not None
    assert many is not None
    assert one.gate_up_n < many.gate_up_n


@pytest.mark.parametrize(
    "change", [{"size": 2888}, {"inner": 100}, {"num_experts": 1024}, {"num_pairs": 0}]
)
def test_what_no_tile_serves_is_left_to_xla(change: dict[str, int]) -> None:
    arguments = {"num_pairs": 64, **QWEN, "inner": 768, **change}
    if change.get("num_experts"):
        arguments["inner"] = 2048  # more elements than 32 bits count
    assert choose_experts(**arguments) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_n": 64}, "gate_up_n 64 does not divide I 96"),
        ({"down_k": 8}, "down_k is 8; expected a power of two from 16"),
        ({"tile_m": 24}, "tile_m is 24; expected a power of two from 16"),
        ({"num_stages": 900}, "bytes of shared memory are needed"),
    ],
)
def test_tiles_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    assert SMALL.problem(96, 96) is None
    assert message in str(replace(SMALL, **change).problem(96, 96))


def test_the_kernel_refuses_tiles_that_do_not_fit() -> None:
    drawn = draw(MANY, seed=0, skew=0.0)
    with pytest.raises(ValueError, match=r"E 32 and I 48: gate_up_n 32 does not divide I 48"):
        experts_gpu.run_experts(
            drawn.x,
            drawn.ids,
            drawn.weights,
            drawn.params,
            gate=MANY.gate,
            tuning=replace(SMALL, gate_up_n=32),
        )


@pytest.mark.parametrize(("name", "kernels"), [("gpu", True), ("xla", False)])
@pytest.mark.parametrize("inner", [48, 40])
def test_the_bundle_takes_the_kernels_where_they_serve(
    name: str, kernels: bool, inner: int
) -> None:
    drawn = draw(replace(MANY, inner=inner), seed=0, skew=0.0)
    run = partial(OPS[name].experts, gate=MANY.gate)
    text = str(jax.make_jaxpr(run)(drawn.x, drawn.ids, drawn.weights, drawn.params))
    assert ("experts_gate_up" in text) == (kernels and inner == 48)
    assert ("ragged_dot" in text) != ("experts_gate_up" in text)


@needs_cuda_compiler
@pytest.mark.slow
def test_the_kernels_compile_for_an_h200() -> None:
    lines = output_of("tests.pallas_kernels.gpu_experts_compile").splitlines()
    assert len([line for line in lines if line.startswith("compiled")]) == 28


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1024])
@pytest.mark.parametrize("model", ["qwen", "gpt-oss"])
def test_equals_xla_on_the_chip(model: str, tokens: int) -> None:
    """An eighth of the experts, so that XLA's dense form stays small."""
    moe = Mixture(tokens, 8, 16, *QWEN3_30B_A3B.widths, dtype=jnp.bfloat16)
    if model == "gpt-oss":
        moe = Mixture(
            tokens, 4, 4, *GPT_OSS_20B.widths, Gate.CLAMPED, bias=True, dtype=jnp.bfloat16
        )
    drawn = draw(moe, seed=3, skew=0.5)
    run = jax.jit(OPS["gpu"].experts, static_argnames="gate")
    expected = XLA(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=moe.gate)
    out = run(drawn.x, drawn.ids, drawn.weights, drawn.with_nan_in_untouched(), gate=moe.gate)
    found, wanted = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())
