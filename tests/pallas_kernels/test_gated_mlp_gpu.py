"""The gated product on Hopper: in the GPU interpreter with its race detector, lowered and compiled
for CUDA, and run where there is a GPU. Memory outside M and unwritten memory are NaN.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas_kernels import hopper
from jspec.pallas_kernels.gated_mlp import gpu as gated_matmul_gpu
from jspec.pallas_kernels.gated_mlp.gpu import (
    DEFAULT,
    FEW,
    LEAST_FEW,
    LEAST_TOKENS,
    MOST_FEW,
    NARROW,
    choose_gated,
    gated_product,
)
from jspec.pallas_kernels.gated_mlp.reference import gated_product as reference
from jspec.pallas_kernels.gated_mlp.tuning import GatedTuning, Layout, Shared
from jspec.pallas_kernels.hopper import has_mosaic_gpu
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu, needs_older_jax

SMALL = GatedTuning(tile_n=64, num_stages=3, num_blocks=2, cluster=1)
PAIRS = replace(SMALL, cluster=2, num_blocks=4)
SMALL_PROGRAMS = {
    "a ragged M, three steps of K": (300, 192, 256, SMALL),
    "one tile, one step": (128, 64, 128, replace(SMALL, tile_n=64)),
    "M far below a tile": (8, 64, 256, SMALL),
    "groups of two rows": (400, 64, 256, replace(SMALL, group=2, num_blocks=3)),
    "pieces of 64": (256, 128, 256, replace(SMALL, piece=64)),
    "pieces of 64, wide": (256, 192, 256, replace(SMALL, piece=64, tile_n=128)),
    "pieces of 16": (128, 128, 256, replace(SMALL, piece=16)),
    "epilogue by itself": (300, 128, 256, replace(SMALL, overlaps=False, num_blocks=1)),
    "a tall tile": (512, 128, 256, replace(SMALL, tile_m=256)),
    "pairs share weights": (300, 128, 256, PAIRS),
    "pairs share tokens": (256, 128, 512, replace(PAIRS, shared=Shared.TOKENS)),
    "one consumer": (128, 128, 256, replace(SMALL, tile_m=64, num_consumers=1)),
    "by columns": (300, 128, 192, replace(PAIRS, tile_n=48, piece=16, layout=Layout.OUT_IN)),
    "by columns, alone": (128, 192, 256, replace(SMALL, layout=Layout.OUT_IN)),
    "few tokens": (16, 256, 192, replace(FEW, tile_n=48)),
    "tokens that fill no eight": (21, 256, 96, replace(FEW, tile_n=48)),
    "deep ring": (256, 128, 128, replace(SMALL, num_stages=5, num_blocks=1)),
}
# They differ from others in a size alone.
BY_HAND = (
    *("one tile, one step", "M far below a tile", "pieces of 64, wide", "pieces of 16"),
    *("by columns, alone", "deep ring", "pieces of 64", "a tall tile", "few tokens"),
    "one consumer",
)
K, N = LLAMA_3_1_8B.widths
# Tokens, columns of a result, and the tile's columns and piece: of Qwen3-8B, of half of
# Llama-3.1-8B, and of 25,600 columns, which as tiles of 128 are four turns and a bit.
WIDTHS = ((64, 12288, 96, 32), (256, 12288, 96, 32), (128, N // 2, 64, 32), (256, 25600, 80, 16))


def operands(m: int, k: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens and weights whose products are about one."""
    keys = jax.random.split(jax.random.key(m + k + columns))
    x = jax.random.normal(keys[0], (m, k), jnp.float32).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, columns), jnp.float32) * k**-0.5
    return x, w.astype(jnp.bfloat16)


def assert_close(got: jax.Array, expected: jax.Array) -> None:
    """Compare on the device, except for sums between two bf16 values added in another order.

    A gate, an up and their product may each be one value off.
    """
    expected = expected.astype(jnp.float32)
    error = jnp.abs(got.astype(jnp.float32) - expected) / (2**-8 + 2**-5 * jnp.abs(expected))
    worst = float(jnp.max(error))  # NaN where one is NaN
    assert worst <= 1, f"an error is {worst} times what rounding explains"


def interpreter_params() -> Any:
    return plgpu.InterpretGPUParams(
        detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan"
    )


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in BY_HAND else ())
        for name in SMALL_PROGRAMS
    ],
)
def test_interpreted_product_equals_the_reference_without_a_race(name: str) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    m, k, columns, tuning = SMALL_PROGRAMS[name]
    x, w = operands(m, k, columns)
    run = partial(gated_product, tuning=tuning, interpret=interpreter_params())
    assert_close(jax.jit(run)(x, w), reference(x, w))
    assert not interpreter.get_races().races_found


@needs_mosaic_gpu
def test_a_row_of_nan_stays_alone() -> None:
    """Padding tokens have arbitrary values."""
    x, w = operands(136, 128, 128)
    x = x.at[130:].set(jnp.nan)
    got = gated_product(x, w, tuning=SMALL, interpret=interpreter_params())
    assert_close(got[:130], reference(x, w)[:130])
    assert jnp.isnan(got[130:]).all()


@needs_mosaic_gpu
def test_values_at_the_ends_of_the_range_are_gated_as_in_the_reference() -> None:
    gate = jnp.asarray([-300.0, -95.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 95.0, 3e38], jnp.bfloat16)
    up = jnp.ones_like(gate)
    got = hopper.silu_gated(gate, up)
    expected = jax.nn.silu(gate.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=2**-8, atol=1e-30
    )


@needs_mosaic_gpu
@pytest.mark.slow
def test_the_checks_see_a_missing_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that does not wait overwrites tiles that are in use."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    monkeypatch.setattr(hopper, "_await_release", lambda *_: None)
    x, w = operands(128, 512, 128)
    tuning = replace(SMALL, num_stages=2, num_blocks=1)
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(gated_product(x, w, tuning=tuning, interpret=interpreter_params()))
    interpreter.reset_gpu_interpret_mode_state()


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 20),
    group=st.integers(1, 20),
    cluster=st.sampled_from([(1, Shared.WEIGHTS), (2, Shared.WEIGHTS), (2, Shared.TOKENS)]),
    blocks=st.integers(2, 12),
)
@settings(max_examples=25, deadline=None)
def test_every_tile_is_computed_once(
    rows: int, columns: int, group: int, cluster: tuple[int, Shared], blocks: int
) -> None:
    size, shared = cluster
    tuning = replace(SMALL, group=group, cluster=size, shared=shared, num_blocks=blocks)
    down, across = tuning.cluster_tiles
    width = columns * across * tuning.tile_n
    plan = gated_matmul_gpu._Plan(tuning, rows * tuning.tile_m, 64, width, interpreted=True)
    block, turn = jnp.meshgrid(jnp.arange(12), jnp.arange(1600))  # of one shape in all examples
    of_members = jax.vmap(lambda _: plan.sweep.place(block, turn), axis_name="member")(
        jnp.arange(size)
    )
    has_turn = (block < plan.num_blocks) & (turn < plan.sweep.turns(block))
    computed = np.broadcast_to(has_turn, of_members[0].shape)
    places = [np.asarray(index)[computed].tolist() for index in of_members]
    all_rows = -(-rows // down) * down  # a last pair's second row may be padding
    expected = [(row, column) for row in range(all_rows) for column in range(columns * across)]
    assert sorted(zip(*places, strict=True)) == expected


@pytest.mark.parametrize(("m", "on_chip"), [(1, 8), (16, 16), (21, 24), (64, 64), (100, 104)])
def test_a_chip_writes_whole_eights_and_nothing_beyond(m: int, on_chip: int) -> None:
    """The interpreter cannot mask rows, so it writes whole tiles."""
    tuning = replace(SMALL, tile_m=64, num_consumers=1)
    plans = [
        gated_matmul_gpu._Plan(tuning, m, 64, 128, interpreted=interpreted)
        for interpreted in (False, True)
    ]
    assert [plan.written for plan in plans] == [on_chip, -(-m // 64) * 64]


@needs_mosaic_gpu
@pytest.mark.parametrize("m", [1024, pytest.param(8192, marks=pytest.mark.slow)])
def test_lowers_for_cuda(m: int) -> None:
    """Layouts are inferred and shared memory is counted, without a GPU."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, K), (K, 2 * N)))
    lowered = jax.jit(gated_product).trace(x, w).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_and_spills_no_register() -> None:
    """XLA's compiler and ptxas for sm_90a, in a separate process, on a machine without a GPU."""
    output = output_of("tests.pallas_kernels.gpu_gated_compile")
    assert len(re.findall(r"^compiled", output, re.MULTILINE)) == 12


def chosen(
    m: int,
    k: int = K,
    n2: int = 2 * N,
    dtype: Any = jnp.bfloat16,
    of_prompts: bool = False,
) -> list[Any]:
    """Return the tunings for row-major and for column-major weights."""
    return [
        choose_gated(m, k, n2, dtype=dtype, column_major=turned, of_prompts=of_prompts)
        for turned in (False, True)
    ]


def test_a_layer_gets_the_program_for_its_tokens() -> None:
    turned = replace(DEFAULT, layout=Layout.OUT_IN)
    expected = {
        LEAST_FEW - 1: [None, None],
        LEAST_FEW: [None, FEW],
        MOST_FEW: [None, FEW],
        MOST_FEW + 1: [None, None],
        128: [None, replace(NARROW, cluster=1)],
        192: [None, None],  # no whole tile
        256: [None, NARROW],
        512: [None, NARROW],
        LEAST_TOKENS // 2 + 128: [None, replace(turned, cluster=1)],
        LEAST_TOKENS: [DEFAULT, turned],
        LEAST_TOKENS + 1: [None, None],
        8192: [DEFAULT, turned],
    }
    for m, programs in expected.items():
        assert chosen(m) == (programs if has_mosaic_gpu() else [None, None]), m
    alone = replace(DEFAULT, cluster=1)
    of_prompts = {
        64: [None, None],
        128: [alone, replace(NARROW, cluster=1)],
        512: [DEFAULT, NARROW],
    }
    for m, programs in of_prompts.items():
        assert chosen(m, of_prompts=True) == (programs if has_mosaic_gpu() else [None, None]), m
    of_eight_shards = chosen(8192, n2=2 * N // 8)
    assert of_eight_shards == ([DEFAULT, turned] if has_mosaic_gpu() else [None, None])
    assert chosen(256, n2=2 * N // 4) == [None, None]  # of four shards: XLA is faster
    for m, width, tile_n, piece in WIDTHS:
        found = chosen(m, n2=2 * width)[1]
        assert found is None or (found.tile_n, found.piece) == (tile_n, piece), (m, width)
        assert has_mosaic_gpu() == (found is not None)
    assert chosen(20) == [None, None]  # no whole eights: two copies more
    assert chosen(32, n2=2 * 17408) == [None, None]  # 136 tiles of 128 are two turns
    assert chosen(32, k=8192, n2=4 * N) == [None, None]  # 256 are two turns
    assert chosen(8192, dtype=jnp.float32) == [None, None]
    assert chosen(8192, k=K + 32) == [None, None]
    assert chosen(8192, n2=2 * N + 128) == [None, None]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_k": 32}, "tile_k 32 is no multiple of 64"),
        ({"tile_k": 192}, "does not divide K"),
        ({"tile_n": 112}, "tile_n 112 is no multiple of 64"),
        ({"tile_n": 112, "layout": Layout.OUT_IN}, "pieces of 64"),
        ({"tile_m": 192}, "do not part into 2 x 64"),
        ({"tile_n": 256}, "sums are more than"),
        ({"num_stages": 5}, "bytes of shared memory"),
        ({"piece": 48}, "a piece is 48"),
        ({"cluster": 2, "shared": Shared.TOKENS, "tile_n": 192}, "columns do not divide"),
    ],
)
def test_a_tuning_that_does_not_fit_says_why(change: dict[str, Any], reason: str) -> None:
    assert DEFAULT.problem(8192, K, 2 * N) is None
    assert reason in str(replace(DEFAULT, **change).problem(8192, K, 2 * N))


@needs_mosaic_gpu
def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w = operands(128, 128, 256)
    with pytest.raises(ValueError, match="do not divide"):
        gated_product(x, w[:, :192], tuning=SMALL)


@needs_older_jax
def test_an_older_jax_says_what_is_missing() -> None:
    x, w = operands(128, 128, 256)
    with pytest.raises(NotImplementedError, match=r"needs jax 0\.11 or later"):
        gated_product(x, w, tuning=SMALL)


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("name", SMALL_PROGRAMS)
def test_runs_on_chip(name: str) -> None:
    m, k, columns, tuning = SMALL_PROGRAMS[name]
    x, w = operands(m, k, columns)
    run = jax.jit(partial(gated_product, tuning=tuning))
    got = run(x, w)
    assert_close(got, jax.jit(reference)(x, w))
    np.testing.assert_array_equal(got, run(x, w))


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("m", [1, 8, 21, 64, 128, 256, 1024, 1000, 8192])
def test_runs_on_chip_at_model_shapes(m: int) -> None:
    x, w = operands(m, K, 2 * N)
    expected = jax.jit(reference)(x, w)
    turned = replace(DEFAULT, layout=Layout.OUT_IN)
    alone = replace(DEFAULT, cluster=1)
    first = gated_product(x, w, tuning=DEFAULT)
    assert_close(first, expected)
    for tuning in (DEFAULT, alone, replace(DEFAULT, overlaps=False), turned, NARROW, FEW):
        run = jax.jit(lambda x, w, tuning=tuning: gated_product(x, w, tuning=tuning))
        for _ in range(6):  # results depend neither on timing nor on the weights' layout
            assert jnp.array_equal(first, run(x, w)), tuning
