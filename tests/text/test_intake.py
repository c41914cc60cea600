"""Which token ids intake accepts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import RequestError, shown_json
from jspec.messages.request import MAX_MASKED_STOP_IDS
from jspec.text.intake import Intake, Prompt
from jspec.text.stream import TokenizedStream
from jspec.text.tokenizer.tokenizer import Tokenizer

VOCAB = 320
INTAKE = Intake(None, vocab_size=VOCAB, eos_token_ids=(0,), context_length=4096)
ids = st.integers(0, VOCAB - 1)
odd = st.one_of(
    st.integers(max_value=-1), st.integers(min_value=VOCAB), st.booleans(), st.floats(), st.text()
)


def is_id(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < VOCAB


@given(st.lists(st.one_of(ids, odd), min_size=1))
def test_the_first_odd_id_is_named(prompt: list[Any]) -> None:
    wrong = [x for x in prompt if not is_id(x)]
    if not wrong:
        assert INTAKE.requests(Prompt(input_ids=prompt))[0].prompt_ids == tuple(prompt)
        return
    with pytest.raises(RequestError) as raised:
        INTAKE.requests(Prompt(input_ids=prompt))
    assert f"input_ids holds {shown_json(wrong[0])}; expected ids from 0 to 319" in str(
        raised.value
    )


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, jnp.int32])
def test_an_array_is_a_prompt(kind: Any) -> None:
    as_array = (jnp if kind is jnp.int32 else np).asarray
    lists = () if kind is jnp.int32 else ([kind(5), 6], (kind(5), kind(6)))
    for prompt in (as_array([5, 6], dtype=kind), *lists):
        (request,) = INTAKE.requests(Prompt(input_ids=prompt))
        assert request.prompt_ids == (5, 6)
        assert {type(x) for x in request.prompt_ids} == {int}


def test_a_list_of_arrays_and_an_array_of_rows_are_lists_of_prompts() -> None:
    two = np.array([[1, 2], [3, 4]])
    cases: list[tuple[Any, list[tuple[int, ...]], bool]] = [
        (two, [(1, 2), (3, 4)], True),
        ([np.array([1]), [2, 3]], [(1,), (2, 3)], True),
        (np.array([7, 8]), [(7, 8)], False),
        ([np.int64(7)], [(7,)], False),
    ]
    for given_ids, prompts, is_list in cases:
        found, was_list = INTAKE.prompts(None, None, given_ids)
        assert [INTAKE.read(each)[0] for each in found] == prompts
        assert was_list == is_list


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([5.0, 6.5]), "input_ids holds 5.0; expected ids from 0 to 319"),
        (np.array([5, 320]), "input_ids holds 320; expected ids from 0 to 319"),
        (np.array([True]), "input_ids holds true; expected ids from 0 to 319"),
        ([1, np.int64(-1)], "input_ids holds -1; expected ids from 0 to 319"),
        ([np.float32(1)], "input_ids holds 1.0; expected ids from 0 to 319"),
        (np.array(5), r"input_ids is array\(5\); expected a list of ids"),
        (np.int64(5), r"input_ids is np.int64\(5\); expected a list of ids"),
        (np.zeros((2, 2, 2), int), r"input_ids holds \[0, 0\]; expected ids from 0 to 319"),
    ],
)
def test_an_array_of_what_is_no_id_is_refused(prompt: Any, message: str) -> None:
    def read() -> None:
        for each in INTAKE.prompts(None, None, prompt)[0]:
            INTAKE.read(each)

    with pytest.raises(RequestError, match=message):
        read()


@given(st.lists(ids, max_size=4), odd)
def test_stop_ids_are_checked_alike(stops: list[int], last: Any) -> None:
    params = {"stop_token_ids": [*stops, last]}
    with pytest.raises(RequestError):
        INTAKE.requests(Prompt(input_ids=[1], sampling=params))


@pytest.mark.parametrize("params", [5, 0, "x", ["temperature"]])
def test_params_that_are_no_fields_are_refused(params: Any) -> None:
    with pytest.raises(RequestError, match=r"sampling_params is .*; expected fields"):
        INTAKE.requests(Prompt(input_ids=[1], sampling=params))


def test_a_priority_is_an_integer_and_few_stop_ids_can_be_masked() -> None:
    for priority in (1.5, "1", True, 2**31):
        with pytest.raises(
            RequestError, match=f"priority is {shown_json(priority)}; expected an integer"
        ):
            INTAKE.read(Prompt(input_ids=[1], priority=priority))  # type: ignore[arg-type]
    most = list(range(1, MAX_MASKED_STOP_IDS))  # besides the end of sequence
    params: dict[str, Any] = {"min_new_tokens": 1, "stop_token_ids": most}
    assert INTAKE.read(Prompt(input_ids=[1], sampling=params))[0] == (1,)
    params["stop_token_ids"] = [*most, 300]
    with pytest.raises(RequestError, match=r"min_new_tokens is 1 with 17 stop token ids \(EOS"):
        INTAKE.read(Prompt(input_ids=[1], sampling=params))


def test_all_sequences_that_stop_alike_share_what_is_made_of_the_strings(
    byte_level: Tokenizer,
) -> None:
    intake = Intake(byte_level, vocab_size=10**6, eos_token_ids=(0,), context_length=64)
    calls = [intake.requests(Prompt(text="a", sampling={"stop": ["xy"], "n": 3})) for _ in "ab"]
    other = intake.requests(Prompt(text="a", sampling={"stop": ["z"]}))[0]
    made = [request.stop_matching for call in calls for request in call]
    assert all(one is made[0] for one in made)
    assert other.stop_matching is not made[0]
    stream = TokenizedStream(byte_level, stop=made[0])
    assert stream.push(byte_level.encode("axyb")).matched == "xy"


def test_a_text_whose_tokens_the_model_has_not_is_refused(byte_level: Tokenizer) -> None:
    highest = max(byte_level.encode("some text"))
    intake = Intake(byte_level, vocab_size=highest, eos_token_ids=(0,), context_length=64)
    with pytest.raises(RequestError, match=rf"makes {highest} of the prompt; expected ids from 0"):
        intake.requests(Prompt(text="some text"))
    intake = Intake(byte_level, vocab_size=highest + 1, eos_token_ids=(0,), context_length=64)
    assert max(intake.requests(Prompt(text="some text"))[0].prompt_ids) == highest
