"""The kernel that rotates q and k and writes K and V, against RoPE, interleaving and a scatter.

float32 is compared within a rounding or two: compilers may fuse a product with the sum after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.layers.rope import angles_of
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.attention.reference import new_slots
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.kv_write import gpu as kv_write_gpu
from jspec.pallas_kernels.kv_write.api import HeadNorms, KVScales, Rotation
from jspec.pallas_kernels.kv_write.reference import (
    LARGE,
    interleave_kv,
    rotate,
    rotate_and_split,
    rotate_and_write,
    write_rows,
)
from jspec.spec.rope import RopeConfig
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_gpu, needs_mosaic_gpu

ROPE = RopeConfig(theta=10000.0)
KERNEL = jax.jit(kv_write_gpu.rotate_and_write, static_argnames=("num_heads", "interpret"))
REFERENCE = jax.jit(rotate_and_write, static_argnames="num_heads")


def draw(
    num_heads: int, num_kv: int, width: int, *, tokens: int, page_size: int, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (heads, positions, a pool of `tokens` + 2 pages, all NaN, which must not be read)."""
    rng = np.random.default_rng(0)
    heads = rng.standard_normal((tokens, num_heads + 2 * num_kv, width))
    positions = rng.integers(0, 5000, tokens)
    pool = jnp.full((tokens + 2, page_size, 2 * num_kv, width), jnp.nan, dtype)
    return jnp.asarray(heads, dtype), jnp.asarray(positions, jnp.int32), pool


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


def assert_rounded_alike(found: jax.Array, expected: jax.Array) -> None:
    if found.dtype == jnp.bfloat16:
        np.testing.assert_array_equal(bits(found), bits(expected))
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def turned(x: jax.Array, positions: jax.Array) -> jax.Array:
    return rotate(x, *angles_of(positions, head_dim=x.shape[-1], rope=ROPE))


@partial(jax.jit, static_argnames="num_heads")
def in_steps(
    heads: jax.Array,
    positions: jax.Array,
    pool: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    num_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """Run the separate operations that the kernel replaces."""
    first_v = (heads.shape[1] + num_heads) // 2
    q, k, v = jnp.split(heads, (num_heads, first_v), axis=1)
    q, k = (turned(x, positions) for x in (q, k))
    return q, write_rows(pool, page, offset, interleave_kv(k, v, width=pool.shape[3]))


@pytest.mark.slow_cases("3-1-20", "6-2-64")
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "width", "page_size", "dtype"),
    [
        (32, 8, 128, 16, jnp.bfloat16),
        (6, 2, 64, 1, jnp.float32),
        (3, 1, 20, 8, jnp.bfloat16),
        (1, 1, 2, 16, jnp.float32),
        pytest.param(3, 1, 64, 64, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_equals_rope_interleaving_and_scatter(
    num_heads: int, num_kv: int, width: int, page_size: int, dtype: Any
) -> None:
    heads, positions, pool = draw(
        num_heads, num_kv, width, tokens=5, page_size=page_size, dtype=dtype
    )
    page = jnp.asarray([3, 1, 6, 2, 5], jnp.int32)
    offset = jnp.asarray([0, 1, 7, 15, 3], jnp.int32) % page_size
    cos, sin = angles_of(positions, head_dim=width, rope=ROPE)
    expected = in_steps(heads, positions, pool, page, offset, num_heads=num_heads)
    for run in (partial(KERNEL, interpret=True), REFERENCE):
        q, pages = run(heads, cos, sin, pool, page, offset, num_heads=num_heads)
        assert q.dtype == dtype
        assert_rounded_alike(q, expected[0])
        assert_rounded_alike(pages[page, offset], expected[1][page, offset])
        untouched = np.ones(pool.shape[:2], bool)
        untouched[np.asarray(page), np.asarray(offset)] = False
        np.testing.assert_array_equal(bits(pages)[untouched], bits(pool)[untouched])


def norms_of(width: int, *, dtype: Any) -> HeadNorms:
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(1 + 0.3 * rng.standard_normal(width), dtype) for _ in range(2))
    return HeadNorms(q=q, k=k, eps=1e-6)


@pytest.mark.slow_cases("3-1-20")
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "width", "dtype"),
    [(16, 2, 128, jnp.bfloat16), (3, 1, 20, jnp.float32)],
)
def test_norms_of_q_and_k_are_those_of_a_norm_of_its_own(
    num_heads: int, num_kv: int, width: int, dtype: Any
) -> None:
    """v is not normed; the heads differ in size, so that each needs its own factor."""
    heads, positions, pool = draw(num_heads, num_kv, width, tokens=5, page_size=8, dtype=dtype)
    heads = heads * jnp.arange(1, heads.shape[1] + 1, dtype=dtype)[:, None]
    page, norms = jnp.asarray([3, 1, 6, 2, 5], jnp.int32), norms_of(width, dtype=dtype)
    cos, sin = angles_of(positions, head_dim=width, rope=ROPE)
    rotation = Rotation(cos=cos, sin=sin, num_heads=num_heads, norms=norms)
    expected_q, k, v = rotate_and_split(heads, rotation)
    expected = write_rows(pool, page, page % 8, interleave_kv(k, v, width=width))
    assert float(jnp.max(jnp.abs(k))) < 5 < float(jnp.max(jnp.abs(v)))
    for run in (partial(KERNEL, interpret=True), REFERENCE):
        q, pages = run(heads, cos, sin, pool, page, page % 8, num_heads=num_heads, norms=norms)
        for mine, right in ((q, expected_q), (pages[page, page % 8], expected[page, page % 8])):
            found, wanted = (np.asarray(x, np.float32) for x in (mine, right))
            # The squares' order is the kernel's own: the last bit of a rounded norm may differ.
            near = 2e-2 if dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=near)
        values = np.asarray(pages[page, page % 8], np.float32)[:, 1::2]
        np.testing.assert_array_equal(
            values, np.asarray(heads[:, num_heads + num_kv :], np.float32)
        )


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_each_token_lands_in_its_own_slot_and_padding_in_the_dummy_page(data: Any) -> None:
    """Any slots, some of them padding: only those and page 0 change."""
    slots = data.draw(st.permutations(range(1 * 4, 8 * 4)))[:6]
    padding = data.draw(st.lists(st.booleans(), min_size=6, max_size=6))
    page = np.where(padding, 0, np.asarray(slots) // 4).astype(np.int32)
    offset = np.asarray(slots, np.int32) % 4
    heads, positions, pool = draw(6, 2, 64, tokens=6, page_size=4, dtype=jnp.bfloat16)
    cos, sin = angles_of(positions, head_dim=64, rope=ROPE)
    q, pages = KERNEL(heads, cos, sin, pool, page, offset, num_heads=6, interpret=True)
    expected_q, expected = in_steps(heads, positions, pool, page, offset, num_heads=6)
    np.testing.assert_array_equal(bits(q), bits(expected_q))
    np.testing.assert_array_equal(bits(pages)[1:], bits(expected)[1:])
    assert np.isfinite(np.asarray(pages[1:], np.float32)).any() == (not all(padding))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_not_finite_enters_no_pool(dtype: Any) -> None:
    """q stays as it is: it is of one token, and no other query reads it."""
    heads, positions, pool = draw(6, 2, 64, tokens=5, page_size=4, dtype=dtype)
    heads = heads.at[1, 3, 5].set(jnp.inf).at[1, 6, 7].set(jnp.nan).at[1, 7, 40].set(-jnp.inf)
    heads = heads.at[3, 8, 0].set(jnp.nan).at[3, 9, 63].set(jnp.inf).at[4, 9, 1].set(-jnp.inf)
    page = jnp.asarray([3, 1, 6, 2, 5], jnp.int32)
    cos, sin = angles_of(positions, head_dim=64, rope=ROPE)
    arrays = (heads, cos, sin, pool, page, page % 4)
    q, pages = KERNEL(*arrays, num_heads=6, interpret=True)
    expected_q, expected = REFERENCE(*arrays, num_heads=6)
    np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(expected_q, np.float32))
    written = np.asarray(pages[page, page % 4], np.float32)
    assert np.isfinite(written).all()
    np.testing.assert_array_equal(written, np.asarray(expected[page, page % 4], np.float32))
    large = float(jnp.asarray(LARGE, dtype))
    assert [written[3, 1, 0], written[3, 3, 63], written[4, 3, 1]] == [0, large, -large]


@pytest.mark.parametrize("has_norms", [False, True])
def test_an_fp8_pool_holds_what_the_reference_stores(has_norms: bool) -> None:
    """Equal bit by bit; q is in f16, times K's scale. Values that are not finite are not stored."""
    heads, positions, pool = draw(6, 2, 64, tokens=5, page_size=4, dtype=jnp.bfloat16)
    heads = heads.at[1, 6, 7].set(jnp.nan).at[1, 7, 40].set(-jnp.inf).at[3, 9, 63].set(jnp.inf)
    heads = heads.at[4, 8].multiply(99)  # beyond 448 of its scale
    pool = pool.astype(jnp.float8_e4m3fn)
    page = jnp.asarray([3, 1, 6, 2, 5], jnp.int32)
    cos, sin = angles_of(positions, head_dim=64, rope=ROPE)
    arrays = (heads, cos, sin, pool, page, page % 4)
    how: dict[str, Any] = {
        "num_heads": 6,
        "norms": norms_of(64, dtype=jnp.bfloat16) if has_norms else None,
        "scales": KVScales(k=jnp.full(1, 0.013), v=jnp.full(1, 0.0071)),
    }
    q, pages = KERNEL(*arrays, **how, interpret=True)
    expected_q, expected = REFERENCE(*arrays, **how)
    found, wanted = (np.asarray(x[1:]).view(np.uint8) for x in (pages, expected))
    np.testing.assert_array_equal(found, wanted)
    assert q.dtype == jnp.float16
    np.testing.assert_allclose(
        np.asarray(q, np.float32), np.asarray(expected_q, np.float32) * 0.013, rtol=1e-3, atol=1e-7
    )


def test_heads_that_do_not_fit_the_pool_are_named() -> None:
    heads, positions, pool = draw(4, 2, 64, tokens=3, page_size=4, dtype=jnp.bfloat16)
    cos, sin = angles_of(positions, head_dim=64, rope=ROPE)
    page = jnp.ones(3, jnp.int32)
    with pytest.raises(ValueError, match=r"heads are \(8, 64\).*expected \(7, 64\)"):
        KERNEL(heads, cos, sin, pool, page, page, num_heads=3, interpret=True)
    with pytest.raises(ValueError, match="cos is 32 wide; expected 16"):
        KERNEL(heads[..., :32], cos, sin, pool[..., :32], page, page, num_heads=4, interpret=True)


def test_what_the_kernel_serves() -> None:
    assert kv_write_gpu.serves(64, 64)
    assert not kv_write_gpu.serves(64, 128)
    assert not kv_write_gpu.serves(63, 63)


def paged(
    ops: str, *, packed: bool, wide: int, normed: bool = False
) -> tuple[Callable[..., Any], Any]:
    """Return (attend of two rows with 4 and 3 new tokens, its arguments); heads 64 wide, 4 over
    2."""
    rng = np.random.default_rng(1)
    prefix, lens = np.asarray([21, 3]), np.asarray([4, 3])
    positions = (prefix[:, None] + np.arange(4)).reshape(-1)
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1, 2], [3, 0]], jnp.int32),
        prefix_lens=jnp.asarray(prefix, jnp.int32),
        cu_q_lens=jnp.asarray([0, *np.cumsum(lens)], jnp.int32),
        q_positions=jnp.asarray(positions, jnp.int32),
    )
    heads = jnp.asarray(rng.standard_normal((8, 8, 64)), jnp.bfloat16)
    pool = jnp.asarray(rng.standard_normal((6, 16, 4, wide)), jnp.bfloat16)
    pool = pool.at[0].set(jnp.nan).at[4:].set(jnp.nan)

    def attend(
        heads: jax.Array, rows: AttentionMetadata, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        cos, sin = angles_of(rows.q_positions, head_dim=64, rope=ROPE)
        norms = norms_of(64, dtype=jnp.bfloat16) if normed else None
        rotation = Rotation(cos=cos, sin=sin, num_heads=4, norms=norms)
        call = AttentionCall(queries_per_row=None if packed else 4, scale=0.125)
        return OPS[ops].rotate_write_and_attend(heads, rotation, pool, rows, call)

    return attend, (heads, rows, pool)


@pytest.mark.usefixtures("few_programs")
@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("packed", "wide", "normed"),
    [
        (False, 64, False),
        (True, 64, True),
        pytest.param(False, 128, False, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_layers_attention_is_that_of_xla(packed: bool, wide: int, normed: bool) -> None:
    """This holds also where the pool is wider than a head, and the kernel is not used."""
    attend, args = paged("gpu_interpret", packed=packed, wide=wide, normed=normed)
    assert ("rotate_and_write" in str(jax.make_jaxpr(attend)(*args))) == (wide == 64)
    out, pages = jax.jit(attend)(*args)
    expected, expected_pages = jax.jit(paged("xla", packed=packed, wide=wide, normed=normed)[0])(
        *args
    )
    real = np.arange(8) < 7 if packed else np.arange(8) != 7
    if normed:  # the squares' order is the kernel's own
        written, wanted = (np.asarray(x, np.float32)[1:4] for x in (pages, expected_pages))
        np.testing.assert_allclose(written, wanted, rtol=2**-7, atol=2e-2)
    else:
        np.testing.assert_array_equal(bits(pages)[1:], bits(expected_pages)[1:])
    found, wanted = (np.asarray(x, np.float32)[real] for x in (out, expected))
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, atol=0.02)


@needs_mosaic_gpu
def test_a_pool_wider_than_a_head_is_written_without_the_kernel() -> None:
    attend, args = paged("gpu_interpret", packed=False, wide=128)
    assert "rotate_and_write" not in str(jax.make_jaxpr(attend)(*args))


@needs_mosaic_gpu
def test_an_overflow_in_one_token_changes_no_other_rows_attention() -> None:
    attend, (heads, rows, pool) = paged("gpu_interpret", packed=False, wide=64)
    run = jax.jit(attend)
    expected, _ = run(heads, rows, pool)
    poisoned = heads.at[1].set(jnp.nan).at[2, 7].set(jnp.inf)  # of row 0's four
    out, pages = run(poisoned, rows, pool)
    others = [0, 4, 5, 6]  # the token before, and row 1
    np.testing.assert_array_equal(bits(out)[others], bits(expected)[others])
    assert np.isfinite(np.asarray(out, np.float32)[3]).all()  # it sees both
    assert np.isfinite(np.asarray(pages[2, 5:9], np.float32)).all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_slots_are_those_of_the_new_rows(packed: bool) -> None:
    """Row 0 continues at token 21, page 2, offset 5; row 1 at token 3, its fourth query padding."""
    _, (_, rows, _) = paged("xla", packed=packed, wide=64)
    page, offset = new_slots(rows, 8, page_size=16, queries_per_row=None if packed else 4)
    np.testing.assert_array_equal(page, [2, 2, 2, 2, 3, 3, 3, 0])
    np.testing.assert_array_equal(offset[:7], [5, 6, 7, 8, 3, 4, 5])


def test_no_other_bundle_uses_the_kernel() -> None:
    for name in ("reference", "xla", "tpu_interpret"):
        attend, args = paged(name, packed=False, wide=64)
        if name == "tpu_interpret":
            heads, rows, pool = args
            args = (heads, rows, jnp.pad(pool, ((0, 0), (0, 0), (0, 0), (0, 64))))
        assert "rotate_and_write" not in str(jax.make_jaxpr(attend)(*args))


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize(("num_heads", "num_kv", "width"), [(32, 8, 128), (3, 1, 64)])
def test_equals_the_steps_on_the_chip(num_heads: int, num_kv: int, width: int, tokens: int) -> None:
    """bf16 may differ in its last bit where only one program fuses a product and a sum."""
    heads, positions, pool = draw(
        num_heads, num_kv, width, tokens=tokens, page_size=16, dtype=jnp.bfloat16
    )
    rng = np.random.default_rng(2)
    slots = rng.permutation((tokens + 1) * 16)[:tokens] + 16
    page, offset = (jnp.asarray(x, jnp.int32) for x in (slots // 16, slots % 16))
    expected_q, expected = in_steps(heads, positions, pool, page, offset, num_heads=num_heads)
    cos, sin = angles_of(positions, head_dim=width, rope=ROPE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        q, pages = KERNEL(heads, cos, sin, pool, page, offset, num_heads=num_heads)
    for found, wanted in ((q, expected_q), (pages, expected)):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=1e-5
        )
    values = np.asarray(pages[page, offset], np.float32)[:, 1::2]
    np.testing.assert_array_equal(values, np.asarray(heads[:, num_heads + num_kv :], np.float32))


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(("num_heads", "num_kv", "width"), [(32, 4, 128), (3, 1, 64)])
def test_norms_on_the_chip(num_heads: int, num_kv: int, width: int, tokens: int) -> None:
    heads, positions, pool = draw(
        num_heads, num_kv, width, tokens=tokens, page_size=16, dtype=jnp.bfloat16
    )
    heads = heads * jnp.arange(1, heads.shape[1] + 1, dtype=jnp.bfloat16)[:, None]
    page = jnp.arange(1, tokens + 1, dtype=jnp.int32)
    cos, sin = angles_of(positions, head_dim=width, rope=ROPE)
    arrays, norms = (heads, cos, sin, pool, page, page % 16), norms_of(width, dtype=jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        found = KERNEL(*arrays, num_heads=num_heads, norms=norms)
    expected = REFERENCE(*arrays, num_heads=num_heads, norms=norms)
    for mine, wanted in zip(found, expected, strict=True):
        mine, wanted = (np.asarray(x, np.float32) for x in (mine, wanted))
        np.testing.assert_allclose(mine, wanted, rtol=2**-7, atol=2e-2)


@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_and_copies_no_pool() -> None:
    output = output_of("tests.pallas_kernels.gpu_rotate_compile")
    assert output.count("compiled") == 3
