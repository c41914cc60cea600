"""Plans become one flat array and come out as the device's pytrees, padding included."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.batch import DecodeBatch, PrefillBatch
from jspec.core.config import Algorithm, ServeLimits, SpeculativeConfig
from jspec.core.plan import Admission, PageGrant, PrefillChunk, RowRef, StepKind, StepPlan
from jspec.core.request import MAX_MASKED_STOP_IDS, Request, SamplingParams
from jspec.engine.transfer import ProgramKey, layout_of, pack, program_key, unpack_result

V = 100
LIMITS = ServeLimits(
    spec=SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4),
    num_slots=4,
    num_pages=32,
    page_size=4,
    context_length=32,
    decode_buckets=(1, 2, 4),
    prefill_buckets=(8, 16),
    prefill_rows=3,
)

DECODE = StepPlan(
    step=7,
    kind=StepKind.DECODE,
    full=True,
    rows=(RowRef(2, 5), RowRef(4, 1), RowRef(1, 9)),
    grants=(PageGrant(4, 3, 17), PageGrant(1, 0, 31)),
)


def admission(row: RowRef, *, seed: int, **sampling: object) -> Admission:
    request = Request(
        request_id=f"r{row.slot}",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams.from_mapping(sampling),
        seed=seed,
        eos_token_ids=(99,),
    )
    return Admission(row=row, request=request, prompt_len=3, fill_ids=(5, 6, 7), page_ids=(8, 3))


SEED = 0xFEDCBA9876543210
PREFILL = StepPlan(
    step=8,
    kind=StepKind.PREFILL,
    full=False,
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
)


def decode_batch(plan: StepPlan) -> DecodeBatch:
    key = program_key(plan, LIMITS)
    layout = layout_of(key, LIMITS)
    flat = jnp.asarray(pack(plan, key, LIMITS, vocab_size=V))
    batch: DecodeBatch = jax.jit(lambda x: DecodeBatch(**layout.unpack(x)))(flat)
    return batch


def prefill_batch(plan: StepPlan) -> PrefillBatch:
    key = program_key(plan, LIMITS)
    layout = layout_of(key, LIMITS)
    flat = jnp.asarray(pack(plan, key, LIMITS, vocab_size=V))
    batch: PrefillBatch = jax.jit(lambda x: PrefillBatch(**layout.unpack(x)))(flat)
    return batch


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (DECODE, (StepKind.DECODE, 4, True)),
        (replace(DECODE, rows=DECODE.rows[:2], full=False), (StepKind.DECODE, 2, False)),
        (PREFILL, (StepKind.PREFILL, 8, True)),
    ],
)
def test_the_smallest_program_that_holds_the_plan(plan: StepPlan, key: ProgramKey) -> None:
    assert program_key(plan, LIMITS) == key


def test_decode_rows_and_grants_arrive_and_padding_is_the_dummy_slot() -> None:
    batch = decode_batch(DECODE)
    assert batch.slots.tolist() == [2, 4, 1, 0]
    assert batch.grants.shape == (4 * LIMITS.grants_per_row, 3)
    assert batch.grants[:2].tolist() == [[4, 3, 17], [1, 0, 31]]
    assert not np.asarray(batch.grants[2:]).any()


def test_prefill_chunks_lie_packed() -> None:
    batch = prefill_batch(PREFILL)
    assert batch.slots.tolist() == [1, 3, 0]
    assert batch.starts.tolist() == [6, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 2, 5, 5]
    assert batch.is_final.tolist() == [0, 1, 0]
    assert batch.next_ids.tolist() == [13, 0, 0]
    assert batch.token_ids.tolist() == [11, 12, 5, 6, 7, 0, 0, 0]


def test_an_admission_brings_its_whole_row() -> None:
    batch = prefill_batch(PREFILL)
    assert batch.admitted.tolist() == [0, 3, 0]  # the first row is there already
    assert batch.prompt_lens.tolist() == [0, 3, 0]
    assert batch.page_table.shape == (3, LIMITS.pages_per_row)
    assert batch.page_table[1].tolist() == [8, 3] + [0] * (LIMITS.pages_per_row - 2)
    seed = np.asarray(jax.lax.bitcast_convert_type(batch.seed[1], jnp.uint32))
    assert (int(seed[0]) << 32) + int(seed[1]) == SEED
    floats = np.asarray(jax.lax.bitcast_convert_type(batch.sampling_floats, jnp.float32))
    np.testing.assert_array_equal(floats[1], np.array([0.7, 0.9, 0.05, -0.5, 1.5], np.float32))
    assert batch.sampling_ints[1].tolist() == [5, 4]
    assert batch.stop_ids[1].tolist() == [99, 42] + [V] * (MAX_MASKED_STOP_IDS - 2)


def test_padding_rows_sample_greedily_without_filters() -> None:
    """They run through the same program; nothing in them may be NaN or stop anything."""
    batch = prefill_batch(PREFILL)
    floats = np.asarray(jax.lax.bitcast_convert_type(batch.sampling_floats, jnp.float32))
    for row in (0, 2):
        assert floats[row].tolist() == [0, 1, 0, 0, 0]
        assert batch.sampling_ints[row].tolist() == [V, 0]
        assert set(batch.stop_ids[row].tolist()) == {V}
        assert not np.asarray(batch.page_table[row]).any()


@pytest.mark.parametrize(("top_k", "packed"), [(-1, V), (V + 1, V), (1, 1)])
def test_top_k_is_bounded_by_the_vocabulary(top_k: int, packed: int) -> None:
    plan = replace(PREFILL, admissions=(admission(RowRef(3, 2), seed=0, top_k=top_k),))
    assert int(prefill_batch(plan).sampling_ints[1, 0]) == packed


def test_stop_ids_are_masked_only_under_a_minimum_length() -> None:
    plan = replace(
        PREFILL, admissions=(admission(RowRef(3, 2), seed=0, stop_token_ids=list(range(20))),)
    )
    assert set(prefill_batch(plan).stop_ids[1].tolist()) == {V}


@pytest.mark.parametrize("plan", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_program_of_another_size_is_refused(plan: StepPlan) -> None:
    """More rows or tokens than the program's bucket never wrap or fall off silently."""
    small = (plan.kind, 1, True)
    with pytest.raises(ValueError, match="broadcast"):
        pack(plan, small, LIMITS, vocab_size=V)


def test_results_come_back_by_row() -> None:
    decoded = np.array([[2, 41, 42, 0, 0], [1, 43, 9, 9, 9], [4, 1, 2, 3, 4], [1, 0, 0, 0, 0]])
    result = unpack_result(DECODE, decoded, LIMITS)
    assert result.step == 7
    assert result.rounds == (((41, 42), (43,), (1, 2, 3, 4)),)
    prefilled = np.array([[0, 0], [1, 77], [0, 0]])
    assert unpack_result(PREFILL, prefilled, LIMITS).rounds == (((), (77,)),)


def test_results_of_several_rounds_come_back_by_round() -> None:
    limits = replace(LIMITS, num_rounds=2)
    first = [[2, 41, 42, 0, 0], [1, 43, 9, 9, 9], [4, 1, 2, 3, 4], [1, 0, 0, 0, 0]]
    second = [[1, 51, 0, 0, 0], [3, 52, 53, 54, 0], [1, 55, 0, 0, 0], [1, 9, 9, 9, 9]]
    result = unpack_result(DECODE, np.array(first + second), limits)
    assert result.rounds == (((41, 42), (43,), (1, 2, 3, 4)), ((51,), (52, 53, 54), (55,)))
    prefilled = np.array([[0, 0], [1, 77], [0, 0]])
    assert unpack_result(PREFILL, prefilled, limits).rounds == (((), (77,)),)
