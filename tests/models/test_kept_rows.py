"""A forward with `kept` gives the same numbers for less work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.feed_forward import DenseSpec
from tests.support.caches import empty_pools
from tests.support.tiny_models import tiny_draft_config, tiny_target_config

TARGET = tiny_target_config()
FFN = TARGET.one_layer.ffn
assert isinstance(FFN, DenseSpec)
LENS = (5, 4, 6)
STARTS = np.append(0, np.cumsum(LENS))
SIZE = STARTS[-1] + 49  # padding, so that the saved work matters
LAST = jnp.asarray(STARTS[1:] - 1, jnp.int32)
ROWS = AttentionMetadata(
    page_table=jnp.asarray([[1], [2], [3]], jnp.int32),
    prefix_lens=jnp.zeros(3, jnp.int32),
    cu_q_lens=jnp.asarray(STARTS, jnp.int32),
    q_positions=jnp.asarray(
        np.concatenate([*(np.arange(n) for n in LENS), np.zeros(49)]), jnp.int32
    ),
)


def pools(model: Any) -> tuple[jax.Array, ...]:
    return empty_pools(
        model.cache_groups, num_pages=4, page_size=8, shards=1, dtype=jnp.float32, ops=Ops()
    )


def ids() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, TARGET.vocab_size, SIZE), jnp.int32)


def flops(run: Any, *args: Any) -> float:
    cost: Any = jax.jit(run).lower(*args).compile().cost_analysis()
    return float(cost["flops"])


@pytest.mark.parametrize("aux", [(0, 1), (TARGET.num_layers,)], ids=str)
def test_a_target_computes_the_last_layer_of_the_rows_that_are_asked_for(
    aux: tuple[int, ...],
) -> None:
    model = Decoder(TARGET, Ops(), aux_layer_ids=aux)
    params = init_params(model.table, seed=0, dtype=jnp.float32)

    def run(params: Params, kept: jax.Array | None) -> Any:
        return model.forward(params, ids(), pools(model), ROWS, queries_per_row=None, kept=kept)

    hidden, features, kv = run(params, None)
    some, same_features, same_kv = run(params, LAST)
    np.testing.assert_allclose(some, np.asarray(hidden)[np.asarray(LAST)], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(same_features, features)
    for pool, same in zip(kv, same_kv, strict=True):
        np.testing.assert_array_equal(same, pool)

    of_mlp = 2 * (SIZE - len(LENS)) * 3 * TARGET.hidden_size * FFN.inner
    saved = flops(lambda p: run(p, None), params) - flops(lambda p: run(p, LAST), params)
    if TARGET.num_layers in aux:  # the last layer's output of every row is read
        assert saved < of_mlp / 2
    else:
        assert saved > of_mlp


def test_a_head_computes_its_last_layer_of_the_rows_that_are_asked_for() -> None:
    config = tiny_draft_config(TARGET)
    layers = config.layer.layers * 2
    config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, layers=layers))
    head = FeatureHead(config, Ops())
    params = init_params(head.table, seed=1, dtype=jnp.float32)
    hidden = jnp.asarray(
        np.random.default_rng(2).normal(size=(SIZE, config.layer.hidden_size)), jnp.float32
    )

    def run(params: Params, kept: jax.Array | None) -> Any:
        kv = pools(Decoder(config.layer, Ops()))
        return head.forward(params, ids(), hidden, kv, ROWS, queries_per_row=None, kept=kept)

    out, kv = run(params, None)
    some, same_kv = run(params, LAST)
    np.testing.assert_allclose(some, np.asarray(out)[np.asarray(LAST)], rtol=1e-5, atol=1e-6)
    for pool, same in zip(kv, same_kv, strict=True):
        np.testing.assert_array_equal(same, pool)
    assert flops(lambda p: run(p, LAST), params) < flops(lambda p: run(p, None), params)
