"""One table of sampling parameters; a new parameter is one more line."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import sampling_batch
from jspec.device.state import SamplingBatch
from jspec.engine.transfer import layout_of
from jspec.messages.plan import Admission, PageGrant, PrefillChunk, RowRef, StepKind
from jspec.messages.request import SAMPLING_FIELDS, Request, SamplingParams
from jspec.messages.sampling_rows import SAMPLING_ROWS, packed_fields, write_request
from jspec.messages.step_options import SAMPLING
from jspec.server.native.generate_schema import SAMPLING_NAMES
from jspec.server.openai.completion_schema import COMPLETION_FIELDS
from tests.support.flat_limits import flat_limits
from tests.support.plans import plan_of
from tests.support.programs import packed, programs_of

V = 50
LIMITS = flat_limits(
    draft_shape=SpeculativeConfig(
        algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4
    ),
    num_slots=2,
    num_pages=8,
    page_size=4,
    context_length=16,
    decode_buckets=(2,),
    prefill_buckets=(4,),
    prefill_rows=2,
)


def test_the_rows_of_the_device_are_those_of_the_table() -> None:
    assert [field.name for field in dataclasses.fields(SamplingBatch)] == list(SAMPLING_ROWS)


def test_every_parameter_is_in_the_table_with_its_default() -> None:
    assert {p.name: p.default for p in SAMPLING_FIELDS} == {
        field.name: field.default for field in dataclasses.fields(SamplingParams) if field.init
    }
    for parameter in SAMPLING_FIELDS:  # defaults are not checked in a request
        assert parameter.read(parameter.default) == parameter.default
        parameter.check(parameter.default)


def test_everything_travels_as_32_bits() -> None:
    assert {np.dtype(row.dtype).itemsize for row in SAMPLING_ROWS.values()} == {4}


def test_both_http_doors_read_every_parameter_once() -> None:
    assert {p.name for p in SAMPLING_FIELDS} == SAMPLING_NAMES
    outer = [p.openai for p in SAMPLING_FIELDS]
    assert len(set(outer)) == len(outer)
    assert set(outer) <= COMPLETION_FIELDS


def test_every_parameter_is_packed_and_unpacked() -> None:
    """A request goes to the device through the layout of a step."""
    params = SamplingParams(
        temperature=0.25,
        top_k=3,
        top_p=0.5,
        min_p=0.125,
        frequency_penalty=1.5,
        presence_penalty=-1.5,
        repetition_penalty=0.75,
        logit_bias={4: -2.5},
        min_new_tokens=1,
        stop_token_ids=(9,),
        return_logprob=True,
        logprob_start_len=1,
        token_ids_logprob=(8, 6),
        speculative=False,
    )
    expected = {  # of the row, and of a row without a request
        "min_new_tokens": (1, 0),
        "temperature": (0.25, 0),
        "top_k": (3, V),
        "top_p": (0.5, 1),
        "min_p": (0.125, 0),
        "frequency_penalty": (1.5, 0),
        "presence_penalty": (-1.5, 0),
        "repetition_penalty": (0.75, 1),
        "logit_bias": ([[4, np.float32(-2.5).view(np.int32)]] + [[V, V]] * 299, [[V, V]] * 300),
        "seed": ([2**31, 9], [0, 0]),
        "stop_ids": ([7, 9] + [V] * 14, [V] * 16),
        "logprob_start": (1, 2**31 - 1),
        "logprob_ids": ([8, 6] + [V] * 30, [V] * 32),
        "speculative": (0, 1),
    }
    row = RowRef(2, 1)
    plan = plan_of(
        StepKind.PREFILL,
        LIMITS.draft_shape,
        options=SAMPLING,
        admissions=(Admission(row=row, request=asking(params), prompt_len=2, fill_ids=(5, 6)),),
        grants=(PageGrant(2, 0, (1,)),),
        chunks=(PrefillChunk(row=row, start=0, token_ids=(5, 6), next_id=None),),
    )
    (key,) = programs_of(plan, LIMITS)
    flat = jnp.asarray(packed(plan, key, LIMITS, vocab_size=V))
    batch = jax.jit(lambda x: sampling_batch(layout_of(key, LIMITS).unpack(x)))(flat)
    assert {name: array.tolist() for name, array in vars(batch).items()} == {
        name: list(rows) for name, rows in expected.items()
    }


def test_more_values_than_a_row_holds_are_refused() -> None:
    request = asking(SamplingParams(min_new_tokens=1, stop_token_ids=tuple(range(17))))
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed_fields(1)}
    with pytest.raises(ValueError, match="broadcast"):
        write_request(fields, 0, request, vocab_size=V)


def asking(params: SamplingParams) -> Request:
    return Request(
        request_id="r", prompt_ids=(5, 6), sampling=params, seed=2**63 + 9, eos_token_ids=(7,)
    )
