"""The experts of one of several shards: the shards' sums add up to the whole, in every bundle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.bundles import OPS
from jspec.spec.layers.feed_forward import Gate
from tests.pallas_kernels.expert_cases import XLA, Drawn, Mixture, draw

MOE = Mixture(9, 2, 6, 32, 16, Gate.CLAMPED, bias=True)
SHARDS = 3
OWN = MOE.num_experts // SHARDS


def of_shard(drawn: Drawn, shard: int) -> tuple[jax.Array, dict[str, Any]]:
    """Return (ids among the shard's experts, their params)."""
    first = shard * OWN
    is_own = (drawn.ids >= first) & (drawn.ids < first + OWN)
    params = {name: w[first : first + OWN] for name, w in drawn.with_nan_in_untouched().items()}
    return jnp.where(is_own, drawn.ids - first, OWN), params


@pytest.mark.parametrize(
    "bundle", ["xla", "tpu_interpret", pytest.param("gpu_interpret", marks=pytest.mark.slow)]
)
def test_shards_add_up_and_one_without_tokens_adds_nothing(bundle: str) -> None:
    drawn = draw(MOE, seed=0, skew=0.0)
    drawn = Drawn(drawn.x, drawn.ids % (2 * OWN), drawn.weights, drawn.params)
    run = jax.jit(
        lambda ids, params: OPS[bundle].experts(
            drawn.x, ids, drawn.weights, params, gate=MOE.gate, shards=SHARDS
        )
    )
    parts = [run(*of_shard(drawn, shard)) for shard in range(SHARDS)]
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(parts[-1], 0.0)
    whole = XLA(drawn.x, drawn.ids, drawn.weights, drawn.params, gate=MOE.gate)
    np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=2e-6 * np.abs(whole).max() + 1e-6)
