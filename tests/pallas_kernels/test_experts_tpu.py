"""The experts' kernel for a TPU, interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import tpu as experts_tpu
from jspec.spec.layers.feed_forward import Gate
from tests.pallas_kernels.expert_cases import (
    MANY,
    Mixture,
    check_a_poisoned_token,
    check_against_xla,
    draw,
    drawn_moes,
    rounded_case,
)

KERNEL = jax.jit(
    partial(experts_tpu.run_experts, tile_m=16, interpret=True), static_argnames="gate"
)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(drawn_moes)
def test_equals_xla_and_reads_no_untouched_expert(case: tuple[Mixture, int, float]) -> None:
    moe, seed, skew = case
    check_against_xla(KERNEL, moe, draw(moe, seed=seed, skew=skew))


def test_several_tiles_of_columns_and_weights_that_lie_turned() -> None:
    """The last tile is partial; [2, 256, 160] is stored as [2, 160, 256]."""
    moe = Mixture(5, 2, 2, 160, 64, dtype=jnp.bfloat16)
    assert experts_tpu.is_stored_transposed(256, 160)
    assert not experts_tpu.is_stored_transposed(160, 128)
    drawn = draw(moe, seed=4, skew=0.0)
    check_against_xla(KERNEL, moe, drawn)


@pytest.mark.parametrize("token", [0, 39])
def test_a_poisoned_token_changes_no_other(token: int) -> None:
    check_a_poisoned_token(KERNEL, MANY, draw(MANY, seed=1, skew=0.5), token=token)


def test_products_are_rounded_before_the_bias() -> None:
    drawn, expected = rounded_case()
    out = KERNEL(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=Gate.SILU)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


@pytest.mark.parametrize(
    ("pairs", "num_experts", "tile_m"),
    [
        (0, 8, None),
        (1, 128, 16),
        (2048, 128, 16),
        (1024, 32, 32),
        (8192, 128, 64),
        (8193, 128, None),
    ],
)
def test_blocks_are_as_long_as_an_experts_rows(
    pairs: int, num_experts: int, tile_m: int | None
) -> None:
    assert experts_tpu.choose_tile_m(pairs, num_experts) == tile_m


@pytest.mark.parametrize(("tokens", "kernels"), [(40, True), (400, False)])
def test_the_bundle_takes_the_kernel_for_few_tokens(tokens: int, kernels: bool) -> None:
    drawn = draw(replace(MANY, tokens=tokens), seed=0, skew=0.0)
    run = partial(OPS["tpu"].experts, gate=MANY.gate)
    text = str(jax.make_jaxpr(run)(drawn.x, drawn.ids, drawn.weights, drawn.params))
    assert ("experts_product" in text) == kernels
    assert ("ragged_dot" in text) != kernels
