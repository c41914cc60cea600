"""Experts that stay in fp8: the kernels, interpreted, against products in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device.fp8 import E4M3, FP8Weight
from jspec.device.weights import dense
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import reference
from jspec.pallas_kernels.experts.gpu import run_experts
from jspec.pallas_kernels.experts.tuning import MOST_FP8, choose_experts, for_fp8, sizes_of
from jspec.spec.layers.feed_forward import Gate, MoESpec, Routing
from jspec.spec.weight_format import FP8
from tests.device.test_weights import stored
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.test_experts_gpu_mxfp4 import routed

FORMS = [FP8(has_blocks=True), FP8()]
IDS = ["blocks", "channels"]
SIZES = 4, 192, 128  # X, E of a block and a half, I; two of a token's experts are chosen


def fp8_experts(format: FP8, X: int, size: int, inner: int) -> dict[str, Any]:
    """Return experts whose products are of the order of one."""
    shapes = {"gate_up": (X, size, 2 * inner), "down": (X, inner, size)}
    found = {name: stored(format, shape)[1] for name, shape in shapes.items()}
    return {
        name: replace(weight, scales=weight.scales * weight.shape[1] ** -0.5 / 64)
        for name, weight in found.items()
    }


def with_nan_in_untouched(params: dict[str, Any], ids: jax.Array) -> dict[str, Any]:
    """Poison the codes and scales of experts without tokens."""
    is_free = ~np.isin(np.arange(SIZES[0]), np.asarray(ids))
    assert is_free.any()

    def poisoned(array: jax.Array) -> jax.Array:
        found = np.array(array)
        found[is_free] = np.nan
        return jnp.asarray(found)

    return jax.tree.map(poisoned, params)


def exact(x: jax.Array, ids: jax.Array, weights: jax.Array, params: Any) -> np.ndarray:
    """Return the experts' sum in float64, of each code times its scale."""
    gate_up, down = (
        np.asarray(params[name].codes, np.float64)
        * np.asarray(jnp.broadcast_to(params[name].scale_of_each(), params[name].shape))
        for name in ("gate_up", "down")
    )
    out = np.zeros(x.shape)
    for token, experts in enumerate(np.asarray(ids)):
        for place, expert in enumerate(experts):
            gate, up = np.split(np.asarray(x[token], np.float64) @ gate_up[expert], 2)
            inner = gate / (1 + np.exp(-gate)) * up
            out[token] += float(weights[token, place]) * (inner @ down[expert])
    return out


def few_tokens(tokens: int, X: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (x, ids, weights) whose ids leave the last expert free."""
    x, ids, weights = routed(tokens, X - 1, 2, SIZES[1])
    return x.astype(jnp.float32), ids, weights


@pytest.mark.parametrize("format", FORMS, ids=IDS)
def test_products_are_those_of_the_codes_times_their_scales(format: FP8) -> None:
    """In float32, so only the order of sums differs."""
    params = fp8_experts(format, *SIZES)
    x, ids, weights = few_tokens(3, SIZES[0])
    expected = exact(x, ids, weights, params)
    assert np.abs(expected).max() > 0.1
    poisoned = with_nan_in_untouched(params, ids)
    found = OPS["gpu_interpret"].experts(x, ids, weights, poisoned, gate=Gate.SILU)
    close = {"rtol": 0, "atol": 2e-6 * np.abs(expected).max()}
    np.testing.assert_allclose(found, expected, **close)
    unpacked = reference.run_experts(x, ids, weights, params, gate=Gate.SILU)
    np.testing.assert_allclose(unpacked, expected, **close)


def test_nan_stays_in_its_token_and_in_its_column() -> None:
    params = fp8_experts(FP8(has_blocks=True), *SIZES)
    x, ids, weights = few_tokens(3, SIZES[0])
    sizes = sizes_of(params)
    tuning = choose_experts(ids.size, **sizes._asdict())
    assert tuning is not None
    how: Any = {"gate": Gate.SILU, "tuning": for_fp8(tuning, sizes), "interpret": True}
    run = jax.jit(lambda x, params: run_experts(x, ids, weights, params, **how).sum())
    clean = np.asarray(run(x, params))
    of_token = np.asarray(run(x.at[1].set(jnp.nan), params))
    assert np.isnan(of_token[1]).all()
    np.testing.assert_array_equal(np.delete(of_token, 1, axis=0), np.delete(clean, 1, axis=0))
    down: FP8Weight = params["down"]
    expert, column = int(ids[0, 0]), 150
    for code in (0x7F, 0xFF):
        nan = np.uint8(code).view(E4M3)
        changed = replace(down, codes=down.codes.at[expert, 3, column].set(nan))
        found = np.asarray(run(x, params | {"down": changed}))
        hit = np.zeros(found.shape, bool)
        hit[(np.asarray(ids) == expert).any(axis=1), column] = True
        assert np.isnan(found[hit]).all()
        np.testing.assert_array_equal(found[~hit], clean[~hit])


def moe_sums(params: Any, x: jax.Array, *, ops: str, X: int, inner: int) -> jax.Array:
    rng = np.random.default_rng(0)
    router = {"kernel": jnp.asarray(rng.normal(size=(x.shape[1], X)), x.dtype)}
    spec = MoESpec(num_experts=X, top_k=2, inner=inner, routing=Routing.SOFTMAX_THEN_TOP)
    given = {"router": router, "experts": params}
    scale = jnp.ones(x.shape[1], x.dtype)
    found = OPS[ops].moe_of_sum(x, x, scale, given, eps=1e-5, spec=spec)
    assert found is not None
    return found[2].sum()


@pytest.mark.parametrize(
    ("tokens", "format"), [(1, FORMS[0]), (5, FORMS[1]), (40, FORMS[0])], ids=["one", "few", "many"]
)
def test_a_whole_moe_equals_that_of_unpacked_experts(tokens: int, format: FP8) -> None:
    """In float32 unpacked values are exact."""
    params = fp8_experts(format, *SIZES)
    wide = {name: dense(weight, jnp.float32) for name, weight in params.items()}
    x, _, _ = few_tokens(tokens, SIZES[0])
    how: Any = {"ops": "gpu_interpret", "X": SIZES[0], "inner": SIZES[2]}
    found, expected = (np.asarray(moe_sums(each, x, **how)) for each in (params, wide))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_experts_of_many_tokens_are_unpacked_first() -> None:
    X, size, inner = 4, 256, 128
    params = fp8_experts(FP8(), X, size, inner)

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
        return OPS["gpu"].experts(x, ids, weights, params, gate=Gate.SILU)

    for pairs in (MOST_FP8 * X, MOST_FP8 * X + X):
        x = jax.ShapeDtypeStruct((pairs // 2, size), jnp.bfloat16)
        ids, weights = (jax.ShapeDtypeStruct((pairs // 2, 2), t) for t in (jnp.int32, jnp.float32))
        text = str(jax.make_jaxpr(run)(x, ids, weights, params))
        is_packed = pairs == MOST_FP8 * X
        assert (f"{{f8_e4m3fn[{X},{size},{inner}]}}" in text) is is_packed  # down, column-major
        assert (f"{{bf16[{X},{inner},{size}]}}" in text) is not is_packed


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300])
@pytest.mark.parametrize("format", FORMS, ids=IDS)
def test_fp8_experts_on_a_gpu(format: FP8, tokens: int) -> None:
    """Qwen3-30B-A3B's widths. Codes are converted exactly; bf16 rounds the unpacked ones."""
    params = fp8_experts(format, 8, 2048, 768)
    wide = {name: dense(weight, jnp.bfloat16) for name, weight in params.items()}
    x = routed(tokens, 8, 2, 2048)[0]
    found, expected = (
        np.asarray(moe_sums(each, x, ops="gpu", X=8, inner=768), np.float32)
        for each in (params, wide)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-6 * np.abs(expected).max())
