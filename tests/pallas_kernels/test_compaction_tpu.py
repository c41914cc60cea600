"""The TPU's path compaction in interpret mode, against the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas_kernels.compaction.tpu import compact_paths
from tests.pallas_kernels.path_cases import (
    SHAPES,
    Pools,
    check_a_path_of_the_root_alone_launches_nothing,
    check_equals_the_reference,
    check_layers_may_differ_in_their_kv_heads,
    check_sources_are_read_before_targets_are_written,
    check_what_leaves_the_table_is_dropped,
    random_case,
)


def compact(kv: Pools, *rows: Any, buffer_bytes: int = 1 << 20) -> Pools:
    with pltpu.force_tpu_interpret_mode():
        run = jax.jit(partial(compact_paths, buffer_bytes=buffer_bytes))
        after: Pools = run(kv, *rows)
        return after


@pytest.mark.slow_cases("6-64", "3-4-6", "5-16-4-row4")
@SHAPES
def test_the_kernel_is_the_reference(
    batch: int, page_size: int, num_path: int, row: tuple[int, int], dtype: Any
) -> None:
    with pltpu.force_tpu_interpret_mode():
        run = jax.jit(partial(compact_paths, buffer_bytes=1 << 20))
        for seed in range(3):
            kv, rows = random_case(
                seed, batch=batch, page_size=page_size, num_path=num_path, row=row, dtype=dtype
            )
            check_equals_the_reference(run, kv, rows)


@pytest.mark.slow_cases("1]")
@pytest.mark.parametrize("buffer_bytes", [1, 3 * 2048, 1 << 20])
def test_any_size_of_the_buffer_gives_the_same(buffer_bytes: int) -> None:
    """Blocks have one row of the batch up to all of them; the last block may not be full."""
    kv, rows = random_case(7, batch=5, page_size=16, num_path=4, row=(2, 128), dtype=jnp.float32)
    check_equals_the_reference(partial(compact, buffer_bytes=buffer_bytes), kv, rows)


@pytest.mark.parametrize("path", [[0, 2, 3, 4], [0, 3, 1, 2]], ids=str)
def test_all_sources_are_read_before_any_is_written(path: list[int]) -> None:
    """This holds also for a path that no tree has, where no order of single moves would do."""
    check_sources_are_read_before_targets_are_written(compact, path)


def test_layers_may_differ_in_their_kv_heads() -> None:
    check_layers_may_differ_in_their_kv_heads(compact)


def test_what_leaves_the_table_is_dropped() -> None:
    check_what_leaves_the_table_is_dropped(compact)


def test_a_path_of_the_root_alone_launches_nothing() -> None:
    check_a_path_of_the_root_alone_launches_nothing(compact_paths)
