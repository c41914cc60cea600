"""Shared code of the tests of whole MoEs on a GPU: small ones, and the same layer over XLA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.layers.linear import Shard
from jspec.layers.moe import moe_of_sum, route
from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.shapes import GLM_4_7_FLASH, GPT_OSS_20B, QWEN3_30B_A3B
from jspec.spec.layers.feed_forward import DenseSpec, Gate, MoESpec, Routing

EPS = 1e-5
# DeepSeek-V3's router in one group, as GLM-4.7-Flash has it, and its shared expert.
BY_SIGMOID = MoESpec(
    num_experts=6,
    top_k=3,
    inner=32,
    routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
    weight_scale=1.8,
    shared=DenseSpec(inner=32),
)
BY_SOFTMAX = [r for r in Routing if not r.name.startswith("SIGMOID")]


@dataclass(frozen=True)
class Case:
    """T tokens of an MoE with E inputs."""

    tokens: int
    size: int
    spec: MoESpec
    dtype: Any = jnp.float32


def spec_of(num_experts: int, top_k: int, inner: int, routing: Routing, *, bias: bool) -> MoESpec:
    gate = Gate.CLAMPED if bias else Gate.SILU
    return MoESpec(
        num_experts=num_experts, top_k=top_k, inner=inner, routing=routing, gate=gate, bias=bias
    )


def drawn(case: Case, seed: int) -> tuple[Residual, dict[str, Any], dict[str, jax.Array]]:
    """Return (the stream, params of the MoE, params of the norm before it)."""
    rng, spec = np.random.default_rng(seed), case.spec
    X, E, inner = spec.num_experts, case.size, spec.inner

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, case.dtype)

    router = {"kernel": array(E, X, scale=E**-0.5)}
    if spec.has_router_bias:
        router["router_bias"] = array(X).astype(jnp.float32)
    experts = {
        "gate_up": array(X, E, 2 * inner, scale=E**-0.5),
        "down": array(X, inner, E, scale=inner**-0.5),
    }
    if spec.bias:
        router["bias"] = array(X)
        experts |= {"gate_up_bias": array(X, 2 * inner), "down_bias": array(X, E)}
    params: dict[str, Any] = {"router": router, "experts": experts}
    if spec.shared is not None:
        width = spec.shared.inner
        params["shared"] = {
            "gate_up": {"kernel": array(E, 2 * width, scale=E**-0.5)},
            "down": {"kernel": array(width, E, scale=width**-0.5)},
        }
    if spec.shared_gate:
        params["shared_gate"] = {"kernel": array(E, 1, scale=E**-0.5)}
    stream = Residual(x=array(case.tokens, E), delta=array(case.tokens, E))
    return stream, params, {"scale": array(E) + 1}


def run(
    stream: Residual, params: Any, scale: Any, *, spec: MoESpec, ops: str
) -> tuple[jax.Array, jax.Array]:
    """Run a layer's MoE and the norm after it: (the stream's sum, its norm)."""
    out = moe_of_sum(params, scale, stream, spec=spec, eps=EPS, shard=Shard(), ops=OPS[ops])
    return norm_of_sum(scale, out, eps=EPS, ops=OPS[ops])


MINE = jax.jit(partial(run, ops="gpu_interpret"), static_argnames="spec")
XLA = jax.jit(partial(run, ops="xla"), static_argnames="spec")


def chosen(stream: Residual, params: Any, scale: Any, spec: MoESpec) -> np.ndarray:
    """Return the ids of every token, by the layer over XLA."""
    _, normed = norm_of_sum(scale, stream, eps=EPS, ops=OPS["xla"])
    return np.asarray(route(params["router"], normed, spec=spec)[0])


def with_nan_in_untouched(params: Any, ids: np.ndarray) -> Any:
    """Put NaN into the params of experts that no token chose."""
    hidden = ~np.isin(np.arange(params["experts"]["down"].shape[0]), ids)

    def poison(w: jax.Array) -> jax.Array:
        return jnp.where(hidden.reshape(-1, *[1] * (w.ndim - 1)), jnp.nan, w).astype(w.dtype)

    return params | {"experts": {name: poison(w) for name, w in params["experts"].items()}}


def served_by(case: Case) -> str:
    """Return the program of a layer's MoE by the GPU's bundle, which contains the kernels'
    names."""
    stream, params, scale = drawn(case, 0)
    program = jax.make_jaxpr(partial(run, spec=case.spec, ops="gpu_interpret"))
    return str(program(stream, params, scale))


def check_against_xla(case: Case, seed: int) -> None:
    """Compare with XLA, also with NaN in experts without tokens."""
    stream, params, scale = drawn(case, seed)
    expected = XLA(stream, params, scale, spec=case.spec)
    poisoned = with_nan_in_untouched(params, chosen(stream, params, scale, case.spec))
    found = MINE(stream, poisoned, scale, spec=case.spec)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.dtype == case.dtype
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)


def check_a_row_that_is_not_finite(case: Case, *, token: int, value: float) -> None:
    """Check that it changes no bit of another one."""
    stream, params, scale = drawn(case, 1)
    clean = MINE(stream, params, scale, spec=case.spec)
    poisoned = replace(stream, x=stream.x.at[token].set(value))
    found = MINE(poisoned, params, scale, spec=case.spec)
    others = np.arange(case.tokens) != token
    for mine, wanted in zip(found, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[others], np.asarray(wanted)[others])
    assert np.isnan(np.asarray(found[1])[token]).all()


def on_the_chip(model: str, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (by the kernels, by XLA) of the stream's sum and of its norm, at a model's real
    widths.

    There are few experts, so that XLA's dense form stays small.
    """
    shapes = {"gpt-oss": (GPT_OSS_20B, 8), "qwen": (QWEN3_30B_A3B, 16), "glm": (GLM_4_7_FLASH, 16)}
    shape, num_experts = shapes[model]
    assert isinstance(shape.ffn, MoESpec)
    spec = replace(shape.ffn, num_experts=num_experts)
    case = Case(tokens, shape.hidden_size, spec, jnp.bfloat16)
    stream, params, scale = drawn(case, 9)
    found = jax.jit(partial(run, spec=spec, ops="gpu"))(stream, params, scale)
    expected = jax.jit(partial(run, spec=spec, ops="xla"))(stream, params, scale)
    pairs = zip(found, expected, strict=True)
    return [
        (np.asarray(mine, np.float32), np.asarray(wanted, np.float32)) for mine, wanted in pairs
    ]
