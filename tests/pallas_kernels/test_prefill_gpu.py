"""The packed Hopper kernel against the reference: in GPU interpret mode, and on a GPU where one is.

Interpret mode checks for races and fills unwritten memory with NaN; page 0, pages without an owner,
unwritten slots and padding queries are NaN as well. It takes no matrix operand from registers and
no running accumulator; those paths are only compiled, and run on a chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.gpu import attend_packed
from jspec.pallas_kernels.prefill.gpu_plan import PrefillPlan
from jspec.pallas_kernels.prefill.tuning import Tuning, choose_tuning
from tests.pallas_kernels.chips import (
    in_turns,
    needs_hopper,
    needs_mosaic_gpu,
)
from tests.pallas_kernels.packed_rows import row_lengths
from tests.pallas_kernels.test_prefill_tpu import Case, draw

SMALL = Tuning(block_tokens=64, stages=2, programs=3)


@dataclass(frozen=True, kw_only=True)
class GPUCase:
    """A case of the shared generator, and rows that the generator would rarely draw."""

    case: Case
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    tuning: Tuning = SMALL


def gpu_case(
    lengths: tuple[int, ...],
    prefixes: tuple[int, ...],
    tuning: Tuning = SMALL,
    *,
    padding: int = 0,
    width: int = 64,
    **changes: Any,
) -> GPUCase:
    page_size = changes.get("page_size", 16)
    longest = max(n + m for n, m in zip(lengths, prefixes, strict=True))
    case = Case(
        queries=sum(lengths) + padding,
        batch=len(lengths),
        widths=(width, width, width),
        pages_per_row=-(-longest // page_size) + 1,
        dtype=jnp.bfloat16,
        writes=False,
        **changes,
    )
    return GPUCase(case=case, lengths=lengths, prefixes=prefixes, tuning=tuning)


CASES = {
    "unequal rows, two of them in a tile, padding": gpu_case(
        (21, 0, 1, 18), (70, 7, 65, 0), padding=5
    ),
    "one long row, unaligned prefix, wide heads": gpu_case(
        (33,), (131,), Tuning(), width=128, page_size=64
    ),
    "every head its own, no prefix": gpu_case((150,), (0,), heads=(2, 2), page_size=32),
    # The last tile has padding, and blocks of keys that all its queries see.
    "group 8, window over several blocks, sinks": gpu_case(
        (9, 20),
        (40, 300),
        padding=3,
        heads=(8, 1),
        window=130,
        sinks=True,
    ),
    "window within a page": gpu_case((33, 1, 8), (90, 64, 0), window=5),
    "one query a row": gpu_case((1, 1, 1, 1, 1), (0, 15, 63, 64, 200)),
    "pages larger than a block of keys": gpu_case((17, 5), (140, 3), heads=(2, 2), page_size=128),
    "group 7": gpu_case((65,), (10,), heads=(7, 1)),
    "no turns, three consumers": gpu_case(
        (30, 20), (99, 0), Tuning(block_tokens=64, stages=3, consumers=3, programs=3), heads=(4, 1)
    ),
    "one consumer, one stage": gpu_case(
        (30, 2), (99, 0), Tuning(block_tokens=64, stages=1, consumers=1)
    ),
    "large blocks of keys, many rows": gpu_case(
        (3, 40, 0, 16, 33), (260, 0, 0, 128, 16), Tuning(), sinks=True
    ),
}

# Two that have almost everything, and what they leave out: wide heads, pages larger than a block
# of keys, and consumers that do not take turns.
FAST = (
    "unequal rows, two of them in a tile, padding",
    "group 8, window over several blocks, sinks",
)
OTHERS = (
    "no turns, three consumers",
    "pages larger than a block of keys",
    "one long row, unaligned prefix, wide heads",
)

E4M3 = jnp.float8_e4m3fn


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """Use the CPU, which simulates the GPU, even where there is a GPU."""
    return jax.default_device(jax.devices("cpu")[0])


RUN = jax.jit(attend_packed, static_argnames=("scale", "window", "tuning", "interpret"))


def check(gpu: GPUCase, *, seed: int, interpret: bool) -> None:
    case = gpu.case
    options: dict[str, Any] = {"scale": 0.1, "window": case.window}
    with on_cpu() if interpret else contextlib.nullcontext():
        rng = np.random.default_rng(seed)
        q, _, _, pool, rows, sinks = draw(case, rng, list(gpu.lengths), list(gpu.prefixes))
        if case.dtype == E4M3:  # queries of an FP8 pool are of another type
            q = q.astype(jnp.float32)
        out = RUN(
            q, pool, rows, sinks=sinks, tuning=gpu.tuning, interpret=interpret, **options
        ).astype(jnp.float32)
        expected = reference.attend(
            q.astype(jnp.float32),
            pool.astype(jnp.float32),
            rows,
            sinks=sinks,
            queries_per_row=None,
            **options,
        )
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.02)
    assert not np.asarray(out)[sum(gpu.lengths) :].any()


@needs_mosaic_gpu
@pytest.mark.parametrize("name", FAST)
def test_equals_the_reference_and_reads_no_poison(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check(CASES[name], seed=len(name), interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("name", "tuning"),
    [
        (FAST[1], Tuning(block_tokens=64, stages=2)),
        pytest.param(
            FAST[1], CASES["one consumer, one stage"].tuning, marks=pytest.mark.exhaustive
        ),
        pytest.param(FAST[1], Tuning(stages=2), marks=pytest.mark.exhaustive),
        pytest.param(
            FAST[0], CASES["no turns, three consumers"].tuning, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "large blocks of keys, many rows",
            Tuning(stages=1, programs=2),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_fp8_pools_equal_the_reference(
    name: str, tuning: Tuning, capfd: pytest.CaptureFixture[str]
) -> None:
    case = dataclasses.replace(CASES[name].case, dtype=E4M3)
    check(dataclasses.replace(CASES[name], case=case, tuning=tuning), seed=2, interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tuning"),
    in_turns(CASES, [None, Tuning(), Tuning(consumers=1, programs=2)], ci=OTHERS),
)
def test_equals_the_reference_under_every_tuning(
    name: str, tuning: Tuning | None, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = CASES[name]
    check(dataclasses.replace(gpu, tuning=tuning or gpu.tuning), seed=1, interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_hopper
@pytest.mark.parametrize("tuning", [None, Tuning()], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_on_the_chip(name: str, tuning: Tuning | None) -> None:
    gpu = CASES[name]
    check(dataclasses.replace(gpu, tuning=tuning or gpu.tuning), seed=1, interpret=False)


@needs_hopper
@pytest.mark.parametrize("dtype", [jnp.float16, E4M3], ids=["f16", "fp8"])
@pytest.mark.parametrize("name", FAST)
def test_equals_the_reference_on_the_chip_in_other_types(name: str, dtype: Any) -> None:
    gpu = CASES[name]
    case = dataclasses.replace(gpu.case, dtype=dtype)
    tuning = choose_tuning(dtype)
    check(dataclasses.replace(gpu, case=case, tuning=tuning), seed=1, interpret=False)


@needs_mosaic_gpu
@pytest.mark.slow
@settings(
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=2,
)
@example(drawn=([0] * 3, [40, 0, 7]), seed=0)  # no row has queries
@given(drawn=row_lengths(batch=3, queries=40, slots=160), seed=st.integers(0, 99))
def test_any_rows_equal_the_reference(drawn: tuple[list[int], list[int]], seed: int) -> None:
    case = Case(
        queries=40,
        batch=3,
        heads=(4, 1),
        widths=(64, 64, 64),
        pages_per_row=10,
        dtype=jnp.bfloat16,
        writes=False,
        window=100,
    )
    lengths, prefixes = drawn
    gpu = GPUCase(case=case, lengths=tuple(lengths), prefixes=tuple(prefixes))
    check(gpu, seed=seed, interpret=True)


@needs_mosaic_gpu
@pytest.mark.slow
def test_no_key_lies_past_the_page_table() -> None:
    """Queries whose own slot is outside of the table see the keys inside, and no other page."""
    case = Case(
        queries=30,
        batch=2,
        heads=(4, 1),
        widths=(64, 64, 64),
        pages_per_row=5,
        dtype=jnp.bfloat16,
        writes=False,
    )
    slots = case.slots_per_row
    with on_cpu():
        q, _, _, pool, rows, _ = draw(case, np.random.default_rng(0), [20, 3], [slots - 20, 0])
        rows = dataclasses.replace(
            rows, prefix_lens=rows.prefix_lens.at[0].set(slots - 4, mode="drop")
        )
        options: dict[str, Any] = {"scale": 0.1, "window": None, "sinks": None}
        run = jax.jit(partial(attend_packed, tuning=SMALL, interpret=True, **options))
        out = run(q, pool, rows)
        expected = reference.attend(q, pool, rows, queries_per_row=None, **options)
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02
    )


# ---- refusals ------------------------------------------------------------------------------


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "the pool is float32; expected bfloat16 or float16"),
        ({"width": 96}, "head_dim is 96; expected 64 or 128"),
        ({"page_size": 24}, "page_size is 24"),
        ({"page_size": 4}, "page_size is 4"),
        ({"heads": 7}, "heads or widths do not fit"),
        ({"tuning": Tuning(stages=4)}, "bytes of shared memory"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"mask": True}, "takes no tail mask"),
        ({"planned": 4}, "the plan has 4 blocks; expected 1"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    width, dtype = changes.get("width", 128), changes.get("dtype", jnp.bfloat16)
    masked = "mask" in changes
    rows = AttentionMetadata(
        page_table=jnp.zeros((1, 2), jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.asarray([0, 2], jnp.int32),
        q_positions=jnp.zeros(2, jnp.int32),
        tail_mask=jnp.zeros((2, 1), jnp.uint32) if masked else None,
        tail_positions=jnp.zeros((1, 2), jnp.int32) if masked else None,
    )
    plan = None
    if "planned" in changes:
        blocks = changes["planned"]
        plan = PrefillPlan(
            bounds=jnp.zeros((blocks, 4), jnp.int32),
            walks=jnp.zeros((blocks, 1, 6), jnp.int32),
            lines=jnp.zeros((2 * blocks, 3, 64), jnp.int32),
        )
    with pytest.raises(ValueError, match=message):
        attend_packed(
            jnp.zeros((2, changes.get("heads", 8), width), dtype),
            jnp.zeros((2, changes.get("page_size", 16), 4, width), dtype),
            rows,
            scale=changes.get("scale", 1.0),
            tuning=changes.get("tuning"),
            plan=plan,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 32}, "block_tokens is 32"),
        ({"stages": 0}, "stages 0"),
        ({"consumers": 4}, "consumers 4"),
        ({"programs": 0}, "programs is 0"),
    ],
)
def test_tunings_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning(**changes)
