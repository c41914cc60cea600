"""Layers over the interpreted GPU kernels, against the same over XLA.

Each kernel has its own tests; these cover what connects them: the residual stream as two summands,
captured features, query layouts, a bias, and padding rows.
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

from jspec.layers.norm import Residual
from jspec.models.attends import PagedAttend
from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import LayerSettings, Params, run_layer
from jspec.models.params import ParamTable
from jspec.models.placement import abstract_params
from jspec.models.registry import table_of
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import tuning
from jspec.pallas_kernels.gated_mlp.gpu import LEAST_TOKENS, LEAST_TOKENS_OF_PROMPTS, gated_product
from jspec.pallas_kernels.gated_mlp.tuning import GatedTuning
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import FP8
from jspec.spec.head_spec import eagle3_spec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec, cache_groups, cached_in, uniform_decoder
from tests.pallas_kernels.chips import needs_mosaic_gpu
from tests.support.caches import empty_pools

pytestmark = [needs_mosaic_gpu, pytest.mark.usefixtures("few_programs")]

QUERIES = 4
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}


def biased(**changes: Any) -> ModelSpec:
    """Return a decoder with biases on q, k and v alone."""
    spec = uniform_decoder(**(SIZES | changes))
    attention = dataclasses.replace(spec.one_layer.attention, qkv_bias=True)
    layer = dataclasses.replace(spec.one_layer, attention=attention)
    return dataclasses.replace(spec, layers=(layer,) * spec.num_layers)


CONFIG = biased()
ROWS = AttentionMetadata(
    page_table=jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32),
    prefix_lens=jnp.asarray([20, 7], jnp.int32),
    cu_q_lens=jnp.asarray([0, QUERIES, 2 * QUERIES - 1], jnp.int32),  # the last query is padding
    q_positions=jnp.asarray([*range(20, 24), *range(7, 11)], jnp.int32),
)
LIVE = slice(0, 2 * QUERIES - 1)


def drawn(table: ParamTable, seed: int) -> Params:
    """Return random bf16 parameters of a table."""
    leaves, structure = jax.tree.flatten(abstract_params(table, dtype=jnp.bfloat16))
    rng = np.random.default_rng(seed)
    values = [
        jnp.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer)
        else jnp.asarray(rng.normal(size=leaf.shape) * 0.05, leaf.dtype)
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, values)


def pool(num_layers: int) -> tuple[jax.Array, ...]:
    """Return random pages of 16 tokens; the dummy page holds NaN."""
    empty = empty_pools(
        cache_groups(biased(num_layers=num_layers), name="all"),
        num_pages=7,
        page_size=16,
        shards=1,
        dtype=jnp.bfloat16,
        ops=OPS["xla"],
    )
    rng = np.random.default_rng(7)
    full = (jnp.asarray(rng.normal(size=pages.shape), pages.dtype) for pages in empty)
    return tuple(pages.at[0].set(jnp.nan) for pages in full)


def assert_close(mine: Any, expected: Any) -> None:
    """Compare within bf16's rounding of values of about one."""
    np.testing.assert_allclose(
        np.asarray(mine, np.float32), np.asarray(expected, np.float32), atol=0.03, rtol=0.03
    )


@pytest.mark.parametrize(
    ("moe_at", "aux", "few", "queries_per_row"),
    [
        (1, (0, 1, 2), 8, QUERIES),
        (0, (0, 2), 7, None),
    ],
)
def test_a_mixture_gives_what_it_gives_over_xla(
    moe_at: int,
    aux: tuple[int, ...],
    few: int,
    queries_per_row: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unsummed outputs of an MoE layer reach captured features and the last norm, or the next
    norm.

    few: most tokens that gpu_few serves; gpu_many serves the others, among them prompts.
    """
    monkeypatch.setattr(tuning, "MOST_TOKENS", few)
    ffn = MoESpec(num_experts=6, top_k=2, inner=16 * few)  # a layer is traced once for its spec
    dense, moe = CONFIG.one_layer, dataclasses.replace(CONFIG.one_layer, ffn=ffn)
    layers = (dense, moe) if moe_at else (moe, dense)
    config = dataclasses.replace(CONFIG, layers=layers, family="qwen3_moe")
    params = drawn(table_of(config), 0)
    token_ids = jnp.arange(2 * QUERIES, dtype=jnp.int32)

    def run(ops: str) -> Any:
        target = Decoder(config, OPS[ops], aux_layer_ids=aux)

        def step(p: Params, kv: Any) -> Any:
            forward = partial(target.forward, queries_per_row=queries_per_row)
            hidden, features, kv = forward(p, token_ids, kv, ROWS)
            return hidden, features, kv, jnp.argmax(target.logits(p, hidden), axis=-1)

        program = jax.jit(step).trace(params, pool(2))
        names = {"experts_score_many"} if few < 2 * QUERIES else {"few_experts_down"}
        names |= {"experts_sum_norm"} if 1 not in aux else set()
        found = {name for name in names if name in str(program.jaxpr)}
        assert found == (names if ops == "gpu_interpret" else set())
        return program.lower().compile()(params, pool(2))

    mine, expected = run("gpu_interpret"), run("xla")
    assert_close(mine[0][LIVE], expected[0][LIVE])
    assert_close(mine[1][LIVE], expected[1][LIVE])
    np.testing.assert_array_equal(mine[3][LIVE], expected[3][LIVE])
    for pages, expected_pages in zip(mine[2], expected[2], strict=True):
        assert_close(pages[1:], expected_pages[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "queries_per_row", [QUERIES, pytest.param(None, marks=pytest.mark.exhaustive)]
)
def test_a_target_with_an_fp8_cache_gives_what_it_gives_over_xla(
    queries_per_row: int | None,
) -> None:
    """Few of the first layer's stored values differ: the projections round alike."""
    config = cached_in(CONFIG, FP8)
    params = drawn(table_of(config), 0)
    for layer in params["layers"].values():
        layer["attention"] |= {"k_scale": jnp.full(1, 0.02), "v_scale": jnp.full(1, 0.03)}
    token_ids = jnp.arange(2 * QUERIES, dtype=jnp.int32)
    pages = tuple((50 * x).astype(FP8) for x in pool(2))

    def run(ops: str) -> Any:
        target = Decoder(config, OPS[ops], aux_layer_ids=(0, 1, 2))
        forward = partial(target.forward, queries_per_row=queries_per_row)
        return jax.jit(lambda p, kv: forward(p, token_ids, kv, ROWS))(params, pages)

    mine, expected = run("gpu_interpret"), run("xla")
    assert_close(mine[0][LIVE], expected[0][LIVE])
    assert_close(mine[1][LIVE], expected[1][LIVE])
    first = [np.asarray(x[2][0][1:]).view(np.uint8) for x in (mine, expected)]
    assert np.mean(first[0] != first[1]) < 1e-3
    assert np.isfinite(np.asarray(mine[2][1][1:], np.float32)).all()


def test_a_draft_head_gives_what_it_gives_over_xla() -> None:
    config = eagle3_spec(
        layer=biased(num_layers=1),
        draft_vocab_size=64,
        target_hidden_size=CONFIG.hidden_size,
        aux_layer_ids=(0, 1, 2),
    )
    params = drawn(head_params(config), 1)
    token_ids = jnp.arange(2 * QUERIES, dtype=jnp.int32)
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(size=(2 * QUERIES, CONFIG.hidden_size)), jnp.bfloat16)

    def run(ops: str) -> Any:
        forward = partial(FeatureHead(config, OPS[ops]).forward, queries_per_row=QUERIES)
        return jax.jit(lambda p, kv: forward(p, token_ids, hidden, kv, ROWS))(params, pool(1))

    mine, expected = run("gpu_interpret"), run("xla")
    assert_close(mine[0][LIVE], expected[0][LIVE])
    assert_close(mine[1][0][1:], expected[1][0][1:])


@dataclasses.dataclass(frozen=True, slots=True)
class InterpretedGate(Ops):
    """XLA, with the gated product of the interpreted GPU kernel."""

    def gated_product(self, x: jax.Array, kernel: jax.Array, *, of_prompts: bool) -> jax.Array:
        del of_prompts
        tuning = GatedTuning(tile_n=64, num_stages=2, cluster=1, num_blocks=2)
        interpreter = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
        return gated_product(x, kernel, tuning=tuning, interpret=interpreter)


def test_a_layer_with_a_gated_product_gives_what_it_gives_without() -> None:
    spec = biased(hidden_size=64, intermediate_size=128)
    params = drawn(table_of(spec), 3)["layers"][0]
    rng = np.random.default_rng(4)
    stream = Residual(x=jnp.asarray(rng.normal(size=(2 * QUERIES, 64)), jnp.bfloat16))

    def run(ops: Ops) -> jax.Array:
        settings = LayerSettings(ops, queries_per_row=QUERIES)
        attend = PagedAttend(pool(1)[0], ROWS, spec.one_layer.attention, settings)
        out = run_layer(
            params, stream, ROWS.q_positions, attend, spec=spec.one_layer, settings=settings
        )
        return out.sum()

    assert_close(run(InterpretedGate())[LIVE], run(OPS["xla"])[LIVE])


def runs_the_gated_kernel(
    ops: str, num_tokens: int, dtype: Any = jnp.bfloat16, *, of_prompts: bool = False
) -> bool:
    """Return whether the program for this product contains the kernel."""
    gated = partial(OPS[ops].gated_product, of_prompts=of_prompts)
    shapes = (num_tokens, 4096), (4096, 28672)
    program = jax.make_jaxpr(gated)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return "wgmma" in str(program)  # the tensor cores' instruction, which XLA's has not


def test_the_gated_product_is_for_many_tokens_on_a_chip() -> None:
    assert runs_the_gated_kernel("gpu", LEAST_TOKENS)
    assert not runs_the_gated_kernel("gpu", LEAST_TOKENS // 2)
    assert runs_the_gated_kernel("gpu", LEAST_TOKENS_OF_PROMPTS, of_prompts=True)
    assert not runs_the_gated_kernel("gpu", LEAST_TOKENS_OF_PROMPTS // 2, of_prompts=True)
    assert not runs_the_gated_kernel("gpu", LEAST_TOKENS, jnp.float32)
    assert not runs_the_gated_kernel("gpu_interpret", LEAST_TOKENS)
    assert not runs_the_gated_kernel("xla", LEAST_TOKENS)
