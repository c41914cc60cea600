"""One row's attention in one launch, interpreted, against the definition; all else is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention import gpu_one_row
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.kv_write.api import HeadNorms, Rotation
from tests.pallas_kernels.chips import needs_gpu

PAGE = 16


@dataclass(frozen=True)
class Case:
    heads: int = 8
    num_kv: int = 2
    width: int = 64
    prefix: int = 100
    pages: int = 10
    window: int | None = None
    sinks: bool = False
    norms: bool = True
    valid: bool = True
    dtype: Any = jnp.float32


CASES = {
    "norms": Case(),
    "group of 16, window, sinks": Case(heads=16, num_kv=1, window=40, sinks=True, norms=False),
    "no keys before": Case(prefix=0),
    "a page begins": Case(prefix=96, heads=6, num_kv=2),
    "padding": Case(valid=False),
}


def problem(
    case: Case,
) -> tuple[jax.Array, Rotation, jax.Array, AttentionMetadata, jax.Array | None]:
    rng = np.random.default_rng(case.prefix + case.heads)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    heads = array(1, case.heads + 2 * case.num_kv, case.width)
    pool = np.full((40, PAGE, 2 * case.num_kv, case.width), np.nan, np.float32)
    table = rng.permutation(np.arange(1, 40))[: case.pages][None].astype(np.int32)
    first = 0 if case.window is None else max(case.prefix - case.window + 1, 0)
    for slot in range(first, case.prefix):  # all that may be read
        pool[table[0, slot // PAGE], slot % PAGE] = rng.standard_normal(pool.shape[2:])
    angle = jnp.asarray(rng.random((1, case.width // 2)) * 6, jnp.float32)
    norms = None
    if case.norms:
        norms = HeadNorms(q=array(case.width) + 1, k=array(case.width) + 1, eps=1e-5)
    rotation = Rotation(cos=jnp.cos(angle), sin=jnp.sin(angle), num_heads=case.heads, norms=norms)
    rows = AttentionMetadata(
        page_table=jnp.asarray(table),
        prefix_lens=jnp.asarray([case.prefix], jnp.int32),
        cu_q_lens=jnp.asarray([0, int(case.valid)], jnp.int32),
        q_positions=jnp.asarray([case.prefix], jnp.int32),
    )
    return heads, rotation, jnp.asarray(pool, case.dtype), rows, array(case.heads)


def check(case: Case, *, interpret: bool) -> None:
    heads, rotation, pool, rows, sinks = problem(case)
    given = sinks if case.sinks else None
    settings: dict[str, Any] = {"scale": 0.3, "window": case.window}
    assert gpu_one_row.serves(heads, pool, rows, num_heads=case.heads)
    found, mine = gpu_one_row.rotate_write_and_attend(
        heads, rotation, pool, rows, sinks=given, interpret=interpret, **settings
    )
    call = AttentionCall(queries_per_row=1, **settings)
    expected, written = OPS["reference"].rotate_write_and_attend(
        heads, rotation, pool, rows, call, given
    )
    tolerance = 2e-5 if case.dtype == jnp.float32 else 0.03
    # page 0 is the dummy
    for have, want in ((found, expected), (mine[1:], written[1:])):
        numbers, wanted = (np.asarray(x, np.float32) for x in (have, want))
        np.testing.assert_allclose(numbers, wanted, atol=tolerance)


@pytest.mark.slow_cases("group of 16", "no keys", "norms]", "a page begins")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    check(CASES[name], interpret=True)


def test_what_is_left_to_the_other_kernels() -> None:
    heads, rotation, pool, rows, _ = problem(Case())
    two = jnp.concatenate([heads, heads])
    assert not gpu_one_row.serves(two, pool, rows, num_heads=8)
    assert not gpu_one_row.serves(heads.astype(jnp.bfloat16), pool, rows, num_heads=8)
    assert not gpu_one_row.serves(heads[..., :32], pool, rows, num_heads=8)
    del rotation


@pytest.mark.parametrize(
    ("heads", "num_kv", "width", "pages", "expected"),
    [
        (32, 4, 128, 132, True),
        (64, 8, 64, 132, True),
        (32, 8, 128, 132, False),  # never timed
        (32, 4, 128, 133, False),  # longer than was timed
    ],
)
def test_it_is_taken_where_it_was_timed(
    heads: int, num_kv: int, width: int, pages: int, expected: bool
) -> None:
    pool = jnp.zeros((2, 64, 2 * num_kv, width), jnp.bfloat16)
    zero = jnp.zeros((1,), jnp.int32)
    rows = AttentionMetadata(
        page_table=jnp.zeros((1, pages), jnp.int32),
        prefix_lens=zero,
        cu_q_lens=jnp.asarray([0, 1], jnp.int32),
        q_positions=zero,
    )
    assert gpu_one_row.pays(pool, rows, num_heads=heads) is expected
    if expected:  # the others are Mosaic's, which an older jax cannot trace
        angle = jnp.zeros((1, width // 2), jnp.float32)
        rotation = Rotation(cos=angle, sin=angle, num_heads=heads)
        call = AttentionCall(queries_per_row=1, scale=1.0)

        def run(x: jax.Array) -> jax.Array:
            ops = OPS["gpu_interpret"]
            return ops.rotate_write_and_attend(x, rotation, pool, rows, call)[0]

        given = jnp.zeros((1, heads + 2 * num_kv, width), jnp.bfloat16)
        assert "attend_one_row" in str(jax.make_jaxpr(run)(given))


@needs_gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("heads", "num_kv", "width"), [(32, 4, 128), (64, 8, 64), (32, 8, 128)])
def test_equals_the_definition_on_the_chip(
    heads: int, num_kv: int, width: int, window: int | None
) -> None:
    case = Case(heads=heads, num_kv=num_kv, width=width, window=window, prefix=500, pages=35)
    for dtype in (jnp.bfloat16, jnp.float16):
        check(Case(**{**case.__dict__, "dtype": dtype}), interpret=False)
