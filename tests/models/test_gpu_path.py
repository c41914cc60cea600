"""The layers over the GPU's kernels, interpreted, against the same over XLA.

Each kernel has its own tests; this is what lies between them: the residual stream as two summands,
captured features, queries laid out by one kernel for the next, a bias, and rows that are padding.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.config import Eagle3Config
from jspec.layers.linear import Shard
from jspec.layers.norm import Residual
from jspec.models.llama import Params, bind
from jspec.models.paged import (
    AttentionSettings,
    PagedAttend,
    PagedEagle3,
    PagedLlama,
    empty_pool,
)
from jspec.pallas_kernels.gated_matmul_gpu import (
    LEAST_TOKENS,
    LEAST_TOKENS_OF_PROMPTS,
    gated_product,
)
from jspec.pallas_kernels.rows import AttentionRows
from jspec.pallas_kernels.tuning import GatedTuning
from jspec.testing.tiny_models import tiny_target_config
from tests.pallas_kernels.chips import needs_mosaic_gpu

pytestmark = needs_mosaic_gpu

QUERIES = 4
CONFIG = dataclasses.replace(
    tiny_target_config(),
    head_dim=64,
    num_heads=4,
    num_kv_heads=2,
    num_layers=3,
    attention_bias=True,
)
ROWS = AttentionRows(
    page_table=jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32),
    prefix_lens=jnp.asarray([20, 7], jnp.int32),
    cu_q_lens=jnp.asarray([0, QUERIES, 2 * QUERIES - 1], jnp.int32),  # the last query is padding
    q_positions=jnp.asarray([*range(20, 24), *range(7, 11)], jnp.int32),
)
LIVE = slice(0, 2 * QUERIES - 1)


def drawn(abstract: Params, seed: int) -> Params:
    """Random parameters of these shapes in bf16."""
    leaves, structure = jax.tree.flatten(abstract)
    rng = np.random.default_rng(seed)
    values = [
        jnp.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
        else jnp.asarray(rng.normal(size=leaf.shape) * 0.05, leaf.dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, values)


def pool(num_layers: int) -> tuple[jax.Array, ...]:
    """Random pages of 16 tokens; the dummy page holds NaN."""
    empty = empty_pool(
        CONFIG, num_layers=num_layers, num_pages=7, page_size=16, shards=1, dtype=jnp.bfloat16
    )
    rng = np.random.default_rng(7)
    full = (jnp.asarray(rng.normal(size=pages.shape), pages.dtype) for pages in empty)
    return tuple(pages.at[0].set(jnp.nan) for pages in full)


def assert_close(mine: Any, expected: Any) -> None:
    """Within bf16's rounding of values of about one."""
    np.testing.assert_allclose(
        np.asarray(mine, np.float32), np.asarray(expected, np.float32), atol=0.03, rtol=0.03
    )


@pytest.mark.parametrize("queries_per_row", [QUERIES, None])
def test_a_target_gives_what_it_gives_over_xla(queries_per_row: int | None) -> None:
    target, abstract = PagedLlama.create(
        CONFIG, shard=Shard(), dtype=jnp.bfloat16, aux_layer_ids=(0, 1, 3)
    )
    params, token_ids = drawn(abstract, 0), jnp.arange(2 * QUERIES, dtype=jnp.int32)

    def run(backend: Any) -> Any:
        settings = AttentionSettings(backend, queries_per_row)
        return jax.jit(lambda p, kv: target.forward(p, token_ids, kv, ROWS, settings))(
            params, pool(3)
        )

    mine, expected = run("gpu_interpret"), run("xla")
    assert_close(mine[0][LIVE], expected[0][LIVE])
    assert_close(mine[1][LIVE], expected[1][LIVE])
    for pages, expected_pages in zip(mine[2], expected[2], strict=True):
        assert_close(pages[1:], expected_pages[1:])


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_draft_head_gives_what_it_gives_over_xla(norm_before_residual: bool) -> None:
    config = Eagle3Config(
        layer=dataclasses.replace(CONFIG, num_layers=1),
        draft_vocab_size=64,
        target_hidden_size=CONFIG.hidden_size,
        aux_layer_ids=(0, 1, 3),
        norm_before_residual=norm_before_residual,
    )
    head, abstract = PagedEagle3.create(config, shard=Shard(), dtype=jnp.bfloat16)
    params, token_ids = drawn(abstract, 1), jnp.arange(2 * QUERIES, dtype=jnp.int32)
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(size=(2 * QUERIES, CONFIG.hidden_size)), jnp.bfloat16)

    def run(backend: Any) -> Any:
        settings = AttentionSettings(backend, QUERIES)
        return jax.jit(lambda p, kv: head.forward(p, token_ids, hidden, kv, ROWS, settings))(
            params, pool(1)
        )

    mine, expected = run("gpu_interpret"), run("xla")
    assert_close(mine[0][LIVE], expected[0][LIVE])
    assert_close(mine[1][0][1:], expected[1][0][1:])


def test_a_layer_with_a_gated_product_gives_what_it_gives_without() -> None:
    config = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128)
    target, abstract = PagedLlama.create(config, shard=Shard(), dtype=jnp.bfloat16)
    layer = bind(target.layer_definition, drawn(abstract, 3)["layers"][0])
    rng = np.random.default_rng(4)
    stream = Residual(x=jnp.asarray(rng.normal(size=(2 * QUERIES, 64)), jnp.bfloat16))
    tuning = GatedTuning(tile_n=64, num_stages=2, cluster=1, num_blocks=2)
    interpreter = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    hook = partial(gated_product, tuning=tuning, interpret=interpreter)

    def run(hook: Any) -> jax.Array:
        attend = PagedAttend(pool(1)[0], ROWS, AttentionSettings("xla", QUERIES))
        out: jax.Array = layer(stream, ROWS.q_positions, attend, None, hook).sum()
        return out

    assert_close(run(hook)[LIVE], run(None)[LIVE])


def test_the_gated_product_is_for_many_tokens_on_a_chip() -> None:
    def chosen(
        backend: Any, num_tokens: int, dtype: Any = jnp.bfloat16, queries: int | None = 4
    ) -> Any:
        layer = {"mlp": {"gate_up": {"kernel": jax.ShapeDtypeStruct((4096, 28672), dtype)}}}
        settings = AttentionSettings(backend, queries)
        return settings.gated_product(num_tokens, layer, by_columns=False)

    assert chosen("gpu", LEAST_TOKENS).func is gated_product
    assert chosen("gpu", LEAST_TOKENS // 2) is None
    assert chosen("gpu", LEAST_TOKENS_OF_PROMPTS, queries=None).func is gated_product
    assert chosen("gpu", LEAST_TOKENS_OF_PROMPTS // 2, queries=None) is None
    assert chosen("gpu", LEAST_TOKENS, jnp.float32) is None
    assert chosen("gpu_interpret", LEAST_TOKENS) is None
    assert chosen("xla", LEAST_TOKENS) is None
