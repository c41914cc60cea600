"""The products of latent attention for few tokens, interpreted, against the layer over XLA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.layers.latent_attention import latent_attention
from jspec.layers.linear import Shard
from jspec.models.decoder_params import latent_params
from jspec.pallas_kernels.latent_attention.gpu_few import serves
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.ops_gpu import GpuOps
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.rope import QueryGrowth

SIZE = 256
SPEC = LatentAttentionSpec(
    num_heads=2,
    num_kv_heads=2,
    head_dim=128,
    v_dim=32,
    rotary_dim=64,
    kv_rank=128,
    q_rank=64,
    interleaved=True,
)


@dataclass(frozen=True, slots=True)
class FewOps(Ops):
    """XLA, but for the kernels under test."""

    def latent_inputs(self, *given: Any, **how: Any) -> Any:
        return GpuOps(interpret=True).latent_inputs(*given, **how)

    def latent_outputs(self, *given: Any, **how: Any) -> Any:
        return GpuOps(interpret=True).latent_outputs(*given, **how)


def drawn(tokens: int, dtype: Any = jnp.float32) -> tuple[dict[str, Any], jax.Array]:
    """Return (params of the attention, its input)."""
    rng = np.random.default_rng(tokens)
    params: dict[str, Any] = {}
    for weight in latent_params(SPEC, size=SIZE):
        _, part, name = weight.path
        numbers = rng.standard_normal(weight.shape) / np.sqrt(weight.shape[0])
        if len(weight.shape) == 1:
            numbers = 1 + numbers
        params.setdefault(part, {})[name] = jnp.asarray(numbers, dtype)
    return params, jnp.asarray(rng.standard_normal((tokens, SIZE)), dtype)


def attend(queries: jax.Array, records: jax.Array) -> jax.Array:
    """Mix each token with its own record, so that all of both reaches the result."""
    scores = jnp.einsum("thd,td->th", queries, records) / queries.shape[-1]
    return records[:, None] + scores[..., None]


@partial(jax.jit, static_argnames=("spec", "ops"))
def run(params: Any, x: jax.Array, *, spec: LatentAttentionSpec, ops: Ops) -> jax.Array:
    positions = 7 + 3 * jnp.arange(x.shape[0], dtype=jnp.int32)
    how: Any = {"spec": spec, "eps": 1e-6, "shard": Shard(), "ops": ops}
    return latent_attention(params, x, positions, attend, **how)


@pytest.mark.slow_cases("True-16")
@pytest.mark.parametrize("tokens", [1, 5, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equals_the_layer_over_xla(tokens: int, interleaved: bool) -> None:
    spec = replace(SPEC, interleaved=interleaved)
    params, x = drawn(tokens)
    found, expected = (run(params, x, spec=spec, ops=ops) for ops in (FewOps(), Ops()))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    program = str(jax.make_jaxpr(partial(run, spec=spec, ops=FewOps()))(params, x))
    names = ("latent_down", "latent_up", "latent_absorb", "latent_values")
    assert [name for name in names if name not in program] == []


def test_a_token_that_is_not_finite_stays_alone() -> None:
    params, x = drawn(5)
    clean = run(params, x, spec=SPEC, ops=FewOps())
    found = run(params, x.at[2].set(jnp.nan), spec=SPEC, ops=FewOps())
    others = np.asarray([0, 1, 3, 4])
    np.testing.assert_array_equal(found[others], clean[others])
    assert np.isnan(np.asarray(found[2])).all()


def test_other_layers_are_left_to_xla() -> None:
    params, x = drawn(3)
    assert serves(params, x, SPEC)
    assert not serves(params, x, replace(SPEC, growth=QueryGrowth(beta=0.1, period=8)))
    assert not serves(params, x, replace(SPEC, q_rank=None))
    assert not serves(params, jnp.zeros((17, SIZE)), SPEC)
    assert not serves(params, x.astype(jnp.bfloat16), SPEC)
    adapted = params | {"q": params["q"] | {"adapters": None}}
    assert not serves(adapted, x, SPEC)
