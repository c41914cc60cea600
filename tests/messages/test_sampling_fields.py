"""One table of sampling parameters; a new parameter is one more line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import sampling_rows
from jspec.device.state import SamplingBatch
from jspec.engine.steps.step_def import Host
from jspec.engine.transfer import Packer, layout_of
from jspec.errors import RequestError
from jspec.messages.plan import Admission, PageGrant, PrefillChunk, RowRef, StepKind
from jspec.messages.request import SAMPLING_FIELDS, Request, SamplingParams
from jspec.messages.sampling_fields import Number, Row, rows_of, sampled, table_of, write_request
from jspec.messages.step_options import StepOption
from jspec.server.native.generate_schema import SAMPLING_NAMES
from jspec.server.openai.completion_schema import COMPLETION_FIELDS
from tests.support.flat_limits import flat_limits
from tests.support.plans import plan_of
from tests.support.programs import programs_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyParams(SamplingParams):
    """Sampling parameters with one more: two numbers, the second derived from V."""

    toy: float = sampled(
        0.5,
        Number(0, 1),
        needs=StepOption.FILTERS,
        row=Row(
            np.float32,
            (2,),
            neutral=lambda vocab_size: -vocab_size,
            encode=lambda request, vocab_size: (request.sampling.toy, vocab_size),
            name="toys",
        ),
    )


TOY_TABLE = table_of(ToyParams)


def test_the_rows_of_the_device_are_those_of_the_table() -> None:
    assert [field.name for field in dataclasses.fields(SamplingBatch)] == list(
        rows_of(SAMPLING_FIELDS)
    )


def test_every_parameter_is_in_the_table_with_its_default() -> None:
    assert {p.name: p.default for p in SAMPLING_FIELDS} == {
        field.name: field.default for field in dataclasses.fields(SamplingParams) if field.init
    }
    for parameter in SAMPLING_FIELDS:  # defaults are not checked in a request
        assert parameter.read(parameter.default) == parameter.default
        parameter.check(parameter.default)


def test_everything_travels_as_32_bits() -> None:
    assert {np.dtype(row.dtype).itemsize for row in rows_of(SAMPLING_FIELDS).values()} == {4}


def test_both_http_doors_read_every_parameter_once() -> None:
    assert {p.name for p in SAMPLING_FIELDS} == SAMPLING_NAMES
    outer = [p.openai for p in SAMPLING_FIELDS]
    assert len(set(outer)) == len(outer)
    assert set(outer) <= COMPLETION_FIELDS


def test_one_more_line_is_checked_packed_and_unpacked() -> None:
    """It goes from JSON to the device."""
    assert [p.name for p in TOY_TABLE] == [*(p.name for p in SAMPLING_FIELDS), "toy"]
    with pytest.raises(RequestError, match=r"toy is 1\.5; expected a number from 0 to 1"):
        ToyParams.from_mapping({"toy": 1.5})
    params = ToyParams.from_mapping({"toy": 0.25, "top_k": 3, "min_new_tokens": 1})
    assert list(params.options) == [StepOption.FILTERS, StepOption.PENALTIES]
    assert list(ToyParams(toy=0.25).options) == [StepOption.FILTERS]
    request = Request(
        request_id="r", prompt_ids=(5, 6), sampling=params, seed=2**63 + 9, eos_token_ids=(7,)
    )
    row = RowRef(2, 1)
    plan = plan_of(
        StepKind.PREFILL,
        LIMITS.draft_shape,
        options=params.options,
        admissions=(Admission(row=row, request=request, prompt_len=2, fill_ids=(5, 6)),),
        grants=(PageGrant(2, 0, (1,)),),
        chunks=(PrefillChunk(row=row, start=0, token_ids=(5, 6), next_id=None),),
    )
    (key,) = programs_of(plan, LIMITS)
    packer = Packer(Host(LIMITS, V, TOY_TABLE))
    flat = jnp.asarray(packer.pack((plan,), 0, key)[0])
    layout = layout_of(key, LIMITS, table=TOY_TABLE)
    rows = jax.jit(lambda x: sampling_rows(layout.unpack(x), table=TOY_TABLE))(flat)
    assert set(rows) == {*rows_of(SAMPLING_FIELDS), "toys"}
    assert rows["toys"].tolist() == [[0.25, V], [-V, -V]]
    assert rows["top_k"].tolist() == [3, V]
    assert rows["seed"].tolist() == [[2**31, 9], [0, 0]]
    assert rows["stop_ids"][0].tolist() == [7] + [V] * 15
    assert rows["temperature"].tolist() == [1.0, 0.0]


def test_more_values_than_a_row_holds_are_refused() -> None:
    request = Request(
        request_id="r", prompt_ids=(1,), sampling=SamplingParams(), seed=0, eos_token_ids=()
    )
    crowded = dataclasses.replace(
        SAMPLING_FIELDS[0], row=Row(np.int32, (2,), encode=lambda *_: (1, 2, 3))
    )
    fields = {"sampling.max_new_tokens": np.zeros((1, 2), np.int32)}
    with pytest.raises(ValueError, match="broadcast"):
        write_request(fields, 0, request, (crowded,), vocab_size=V)
