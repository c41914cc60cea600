"""The gated product of a few tokens: interpreted, and run where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.gated_mlp.gpu_few import (
    MORE,
    MOST_TOKENS,
    ONE,
    SEVERAL,
    choose_few_gated,
    few_gated_product,
)
from jspec.pallas_kernels.gated_mlp.reference import gated_product as reference
from jspec.pallas_kernels.gated_mlp.tuning import FewTuning
from jspec.pallas_kernels.hopper import has_mosaic_gpu
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu
from tests.pallas_kernels.test_gated_mlp_gpu import assert_close, operands

SMALL = FewTuning(tile_n=16, tile_k=64, num_warps=4, num_stages=2)
SMALL_ONE = FewTuning(tile_n=4, tile_k=64, num_warps=4, by_lanes=True)
K, N = LLAMA_3_1_8B.widths
PRODUCT = "few_gated_product"


@pytest.mark.parametrize(
    ("m", "k", "n", "tuning"),
    [
        (1, 192, 44, SMALL_ONE),
        (2, 128, 32, SMALL),
        (15, 192, 48, SMALL),
        (17, 128, 32, replace(SMALL, num_lanes=32)),
    ],
)
def test_interpreted_product_equals_the_reference(
    m: int, k: int, n: int, tuning: FewTuning
) -> None:
    x, w = operands(m, k, 2 * n)
    got = few_gated_product(x, w, tuning=tuning, interpret=True)
    assert got.shape == (m, n)
    assert_close(got, reference(x, w))


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_token_that_overflows_spoils_no_other(poison: float) -> None:
    x, w = operands(3, 128, 64)
    spoiled = x.at[1].set(poison)
    clean = few_gated_product(x, w, tuning=SMALL, interpret=True)
    got = few_gated_product(spoiled, w, tuning=SMALL, interpret=True)
    assert not jnp.isfinite(got[1]).all()
    assert (got[jnp.array([0, 2])] == clean[jnp.array([0, 2])]).all()


def chosen(m: int, k: int = K, n: int = N, **more: Any) -> FewTuning | None:
    how = {"dtype": jnp.bfloat16, "column_major": True} | more
    return choose_few_gated(m, k, 2 * n, **how)


def test_a_layer_gets_the_program_for_its_tokens() -> None:
    one, several, more = (ONE, SEVERAL, MORE) if has_mosaic_gpu() else (None, None, None)
    assert chosen(1) == one
    assert chosen(2) == chosen(16) == several
    assert chosen(17) == chosen(MOST_TOKENS) == more
    assert chosen(MOST_TOKENS + 1) is None
    assert chosen(1, column_major=False) is None
    assert chosen(1, dtype=jnp.float32) is None
    assert chosen(1, k=2048, n=8192) == several  # one round of ONE's is not worth it
    assert chosen(4, n=12288) == several  # 192 tiles for 132 multiprocessors
    assert chosen(4, k=5120, n=17408) is None  # 272: a third turn for 8 of them
    assert chosen(4, k=K + 64) is None
    assert chosen(4, n=N + 32) is None


@needs_mosaic_gpu
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (8, 1), (32, 1), (MOST_TOKENS + 1, 0)])
def test_a_drafting_engine_multiplies_few_tokens_by_it(num_tokens: int, count: int) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((num_tokens, K), (K, 2 * N))]
    drafting = OPS["gpu"].with_columns(True)
    for ops, of_prompts, expected in (
        (drafting, False, count),
        (drafting, True, 0),
        (OPS["gpu"], False, 0),
    ):
        text = str(jax.make_jaxpr(partial(ops.gated_product, of_prompts=of_prompts))(*shapes))
        assert (PRODUCT in text) == bool(expected)


@pytest.mark.parametrize(
    ("shape", "tuning", "reason"),
    [
        ((0, 64, 32), SMALL, "M 0 is not 1 to 16"),
        ((17, 64, 32), SMALL, "M 17 is not 1 to 16"),
        ((2, 64, 32), SMALL_ONE, "M 2 is not 1 to 1"),
        ((4, 96, 32), SMALL, "tile_k 64 does not divide K 96"),
        ((4, 64, 48), SMALL, "32 columns do not divide 48"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shape: tuple[int, int, int], tuning: FewTuning, reason: str
) -> None:
    m, k, columns = shape
    x, w = jnp.zeros((m, k), jnp.bfloat16), jnp.zeros((k, columns), jnp.bfloat16)
    with pytest.raises(ValueError, match=reason):
        few_gated_product(x, w, tuning=tuning, interpret=True)


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 17, 32])
def test_runs_on_chip(m: int) -> None:
    x, w = operands(m, K, 2 * N)
    tuning = chosen(m)
    assert tuning is not None
    got = jax.jit(partial(few_gated_product, tuning=tuning))(x, w)
    assert_close(got, reference(x, w))
    if m > 1:  # and each token by itself, since the others must not matter
        alone = few_gated_product(x[:1], w, tuning=SEVERAL)
        assert_close(alone, reference(x[:1], w))
