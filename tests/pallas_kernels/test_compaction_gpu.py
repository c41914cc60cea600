"""The GPU's path compaction in the interpreter, against the reference; and its compilation."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.compaction import gpu as compaction_gpu
from jspec.pallas_kernels.compaction.reference import flat_moves
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.path_cases import (
    SHAPES,
    as_int32,
    check_a_path_of_the_root_alone_launches_nothing,
    check_equals_the_reference,
    check_layers_may_differ_in_their_kv_heads,
    check_sources_are_read_before_targets_are_written,
    random_case,
)

compact = jax.jit(OPS["gpu_interpret"].commit)


@SHAPES
def test_the_kernel_is_the_reference(
    batch: int, page_size: int, num_path: int, row: tuple[int, int], dtype: Any
) -> None:
    for seed in range(3):
        kv, rows = random_case(
            seed, batch=batch, page_size=page_size, num_path=num_path, row=row, dtype=dtype
        )
        check_equals_the_reference(compact, kv, rows)


@pytest.mark.slow_cases("1-3", "3-20")
@pytest.mark.parametrize(
    ("layers", "num_path", "row", "dtype"),
    [
        (7, 4, (2, 32), jnp.float32),  # two shares of the layers, the last not full
        (3, 20, (2, 8), jnp.float32),  # more moves than fit a program: one layer each
        (1, 3, (6, 200), jnp.float32),  # 1,200 columns: the last chunk not full
        (2, 3, (2, 5), jnp.float16),  # ten columns: fewer than a warp's
    ],
)
def test_any_cut_of_layers_and_columns_gives_the_same(
    layers: int, num_path: int, row: tuple[int, int], dtype: Any
) -> None:
    kv, rows = random_case(
        3, batch=6, page_size=16, num_path=num_path, row=row, dtype=dtype, layers=layers
    )
    assert flat_moves(*rows, page_size=16)[2].any()
    check_equals_the_reference(compact, kv, rows)


def test_many_layers_take_several_launches_of_about_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction_gpu, "MAX_POOLS", 2)
    run = partial(compaction_gpu.compact_paths, interpret=True)
    kv, rows = random_case(
        1, batch=6, page_size=16, num_path=3, row=(2, 8), dtype=jnp.float32, layers=5
    )
    assert flat_moves(*rows, page_size=16)[2].any()
    assert str(jax.make_jaxpr(run)(kv, *rows)).count("pallas_call[") == 3
    check_equals_the_reference(jax.jit(run), kv, rows)


def test_layers_may_differ_in_their_kv_heads() -> None:
    check_layers_may_differ_in_their_kv_heads(compact)


def test_a_path_of_the_root_alone_launches_nothing() -> None:
    check_a_path_of_the_root_alone_launches_nothing(OPS["gpu_interpret"].commit)


BATCH, PAGE, PAGES, PATH = 3, 8, 4, 4
lengths = st.integers(0, PAGE * PAGES)
law_rows = st.tuples(
    st.permutations(range(1, 1 + BATCH * PAGES)),
    st.lists(lengths, min_size=BATCH, max_size=BATCH),
    st.lists(
        st.lists(st.integers(0, 12), min_size=PATH, max_size=PATH), min_size=BATCH, max_size=BATCH
    ),
    st.lists(st.integers(0, PATH - 1), min_size=BATCH, max_size=BATCH),
)


@given(law_rows)
@settings(max_examples=40)
def test_law_whatever_the_path_it_is_the_reference(
    drawn: tuple[list[int], list[int], list[list[int]], list[int]],
) -> None:
    """Any table, length and path, also unordered, doubled or past the table.

    Slots that are not targets keep their bits, NaN and negative zeros too.
    """
    order, seq_lens, path, num_accepted = drawn
    table = np.asarray(order).reshape(BATCH, PAGES)
    rng = np.random.default_rng(0)
    shape = (1 + BATCH * PAGES, PAGE, 2, 4)
    bits = [rng.integers(0, 2**16, shape, np.uint16) for _ in range(2)]
    kv = tuple(jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.float16) for x in bits)
    after = compact(kv, *as_int32(table, seq_lens, path, num_accepted))
    for pool, before in zip(after, bits, strict=True):
        expected = before.copy()
        for b in range(BATCH):
            for i in range(1, num_accepted[b] + 1):
                slot, to = seq_lens[b] + path[b][i], seq_lens[b] + i
                if to < PAGE * PAGES:
                    page = table[b, slot // PAGE] if slot < PAGE * PAGES else 0
                    expected[table[b, to // PAGE], to % PAGE] = before[page, slot % PAGE]
        np.testing.assert_array_equal(np.asarray(pool).view(np.uint16), expected)
    check_equals_the_reference(compact, kv, as_int32(table, seq_lens, path, num_accepted))


@needs_gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("layers", "row", "dtype"),
    [
        (32, (16, 128), jnp.bfloat16),
        (80, (4, 128), jnp.float16),
        (3, (6, 200), jnp.float32),
        (2, (2, 5), jnp.float32),
    ],
    ids=str,
)
def test_equals_the_reference_on_the_chip(layers: int, row: tuple[int, int], dtype: Any) -> None:
    run = jax.jit(OPS["gpu"].commit)
    for num_path in (2, 4, 9):
        kv, rows = random_case(
            num_path,
            batch=16,
            page_size=64,
            num_path=num_path,
            row=row,
            dtype=dtype,
            layers=layers,
        )
        check_equals_the_reference(run, kv, rows)
    check_sources_are_read_before_targets_are_written(run, [0, 3, 1, 2])


@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_in_place() -> None:
    """At the shapes of 8B and 70B: launches of at most 48 pools, all aliased, none copied."""
    output = output_of("tests.pallas_kernels.gpu_path_compile")
    kernels = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel["launches"] == (2 if kernel["pools"] > 48 else 1), kernel
        assert kernel["aliased"] == kernel["pools"], kernel
        assert kernel["copies"] == [], kernel
        assert kernel["temp_bytes"] < 1 << 20, kernel
