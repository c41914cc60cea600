"""The fused residual add and RMSNorm: equal to the reference in the interpreter, compiled for an
H200, run where there is a GPU; and a whole forward with it against one without.

The sum has one right answer. The norm differs from the reference only by the order in which the
squares are added: by a few units in the last place of the float32 mean (the bound of the float32
assertion), which can move the one final rounding to bfloat16 to the neighbouring value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.layers.norm import Residual
from jspec.models.decoder import Decoder, trunk
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.pallas_kernels.add_norm.gpu import add_and_norm, add_norm_and_quantize, num_warps
from jspec.pallas_kernels.add_norm.reference import add_norm
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.fp8_product.gpu_tokens import quantize
from jspec.pallas_kernels.ops import Ops
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_gpu
from tests.support.caches import empty_pools
from tests.support.tiny_models import tiny_target_config

EPS = 1e-5
CALLS = "name=add_and_norm_gpu"
Pair = tuple[jax.Array, jax.Array]
FORMS = pytest.mark.parametrize("by_blocks", [False, True], ids=["channels", "blocks"])
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]


def inputs(num_rows: int, size: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return x, delta, scale; rows of very different sizes, like a residual stream's."""
    keys = jax.random.split(jax.random.key(num_rows * size), 3)
    x, delta = (jax.random.normal(key, (num_rows, size)) for key in keys[:2])
    x = x * 4.0 ** (jnp.arange(num_rows) % 5)[:, None]
    scale = 1 + 0.2 * jax.random.normal(keys[2], (size,))
    return x.astype(dtype), delta.astype(dtype), scale.astype(dtype)


def run(function: Callable[..., Pair], *arrays: jax.Array, **static: Any) -> Pair:
    """Compile without excess precision, so that XLA may not skip the rounding of the sum."""
    lowered = jax.jit(partial(function, eps=EPS, **static)).lower(*arrays)
    pair: Pair = lowered.compile(compiler_options={"xla_allow_excess_precision": False})(*arrays)
    return pair


def units_apart(got: jax.Array, wanted: jax.Array) -> np.ndarray:
    """Return how many representable values are between finite arrays of one dtype."""
    assert got.dtype == wanted.dtype
    bits = {2: np.int16, 4: np.int32}[got.dtype.itemsize]
    left, right = (np.asarray(x).view(bits).astype(np.int64) for x in (got, wanted))
    assert np.isfinite(np.asarray(got, np.float32)).all()
    same_sign = (left < 0) == (right < 0)
    return np.where(left == right, 0, np.where(same_sign, np.abs(left - right), 1 << 20))


def assert_equal(got: Pair, wanted: Pair) -> None:
    np.testing.assert_array_equal(got[0], wanted[0])
    apart = units_apart(got[1], wanted[1])
    if got[1].dtype == jnp.float32:
        assert apart.max() <= 6  # mean, root, quotient and two products, each within one or two
    else:
        assert apart.max() <= 1
        assert np.mean(apart > 0) < 0.01  # a forgotten rounding of the sum tips one in five


def check_interpreted(num_rows: int, size: int, dtype: Any) -> None:
    arrays = inputs(num_rows, size, dtype)
    assert_equal(run(add_and_norm, *arrays, interpret=True), run(add_norm, *arrays))


@pytest.mark.parametrize(
    ("num_rows", "size", "dtype"),
    [(3, 96, jnp.bfloat16), (64, 96, jnp.float32), (1, 4096, jnp.bfloat16)],
)
def test_interpreted_equals_the_reference(num_rows: int, size: int, dtype: Any) -> None:
    check_interpreted(num_rows, size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "size", "dtype"),
    [
        (1, 64, jnp.float32),
        (3, 4096, jnp.float32),
        (64, 3072, jnp.bfloat16),
        (64, 64, jnp.bfloat16),
    ],
)
def test_every_size_equals_the_reference(num_rows: int, size: int, dtype: Any) -> None:
    check_interpreted(num_rows, size, dtype)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """256 + 1 is 256 in bfloat16: such a row normalises like a row of 256 with one 0."""
    x = jnp.full((1, 64), 256.0, jnp.bfloat16).at[0, 1:].set(255.0)
    delta = jnp.zeros_like(x).at[0, 0].set(1.0)
    scale = jnp.full((64,), 2.0**7, jnp.float32)
    wide = [run(add_and_norm, a, d, scale, interpret=True) for a, d in ((x, delta), (x, x * 0))]
    for rounded, plain in zip(*wide, strict=True):
        np.testing.assert_array_equal(rounded, plain)


def test_a_wider_scale_stays_wide_and_no_rows_are_no_kernel() -> None:
    x, delta, _ = inputs(2, 64, jnp.bfloat16)
    scale = 1 + 2.0**-10 * jnp.arange(64.0)  # bfloat16 would round most of it away
    assert_equal(run(add_and_norm, x, delta, scale, interpret=True), run(add_norm, x, delta, scale))
    empty = add_and_norm(x[:0], delta[:0], scale, eps=EPS)
    assert [out.shape for out in empty] == [(0, 64), (0, 64)]


@pytest.mark.parametrize(
    ("size", "warps"), [(64, 1), (1024, 2), (4096, 8), (8192, 16), (32768, 16)]
)
def test_a_row_is_one_pass_of_registers(size: int, warps: int) -> None:
    assert num_warps(size) == warps


def test_a_forward_with_the_kernel_is_the_forward_without() -> None:
    """Every site of a float32 stack whose input has two summands; attention is XLA's in both.

    Layers 0 and 2 of 3 are captured, so they get one summand; all have two after attention.
    """
    fused = forward(InterpretedNorms())
    plain = forward(OPS["xla"])
    # A layer is traced once per form of its input, one summand or two; then the final norm.
    assert fused[1].count(CALLS) == 1 + 2 + 1
    assert plain[1].count(CALLS) == 0
    for left, right in zip(jax.tree.leaves(fused[0]), jax.tree.leaves(plain[0]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_what_is_captured_is_what_the_next_layer_is_given() -> None:
    """It is, bit for bit, also the sum that the kernel would have computed."""
    x, delta, scale = inputs(3, 96, jnp.bfloat16)
    given: list[Residual] = []

    def layer(stream: Residual) -> Residual:
        given.append(stream)
        return Residual(x=stream.sum(), delta=delta)

    last, aux = trunk([layer, layer, layer], x, aux_layer_ids=(1, 3))
    assert [stream.delta is None for stream in (*given, last)] == [True, True, False, True]
    np.testing.assert_array_equal(aux[:, :96], given[1].x)
    np.testing.assert_array_equal(aux[:, 96:], last.x)
    total, _ = run(add_and_norm, x, delta, scale, interpret=True)
    np.testing.assert_array_equal(aux[:, :96], total)


@FORMS
@pytest.mark.parametrize("shape", [(3, 384), (9, 200)])
def test_a_row_is_quantized_as_if_after_the_norm(shape: tuple[int, int], by_blocks: bool) -> None:
    arrays = inputs(*shape, jnp.bfloat16)
    how: dict[str, Any] = {"by_blocks": by_blocks, "interpret": True}
    both: Any = run(add_norm_and_quantize, *arrays, **how)
    total, normed = both
    assert_equal((total, normed.values), run(add_and_norm, *arrays, interpret=True))
    num = shape[0]
    wanted = jax.jit(partial(quantize, **how))(normed.values)
    assert normed.tokens.num == wanted.num == num
    np.testing.assert_array_equal(normed.tokens.scales[:, :num], wanted.scales[:, :num])
    codes = (x.codes[:num].view(jnp.uint8) for x in (normed.tokens, wanted))
    np.testing.assert_array_equal(*codes)


def test_only_a_gpu_s_bundle_fuses() -> None:
    """Only that bundle leaves a layer's last sum to the kernel."""
    arrays = inputs(2, 64, jnp.bfloat16)
    for name, ops in OPS.items():
        program = str(jax.make_jaxpr(partial(ops.add_norm, eps=EPS))(*arrays))
        fuses = name.startswith("gpu")
        assert (CALLS in program, ops.defers_sums) == (fuses, fuses)


@dataclass(frozen=True, slots=True)
class InterpretedNorms(Ops):
    """XLA's programs, with a GPU's norms in the interpreter."""

    defers_sums: ClassVar[bool] = True

    def add_norm(
        self, x: jax.Array, delta: jax.Array, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        return add_and_norm(x, delta, scale, eps=eps, interpret=True)


def forward(ops: Ops) -> tuple[Any, str]:
    """Return hidden, aux features and pool of 2 rows of 3 new tokens over a pool; and the
    program."""
    config, float32 = tiny_target_config(num_layers=3), jnp.float32
    model = Decoder(config, ops, aux_layer_ids=(0, 2))
    params = init_params(table_of(config), seed=1)
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1, 2], [3, 4]], jnp.int32),
        prefix_lens=jnp.asarray([6, 0], jnp.int32),
        cu_q_lens=jnp.asarray([0, 3, 6], jnp.int32),
        q_positions=jnp.asarray([6, 7, 8, 0, 1, 2], jnp.int32),
    )
    empty = empty_pools(
        model.cache_groups, num_pages=5, page_size=8, shards=1, dtype=float32, ops=ops
    )
    pool = tuple(jnp.full_like(pages, 0.5) for pages in empty)
    step = jax.jit(lambda p, ids, kv, r: model.forward(p, ids, kv, r, queries_per_row=3))
    arrays = (params, jnp.arange(6, dtype=jnp.int32), pool, rows)
    return step(*arrays), str(jax.make_jaxpr(step)(*arrays))


@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200() -> None:
    """XLA's compiler for sm_90a, in a separate process, on a machine without a GPU."""
    output = output_of("tests.pallas_kernels.gpu_norm_compile")
    assert output.count("compiled") == 6


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 3072, 4096, 5120, 8192])
@pytest.mark.parametrize("num_rows", [1, 64, 2048])
def test_equals_the_reference_on_the_chip(num_rows: int, size: int, dtype: Any) -> None:
    arrays = inputs(num_rows, size, dtype)
    assert_equal(run(add_and_norm, *arrays), run(add_norm, *arrays))


@needs_gpu
def test_columns_after_a_row_are_not_read_on_the_chip() -> None:
    """The rows around have NaN where masked columns are."""
    x, delta, scale = inputs(3, 96, jnp.float32)
    poisoned = x.at[jnp.asarray([0, 2])].set(jnp.nan)
    got, wanted = (run(add_and_norm, a, delta, scale) for a in (poisoned, x))
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(left[1], right[1])
