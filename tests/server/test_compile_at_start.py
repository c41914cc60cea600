"""After a start with `--compile-at-start all` no request of any kind compiles a program.

tests/engine/test_programs.py checks without compiling that every request has a program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jspec.engine.programs.program_keys import describe_ready
from jspec.messages.request import SAMPLING_FIELDS, SamplingParams
from jspec.messages.step_options import StepOption
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import ask
from .test_weights import compilations

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
# A value of each sampling parameter that needs something of a step; together with others below.
ASKING: dict[str, Any] = {
    "min_new_tokens": 2,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"7": 2.0},
    "return_logprob": True,
    "return_hidden_states": True,
    "return_draft_trees": True,
    "json_schema": json.dumps(SCHEMA),
    "regex": "a+b",
    "ebnf": 'root ::= "ab" | "cd"',
    "structural_tag": json.dumps(TAG),
}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
TOGETHER: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0},
    {"speculative": False},
    {"n": 2, "top_k": 3},
    {**LOGPROBS, "token_ids_logprob": [1, 2], "top_p": 0.5},
    {**LOGPROBS, "regex": "a+b", "return_hidden_states": True, "return_draft_trees": True},
    {"return_hidden_states": True, "return_draft_trees": True, "max_new_tokens": 0},
    {"return_hidden_states": True, "frequency_penalty": 1, "min_p": 0.2},
)


@pytest.fixture(scope="module")
def whole(engine_arguments: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**engine_arguments, compile_at_start="all") as engine:
        yield engine


def test_every_parameter_that_needs_a_program_is_asked_for() -> None:
    needing = {field.name for field in SAMPLING_FIELDS if field.needs is not None}
    # A budget of thinking needs marks in the prompt, and the programs of a grammar.
    assert set(ASKING) == needing - {"max_thinking_tokens"}
    for name, value in ASKING.items():
        assert SamplingParams.from_mapping({name: value}).options


@pytest.mark.slow
def test_no_request_of_any_kind_compiles(whole: Engine) -> None:
    asked = [*({name: value} for name, value in ASKING.items()), *TOGETHER]
    params = [{"max_new_tokens": 6, "sampling_seed": 1, **each} for each in asked]
    prompts = [[1 + i, *range(2, 2 + 9 * (i % 9))] for i in range(len(params))]
    before = whole.get_server_info()
    with compilations() as compiled:
        for prompt, each in zip(prompts, params, strict=True):
            whole.generate(input_ids=prompt, sampling_params=each)
        # Two rows run at a time: each pair of kinds that are neighbours in either order.
        whole.generate(input_ids=prompts, sampling_params=params)
        whole.generate(input_ids=prompts[::2], sampling_params=params[::2])
        whole.score("a", ["b", "c"], [3, 4])
    after = whole.get_server_info()
    assert compiled == []
    counted = ("num_programs", "num_programs_wanted", "compile_at_start")
    assert [after[name] for name in counted] == [before[name] for name in counted]
    assert after["num_programs"] == after["num_programs_wanted"]


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
OVER_HTTP: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"text": "a", "return_draft_trees": True, "return_spec_tokens": True}),
    ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 3}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
    ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [3, 4]}),
)


@pytest.mark.slow
def test_no_route_compiles(whole: Engine) -> None:
    app = create_app(whole, ServerArgs(log_interval=0))
    with compilations() as compiled:
        for path, body in OVER_HTTP:
            answer = ask(app, "POST", path, json=body)
            assert answer.status_code == 200, answer.text
    assert compiled == []


@pytest.mark.slow
def test_hidden_states_are_one_per_token_and_those_of_a_prompt(whole: Engine) -> None:
    """Check C18 of docs/conformance.md with this engine, whose programs for it are compiled."""
    app, ids = create_app(whole, ServerArgs(log_interval=0)), [*range(3, 12)]

    def answer(**body: Any) -> Any:
        return ask(app, "POST", "/generate", json=body).json()

    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    told = answer(input_ids=ids, sampling_params=params, return_hidden_states=True)
    plain = answer(input_ids=ids, sampling_params=params)
    assert told["output_ids"] == plain["output_ids"]
    assert "hidden_states" not in plain["meta_info"]
    prompt, *rows = told["meta_info"]["hidden_states"]
    assert (len(prompt), len(rows)) == (len(ids), 7)
    again = answer(
        input_ids=ids + told["output_ids"][:-1],
        sampling_params={"max_new_tokens": 0},
        return_hidden_states=True,
    )
    np.testing.assert_allclose([*prompt, *rows], again["meta_info"]["hidden_states"][0], atol=1e-4)


@pytest.mark.slow
def test_ready_tells_which_programs_are_compiled(whole: Engine) -> None:
    app = create_app(whole)
    assert ask(app, "GET", "/ready").text == "ready\n"
    every = whole._runner.ready_programs
    assert ask(app, "GET", "/ready?verbose").text.splitlines() == [
        "ready",
        f"programs: {len(every)} compiled, 0 more while serving",
        "grammars and draft trees: compiled",
        "hidden states: compiled",
    ]
    plain = [key for key in every if StepOption.HIDDEN not in key.options]
    assert describe_ready(whole.limits, plain) == (
        f"programs: {len(plain)} compiled, 0 more while serving",
        "grammars and draft trees: compiled",
        "hidden states: compiled at the first request for them",
    )


@pytest.mark.slow
def test_a_later_start_finds_all_of_them(whole: Engine, engine_arguments: dict[str, Any]) -> None:
    how: list[str] = []
    again = {**engine_arguments, "compile_at_start": "all"}
    with Engine(**again, progress=lambda *told: how.append(told[3])) as engine:
        assert how == ["loaded"] * whole.get_server_info()["num_programs"]
        assert engine.get_server_info()["num_programs"] == len(how)
