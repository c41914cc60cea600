"""Sampling parameters are checked on entry; seeds of choices differ."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jspec.config.peer_parameters import PEER_PARAMETERS
from jspec.errors import RequestError
from jspec.messages.request import (
    SAMPLING_FIELDS,
    FinishKind,
    FinishReason,
    Request,
    SamplingParams,
    SpecCounters,
)
from jspec.messages.seeds import MAX_SEED, choice_seed
from jspec.messages.step_options import StepOption

NAN, INF = float("nan"), float("inf")


def test_parameters_that_python_gives_are_read_as_json_s_are() -> None:
    """SGLang's SamplingParams takes one stop string, a list of them, or None."""
    loose: dict[str, Any] = {"stop": "end", "stop_regex": None, "stop_token_ids": [1, 2]}
    params = SamplingParams(**loose)
    assert (params.stop, params.stop_regex, params.stop_token_ids) == (("end",), (), (1, 2))
    assert params == SamplingParams(stop=("end",), stop_token_ids=(1, 2))
    wrong: dict[str, Any] = {"stop": 5}
    with pytest.raises(RequestError, match="stop is 5; expected a string or a list of strings"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1; expected an integer of at least 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; expected an integer"),
        ({"max_new_tokens": True}, "max_new_tokens is true; expected an integer"),
        (
            {"max_new_tokens": 3, "min_new_tokens": 4},
            "min_new_tokens is 4; expected at most max_new_tokens, which is 3",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1; expected a number from 0 to 100"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"temperature": False}, "temperature is false; expected a number"),
        ({"top_k": -2}, r"top_k is -2; expected -1 or 0 \(keep all\) or at least 1"),
        ({"top_p": 0.0}, r"top_p is 0; expected a number in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": NAN}, "min_p is nan"),
        ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1; expected a number from -2 to 2"),
        ({"presence_penalty": -3}, "presence_penalty is -3"),
        ({"sampling_seed": -(2**63) - 1}, "sampling_seed is -9223372036854775809"),
        ({"sampling_seed": MAX_SEED + 1}, "sampling_seed is 18446744073709551616"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected true or false"),
        ({"stop": [""]}, "stop holds ''; expected non-empty strings"),
        ({"stop": [7]}, "stop holds 7"),
        ({"stop": ["a", "\ud800"]}, "stop holds a lone surrogate; expected Unicode text"),
        ({"stop": 7}, "stop is 7; expected a string or a list of strings"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; expected a list of integers"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids is 2147483648"),
        ({"max_new_tokens": 2**31, "min_new_tokens": 2**31}, "max_new_tokens is 2147483648"),
        ({"stop": "x" * 300_000}, "stop has 300000 characters; expected at most 8192 in all"),
        ({"stop": ["x" * 4096, "y" * 4097]}, "stop has 8193 characters"),
        ({"stop": ["x"] * 257}, "stop has 257 items; expected at most 256"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids has 4097 items; expected at most 4096"),
        ({"n": 0}, "n is 0"),
        ({"speculative": "no"}, "speculative is 'no'; expected true, false, 'on' or 'off'"),
        ({"n": 129}, "n is 129"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"logit_biases": {}}, "unknown field 'logit_biases'; did you mean 'logit_bias'?"),
        ({"logit_bias": [5]}, r"logit_bias is \[5\]; expected an object of token ids and numbers"),
        ({"logit_bias": {"a": 1}}, "logit_bias names 'a'; expected a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias of token 5 is 101; expected a number from -100"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias names a token id twice"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias has 301 items; expected"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0; expected a number in \(0, 2\]"),
        ({"top_logprobs_num": 21}, "top_logprobs_num is 21; expected an integer of at least 0 and"),
        ({"token_ids_logprob": list(range(33))}, "token_ids_logprob has 33 items; expected at"),
        ({"logprob_start_len": -2}, "logprob_start_len is -2; expected an integer of at least -1"),
    ],
)
def test_bad_values_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams.from_mapping(values)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "'max_new_tokens'"),
        ("max_completion_tokens", "'max_new_tokens'"),
        ("seed", "'sampling_seed'"),
        ("stop_strings", "'stop'"),
        ("do_sample", "'temperature', of which 0 is greedy"),
        ("temprature", "'temperature'"),
        ("wings", ""),
    ],
)
def test_a_name_of_elsewhere_says_what_is_meant(name: str, meant: str) -> None:
    hint = f"; did you mean {meant}?" if meant else ""
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{name: 3})
    assert str(caught.value) == f"SamplingParams() got an unexpected argument {name!r}{hint}"
    with pytest.raises(RequestError) as refused:
        SamplingParams.from_mapping({name: 3})
    hint = f"; did you mean {meant}? expected" if meant else "; expected"
    assert f"has the unknown field {name!r}{hint} one of" in str(refused.value)


def test_every_name_of_elsewhere_means_parameters_that_are_there() -> None:
    known = {field.name for field in SAMPLING_FIELDS}
    for name, meant in PEER_PARAMETERS.items():
        assert name not in known
        assert set(re.findall("'(.*?)'", meant)) <= known, name
    for field in SAMPLING_FIELDS:
        assert field.openai == field.name or PEER_PARAMETERS[field.openai] == repr(field.name)


def test_numbers_of_numpy_are_python_s_own() -> None:
    loose: dict[str, Any] = {
        "max_new_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "top_p": np.float64(0.25),
        "top_k": np.uint8(7),
        "min_p": Fraction(1, 4),
        "ignore_eos": np.bool_(True),
        "speculative": np.bool_(False),
        "n": np.int32(2),
        "stop_token_ids": np.array([5, 6]),
        "token_ids_logprob": [np.int64(8), 9],
        "logit_bias": {np.int64(4): np.float32(-1.5), "5": 1},
        "stop": np.array(["a", "b"]),
    }
    for params in (SamplingParams(**loose), SamplingParams.from_mapping(loose)):
        found = {name: getattr(params, name) for name in loose}
        assert found == {
            **{"max_new_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.25},
            **{"ignore_eos": True, "speculative": False, "n": 2, "stop_token_ids": (5, 6)},
            **{"token_ids_logprob": (8, 9), "logit_bias": ((4, -1.5), (5, 1)), "stop": ("a", "b")},
        }
        flat = [*found.values(), *params.stop_token_ids, *params.token_ids_logprob]
        flat += [x for pair in params.logit_bias for x in pair]
        assert {type(x) for x in flat} == {int, float, bool, tuple}
    pairs: Any = ((np.int64(4), np.float32(-1.5)),)
    assert SamplingParams(logit_bias=pairs).logit_bias == ((4, -1.5),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": np.float32(1.5)}, "max_new_tokens is 1.5; expected an integer"),
        ({"temperature": np.float32("nan")}, "temperature is nan; expected a number"),
        ({"ignore_eos": np.int64(1)}, "ignore_eos is 1; expected true or false"),
        ({"stop_token_ids": np.array([1.5])}, "stop_token_ids is 1.5; expected an integer"),
        ({"stop_token_ids": np.array([[1]])}, r"stop_token_ids is \[1\]; expected an integer"),
        ({"temperature": np.array([1.0])}, r"temperature is \[1.0\]; expected a number"),
    ],
)
def test_numbers_of_numpy_are_refused_as_python_s_own(values: dict[str, Any], message: str) -> None:
    for make in (SamplingParams.from_mapping, lambda given: SamplingParams(**given)):
        with pytest.raises(RequestError, match=message):
            make(values)


def test_a_copy_of_parameters_is_equal() -> None:
    params = SamplingParams(max_new_tokens=3, stop=("x",), stop_token_ids=(5,))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)).stop_id_set == {5}


def test_edges_that_are_allowed() -> None:
    params = SamplingParams.from_mapping(
        {
            "temperature": 0,
            "top_p": 1,
            "top_k": -1,
            "min_p": 1.0,
            "sampling_seed": MAX_SEED,
            "stop": "###",
            "stop_token_ids": [0, 2**31 - 1],
            "max_new_tokens": 1,
            "min_new_tokens": 1,
            "frequency_penalty": None,
        }
    )
    assert params.stop == ("###",)
    assert params.stop_token_ids == (0, 2**31 - 1)
    assert params.frequency_penalty == 0.0


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, []),
        ({"temperature": 0.7, "sampling_seed": 3, "stop": ["x"]}, []),
        ({"top_k": 5}, [StepOption.FILTERS]),
        ({"top_k": 0, "no_stop_trim": True, "skip_special_tokens": False}, []),
        ({"top_p": 0.99}, [StepOption.FILTERS]),
        ({"min_p": 0.01}, [StepOption.FILTERS]),
        ({"frequency_penalty": -0.1}, [StepOption.PENALTIES]),
        ({"presence_penalty": 0.1}, [StepOption.PENALTIES]),
        ({"min_new_tokens": 1}, [StepOption.PENALTIES]),
        ({"min_new_tokens": 1, "top_k": 5}, [StepOption.FILTERS, StepOption.PENALTIES]),
        ({"top_k": -1, "top_p": 1, "min_p": 0, "presence_penalty": -0.0, "min_new_tokens": 0}, []),
    ],
)
def test_which_features_a_request_needs(values: dict[str, Any], needed: list[StepOption]) -> None:
    assert list(SamplingParams.from_mapping(values).options) == needed


def test_seeds_of_choices_differ_and_the_first_is_the_requests_own() -> None:
    seeds = {choice_seed(seed, i) for seed in range(512) for i in range(16)}
    assert len(seeds) == 512 * 16
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert choice_seed(MAX_SEED, 0) == MAX_SEED
    assert choice_seed(MAX_SEED, 1) == choice_seed(MAX_SEED, 1)
    # SplitMix64's published stream from state 0, its high 53 bits: a reader of JSON keeps them all.
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF >> 11
    assert choice_seed(0, 2) == 0x6E789E6AA1B965F4 >> 11


def request(**values: Any) -> Request:
    return Request(
        request_id="r",
        prompt_ids=(1, 2),
        sampling=SamplingParams.from_mapping(values),
        seed=5,
        eos_token_ids=(9, 8),
    )


def test_stop_ids_are_eos_and_the_requests_own_once_each() -> None:
    assert request(stop_token_ids=[8, 7, 7]).stop_ids == (9, 8, 7)
    assert request(stop_token_ids=[8, 7], ignore_eos=True).stop_ids == (8, 7)
    assert request(ignore_eos=True).stop_ids == ()


def test_finish_reasons_in_sglangs_words() -> None:
    assert FinishReason(kind=FinishKind.STOP, matched=0).to_json() == {"type": "stop", "matched": 0}
    assert FinishReason(kind=FinishKind.LENGTH, length=4).to_json() == {
        "type": "length",
        "length": 4,
    }
    assert FinishReason(kind=FinishKind.ABORT, message="gone").to_json() == {
        "type": "abort",
        "message": "gone",
    }


def test_acceptance_length_counts_whole_steps_only() -> None:
    counters = SpecCounters(verify_ct=3, full_verify_ct=2, full_num_emitted=7)
    assert counters.acceptance_length == 3.5
    assert SpecCounters().acceptance_length == 0.0


def test_a_stop_id_is_looked_up_in_a_set_that_all_choices_share() -> None:
    sampling = SamplingParams(stop=("x" * 8192,), stop_token_ids=tuple(range(2, 4098)), n=2)
    choices = [
        Request(request_id=str(i), prompt_ids=(1,), sampling=sampling, seed=i, eos_token_ids=(0,))
        for i in range(2)
    ]
    for request in choices:
        assert request.sampling.stop_id_set is sampling.stop_id_set == set(range(2, 4098))
        assert [i for i in range(5000) if request.ends_with(i)] == sorted(request.stop_ids)
    heedless = replace(choices[0], sampling=replace(sampling, ignore_eos=True))
    assert not heedless.ends_with(0)
    assert heedless.ends_with(2)
    assert "stop_id_set" not in {parameter.name for parameter in SAMPLING_FIELDS}
    assert pickle.loads(pickle.dumps(sampling)) == sampling
