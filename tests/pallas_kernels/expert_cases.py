"""Shared code of the tests of the experts' kernels: small MoEs, and routings of every skew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.pallas_kernels.experts.reference import run_experts
from jspec.spec.layers.feed_forward import Gate

XLA = jax.jit(run_experts, static_argnames="gate")


@dataclass(frozen=True)
class Mixture:
    """T tokens, top k of X experts, E and I wide."""

    tokens: int
    top_k: int
    num_experts: int
    size: int
    inner: int
    gate: Gate = Gate.SILU
    bias: bool = False
    dtype: Any = jnp.float32


# Few, since each compiles: one token; a partial block for most experts; several blocks an expert.
ONE = Mixture(1, 2, 4, 32, 16, Gate.CLAMPED, bias=True)
SOME = Mixture(9, 3, 6, 48, 32)
MANY = Mixture(40, 2, 3, 32, 48, Gate.CLAMPED, bias=True, dtype=jnp.bfloat16)
MIXTURES = (ONE, SOME, MANY)


@dataclass(frozen=True)
class Drawn:
    """An MoE's arguments."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    params: dict[str, jax.Array]

    @property
    def untouched(self) -> np.ndarray:
        """Return bool[X]: True for experts without tokens."""
        num_experts = self.params["down"].shape[0]
        return ~np.isin(np.arange(num_experts), np.asarray(self.ids))

    def with_nan_in_untouched(self) -> dict[str, jax.Array]:
        hidden = {
            name: jnp.where(self.untouched.reshape(-1, *[1] * (w.ndim - 1)), jnp.nan, w)
            for name, w in self.params.items()
        }
        return {name: w.astype(self.params[name].dtype) for name, w in hidden.items()}


def draw(moe: Mixture, *, seed: int, skew: float) -> Drawn:
    """Draw arguments. skew 0: any experts; 1: every token to the same ones."""
    rng = np.random.default_rng(seed)
    X, E, inner = moe.num_experts, moe.size, moe.inner
    height = rng.random(X)
    order = skew * height + (1 - skew) * rng.random((moe.tokens, X))
    ids = np.argsort(order, axis=1)[:, : moe.top_k]
    array = partial(jnp.asarray, dtype=moe.dtype)
    params = {
        "gate_up": array(rng.standard_normal((X, E, 2 * inner)) * E**-0.5),
        "down": array(rng.standard_normal((X, inner, E)) * inner**-0.5),
    }
    if moe.bias:
        params["gate_up_bias"] = array(rng.standard_normal((X, 2 * inner)))
    return Drawn(
        x=array(rng.standard_normal((moe.tokens, E))),
        ids=jnp.asarray(ids, jnp.int32),
        weights=jnp.asarray(rng.random(ids.shape), jnp.float32),
        params=params,
    )


drawn_moes = st.tuples(
    st.sampled_from(MIXTURES), st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.5, 1.0))
)


def check_against_xla(run: Any, moe: Mixture, drawn: Drawn) -> None:
    """Compare run(x, ids, weights, params, gate) with XLA, also with NaN in experts without tokens.

    float32 agrees within the order of the sums, bf16 within a few roundings.
    """
    expected = XLA(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=moe.gate)
    params = drawn.with_nan_in_untouched()
    out = run(drawn.x, drawn.ids, drawn.weights, params, gate=moe.gate)
    assert out.dtype == moe.dtype
    found, wanted = (np.asarray(x, np.float32) for x in (out, expected))
    share = 2e-6 if moe.dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * np.abs(wanted).max() + 1e-6)


def check_a_poisoned_token(run: Any, moe: Mixture, drawn: Drawn, *, token: int) -> None:
    """Check that NaN in one token's row changes no bit of another's."""
    gate = moe.gate
    clean = run(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=gate)
    x = drawn.x.at[token].set(jnp.nan)
    out = run(x, drawn.ids, drawn.weights, drawn.params, gate=gate)
    others = np.arange(moe.tokens) != token
    np.testing.assert_array_equal(np.asarray(out)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(out, np.float32)[token]).all()


def rounded_case() -> tuple[Drawn, np.ndarray]:
    """Return a case whose result is 0 only if each product is rounded before its bias is added.

    bf16 rounds the product 1 + 2**-9 to 1, and the bias is -1: the gate is 0.
    """
    x = jnp.zeros((1, 16), jnp.bfloat16).at[0, :2].set(1.0)
    gate_up = jnp.ones((1, 16, 32), jnp.bfloat16).at[:, 1].set(2.0**-9)
    params = {
        "gate_up": gate_up,
        "down": jnp.ones((1, 16, 16), jnp.bfloat16),
        "gate_up_bias": jnp.concatenate(
            [jnp.full((1, 16), -1.0), jnp.ones((1, 16))], axis=1
        ).astype(jnp.bfloat16),
    }
    one = Drawn(x, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), params)
    return one, np.zeros((1, 16), np.float32)
