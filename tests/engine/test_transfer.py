"""Plans become one flat array and are unpacked to the device's pytrees, padding included."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig, WindowSpace
from jspec.config.shared_prefixes import SharedPrefix
from jspec.device.batch import DecodeBatch, PrefillBatch, prefill_batch
from jspec.device.state import empty_sampling
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import layout_of, unpack_result
from jspec.messages.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    RowRef,
    StepKind,
    StepPlan,
    StepRun,
)
from jspec.messages.request import MAX_MASKED_STOP_IDS, Request, SamplingParams
from jspec.messages.step_options import PLAIN, SAMPLING, StepOption, StepOptions
from jspec.scheduler.prefill_planner import cached_draft_prefills
from tests.support.fake_limits import small_limits
from tests.support.flat_limits import flat_limits, with_limits
from tests.support.plans import plan_of
from tests.support.programs import packed, programs_of

V = 100
LIMITS = flat_limits(
    draft_shape=SpeculativeConfig(
        algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4
    ),
    num_slots=4,
    num_pages=32,
    page_size=4,
    context_length=32,
    decode_buckets=(1, 2, 4),
    prefill_buckets=(8, 16),
    prefill_rows=3,
)

DECODE = plan_of(
    StepKind.DECODE,
    LIMITS.draft_shape,
    options=SAMPLING,
    rows=(RowRef(2, 5), RowRef(4, 1), RowRef(1, 9)),
    grants=(PageGrant(4, 3, (17,)), PageGrant(1, 0, (31,))),
)


def test_rows_are_told_what_they_share_where_the_program_reads_it() -> None:
    shared = (SharedPrefix(0, 0), SharedPrefix(1, 256), SharedPrefix(1, 256))
    plan = replace(DECODE, shared=shared)
    options = StepOptions(SAMPLING.members | {StepOption.SHARED})
    told = ProgramKey(StepKind.DECODE, 4, options)
    fields = layout_of(told, LIMITS).unpack(packed(plan, told, LIMITS, vocab_size=V))
    np.testing.assert_array_equal(fields["leaders"], [0, 1, 1, 0])
    np.testing.assert_array_equal(fields["shared_keys"], [0, 256, 256, 0])
    nobody = layout_of(told, LIMITS).unpack(packed(DECODE, told, LIMITS, vocab_size=V))
    assert not nobody["shared_keys"].any()
    untold = ProgramKey(StepKind.DECODE, 4, SAMPLING)
    np.testing.assert_array_equal(
        packed(plan, untold, LIMITS, vocab_size=V), packed(DECODE, untold, LIMITS, vocab_size=V)
    )


def admission(row: RowRef, *, seed: int, **sampling: object) -> Admission:
    request = Request(
        request_id=f"r{row.slot}",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams.from_mapping(sampling),
        seed=seed,
        eos_token_ids=(99,),
    )
    return Admission(row=row, request=request, prompt_len=3, fill_ids=(5, 6, 7))


SEED = 0xFEDCBA9876543210
PREFILL = plan_of(
    StepKind.PREFILL,
    LIMITS.draft_shape,
    admissions=(
        admission(
            RowRef(3, 2),
            seed=SEED,
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.05,
            frequency_penalty=-0.5,
            presence_penalty=1.5,
            min_new_tokens=4,
            stop_token_ids=[42],
        ),
    ),
    chunks=(
        PrefillChunk(row=RowRef(1, 1), start=6, token_ids=(11, 12), next_id=13),
        PrefillChunk(row=RowRef(3, 2), start=0, token_ids=(5, 6, 7), next_id=None),
    ),
    grants=(PageGrant(3, 0, (8, 3)),),
)


def decode_batch(plan: StepPlan, limits: ServeLimits = LIMITS) -> DecodeBatch:
    (key,) = programs_of(plan, limits)
    layout = layout_of(key, limits)
    flat = jnp.asarray(packed(plan, key, limits, vocab_size=V))
    batch: DecodeBatch = jax.jit(lambda x: DecodeBatch(**layout.unpack(x)))(flat)
    return batch


def arrived(plan: StepPlan, limits: ServeLimits = LIMITS) -> PrefillBatch:
    (key,) = programs_of(plan, limits)
    layout = layout_of(key, limits)
    flat = jnp.asarray(packed(plan, key, limits, vocab_size=V))
    batch: PrefillBatch = jax.jit(lambda x: prefill_batch(layout.unpack(x)))(flat)
    return batch


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (DECODE, (StepKind.DECODE, 4, SAMPLING)),
        (replace(DECODE, rows=DECODE.rows[:2], options=PLAIN), (StepKind.DECODE, 2, PLAIN)),
        (PREFILL, (StepKind.PREFILL, 8, SAMPLING)),
    ],
)
def test_the_smallest_program_that_holds_the_plan(plan: StepPlan, key: ProgramKey) -> None:
    assert programs_of(plan, LIMITS) == [ProgramKey(*key)]


def test_decode_rows_and_grants_arrive_and_padding_is_the_dummy_slot() -> None:
    batch = decode_batch(DECODE)
    assert batch.slots.tolist() == [2, 4, 1, 0]
    assert batch.grants.shape == (4 * LIMITS.grants_per_row, 3)
    assert batch.grants[:2].tolist() == [[4, 3, 17], [1, 0, 31]]
    assert not np.asarray(batch.grants[2:]).any()


def test_grants_arrive_by_page_space() -> None:
    """In a prefill those of the full space are whole rows of its table."""
    windows = (WindowSpace(3, 20), WindowSpace(8, 20))
    limits = with_limits(LIMITS, windows=windows)
    first, second = PageGrant(4, 1, (5, 7), space=1), PageGrant(1, 0, (6,), space=2)
    decode = decode_batch(replace(DECODE, grants=(*DECODE.grants, first, second)), limits)
    assert decode.grants[:3].tolist() == [[4, 3, 17], [1, 0, 31], [0, 0, 0]]
    assert decode.window_grants is not None
    assert decode.window_grants.shape == (2, 4 * LIMITS.grants_per_row, 3)
    assert decode.window_grants[:, 0].tolist() == [[4, 1, 5], [1, 0, 6]]
    assert decode.window_grants[:, 1].tolist() == [[4, 2, 7], [0, 0, 0]]
    assert not np.asarray(decode.window_grants[:, 2:]).any()
    both = replace(PREFILL, grants=(*PREFILL.grants, first, second))
    prefill = arrived(both, limits)
    assert prefill.window_grants is not None
    assert prefill.window_grants.shape == (2, limits.pages_of_chunks(8), 3)
    assert prefill.window_grants[:, 0].tolist() == [[4, 1, 5], [1, 0, 6]]
    assert prefill.page_table.tolist() == arrived(PREFILL).page_table.tolist()
    caching = arrived(both, with_limits(limits, prefix_cache=True))
    found = LIMITS.programs.prefill_rows * limits.pool.tail_pages(8)
    assert caching.window_grants is not None
    assert caching.window_grants.shape == (2, limits.pages_of_chunks(8) + found, 3)


def test_prefill_chunks_lie_packed() -> None:
    batch = arrived(PREFILL)
    assert batch.slots.tolist() == [1, 3, 0]
    assert batch.starts.tolist() == [6, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 2, 5, 5]
    assert batch.is_final.tolist() == [0, 1, 0]
    assert batch.next_ids.tolist() == [13, 0, 0]
    assert batch.token_ids.tolist() == [11, 12, 5, 6, 7, 0, 0, 0]


def test_an_admission_brings_its_whole_row() -> None:
    batch = arrived(PREFILL)
    assert batch.admitted.tolist() == [0, 3, 0]  # the first row is there already
    assert batch.prompt_lens.tolist() == [0, 3, 0]
    assert batch.page_table.shape == (3, LIMITS.pages_per_row)
    assert batch.page_table[1].tolist() == [8, 3] + [0] * (LIMITS.pages_per_row - 2)
    rows = batch.sampling
    assert (int(rows.seed[1, 0]) << 32) + int(rows.seed[1, 1]) == SEED
    assert rows.top_k[1] == 5
    assert rows.min_new_tokens[1] == 4
    assert rows.stop_ids[1].tolist() == [99, 42] + [V] * (MAX_MASKED_STOP_IDS - 2)
    for name, value in (
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("min_p", 0.05),
        ("frequency_penalty", -0.5),
        ("presence_penalty", 1.5),
    ):
        assert getattr(rows, name)[1] == np.float32(value), name


def test_padding_rows_sample_greedily_without_filters() -> None:
    """They run through the same program; none of their values may be NaN or a stop id."""
    batch = arrived(PREFILL)
    neutral = vars(empty_sampling(3, vocab_size=V))
    for name, array in vars(batch.sampling).items():
        assert (array.dtype, array.shape) == (neutral[name].dtype, neutral[name].shape), name
        np.testing.assert_array_equal(array[::2], neutral[name][::2], name)
    assert not np.asarray(batch.page_table[::2]).any()
    assert {name: neutral[name].ravel()[0].item() for name in neutral} == {
        "min_new_tokens": 0,
        "temperature": 0,
        "top_k": V,
        "top_p": 1,
        "min_p": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": V,
        "seed": 0,
        "stop_ids": V,
        "logprob_start": 2**31 - 1,
        "logprob_ids": V,
        "speculative": 1,
    }


def test_a_prefill_leaves_nothing_behind_in_the_next_one() -> None:
    """Both start from the same neutral array, which is made once."""
    (key,) = programs_of(PREFILL, LIMITS)
    short = replace(PREFILL, admissions=(), chunks=PREFILL.chunks[:1])
    before = packed(short, key, LIMITS, vocab_size=V)
    full = packed(PREFILL, key, LIMITS, vocab_size=V)
    assert (full != before).any()
    np.testing.assert_array_equal(packed(short, key, LIMITS, vocab_size=V), before)
    assert full.flags.writeable


@pytest.mark.parametrize(("top_k", "packed"), [(-1, V), (V + 1, V), (1, 1)])
def test_top_k_is_bounded_by_the_vocabulary(top_k: int, packed: int) -> None:
    plan = replace(PREFILL, admissions=(admission(RowRef(3, 2), seed=0, top_k=top_k),))
    assert int(arrived(plan).sampling.top_k[1]) == packed


def test_stop_ids_are_masked_only_under_a_minimum_length() -> None:
    plan = replace(
        PREFILL, admissions=(admission(RowRef(3, 2), seed=0, stop_token_ids=list(range(20))),)
    )
    assert set(arrived(plan).sampling.stop_ids[1].tolist()) == {V}


@pytest.mark.parametrize("plan", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_program_of_another_size_is_refused(plan: StepPlan) -> None:
    """More rows or tokens than the program's bucket never wrap and are never dropped silently."""
    small = ProgramKey(plan.kind, 1, SAMPLING)
    with pytest.raises(ValueError, match="broadcast"):
        packed(plan, small, LIMITS, vocab_size=V)


def by_round(
    plan: StepPlan, output: np.ndarray, limits: ServeLimits = LIMITS
) -> list[tuple[tuple[int, ...], ...]]:
    return [of_round.emitted_ids for of_round in unpack_result(plan, output[None], limits).rounds]


def test_an_output_of_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output is \(1, 2, 2\); expected 5 columns"):
        unpack_result(replace(DECODE, rows=DECODE.rows[:2]), np.zeros((1, 2, 2), np.int32), LIMITS)


def test_results_come_back_by_row() -> None:
    decoded = np.array([[2, 41, 42, 0, 0], [1, 43, 9, 9, 9], [4, 1, 2, 3, 4], [1, 0, 0, 0, 0]])
    assert by_round(DECODE, decoded) == [((41, 42), (43,), (1, 2, 3, 4))]
    prefilled = np.array([[0, 0], [1, 77], [0, 0]])
    assert by_round(PREFILL, prefilled) == [((), (77,))]


def test_results_of_several_rounds_come_back_by_round() -> None:
    limits = with_limits(LIMITS, num_rounds=2)
    first = [[2, 41, 42, 0, 0], [1, 43, 9, 9, 9], [4, 1, 2, 3, 4], [1, 0, 0, 0, 0]]
    second = [[1, 51, 0, 0, 0], [3, 52, 53, 54, 0], [1, 55, 0, 0, 0], [1, 9, 9, 9, 9]]
    assert by_round(DECODE, np.array(first + second), limits) == [
        ((41, 42), (43,), (1, 2, 3, 4)),
        ((51,), (52, 53, 54), (55,)),
    ]
    prefilled = np.array([[0, 0], [1, 77], [0, 0]])
    assert by_round(PREFILL, prefilled, limits) == [((), (77,))]


def test_cached_ids_come_in_pieces_where_they_are_used() -> None:
    """28 ids of row 2, which has penalties, are cached, and 8 of row 1, which has none."""
    limits = with_limits(LIMITS, prefix_cache=True, context_length=20, prefill_rows=2)
    fill = tuple(range(10, 40))
    plan = replace(
        PREFILL,
        admissions=tuple(
            replace(
                admission(RowRef(slot, 1), seed=0, **sampling),
                fill_ids=fill,
                cached_len=cached,
                prompt_len=12,
            )
            for slot, cached, sampling in ((2, 28, {"presence_penalty": 1.0}), (1, 8, {}))
        ),
    )
    key = ProgramKey(StepKind.CACHED_DRAFT_PREFILL, 20, PLAIN)

    def arrived(plan: StepPlan, limits: ServeLimits) -> list[dict[str, np.ndarray]]:
        runs = cached_draft_prefills(limits, plan.admissions)
        plan = replace(plan, runs=(*runs, StepRun(StepKind.PREFILL, limits.draft_shape)))
        assert programs_of(plan, limits)[:-1] == [key] * len(runs)
        flats = [packed(plan, key, limits, vocab_size=V, run=i) for i in range(len(runs))]
        return [layout_of(key, limits).unpack(flat) for flat in flats]

    first, second = arrived(plan, limits)
    assert (first["slots"].tolist(), first["starts"].tolist()) == ([2, 0], [0, 0])
    assert (first["is_first"].tolist(), second["is_first"].tolist()) == ([1, 0], [0, 0])
    assert first["token_ids"].tolist() == list(fill[:20])
    assert (first["cu_q_lens"].tolist(), first["next_ids"].tolist()) == ([0, 20, 20], [30, 0])
    assert (second["slots"].tolist(), second["starts"].tolist()) == ([2, 0], [20, 0])
    assert second["token_ids"].tolist() == [*fill[20:28], *[0] * 12]
    assert (second["cu_q_lens"].tolist(), second["next_ids"].tolist()) == ([0, 8, 8], [38, 0])
    assert second["prompt_lens"].tolist() == [12, 0]
    ngram = SpeculativeConfig(algorithm=Algorithm.NGRAM, num_steps=3, topk=1, num_draft_tokens=4)
    more = arrived(plan, with_limits(limits, draft_shape=ngram))
    assert [fields["slots"].tolist() for fields in more] == [[2, 0], [2, 1]]
    assert more[1]["token_ids"].tolist() == [*fill[20:28], *fill[:8], *[0] * 4]
    assert more[1]["cu_q_lens"].tolist() == [0, 8, 16]
    assert arrived(PREFILL, limits) == []


def test_a_drafter_is_told_of_the_rows_of_a_plan() -> None:
    limits = small_limits(shapes=((0, 1, 1), (1, 1, 2)))
    runs = (
        StepRun(StepKind.DRAFT_PREFILL, limits.draft_shape),
        StepRun(StepKind.DECODE, limits.shapes[1]),
    )
    plan = StepPlan(
        step=1, runs=runs, options=PLAIN, rows=(RowRef(3, 1), RowRef(1, 4)), pending=(0, 16)
    )
    key, _ = programs_of(plan, limits)
    fields = layout_of(key, limits).unpack(packed(plan, key, limits, vocab_size=V, run=0))
    assert fields["slots"].tolist() == [3, 1, 0, 0][: key.bucket]
    assert fields["counts"].tolist() == [0, 16, 0, 0][: key.bucket]
    output = np.array([[2, 7, 8], [1, 9, 0], [0, 0, 0], [0, 0, 0]], np.int32)
    assert by_round(plan, output, limits) == [((7, 8), (9,))]
