"""An engine for measurements behind HTTP: dummy weights, no tokenizer, simulated acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.errors import RequestError
from jspec.server.app import create_app
from jspec.server.serve import describe, measurement_warnings
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair

from .helpers import ask, events_of
from .test_flags import parse

PARAMS = {"max_new_tokens": 13, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def measured(tiny_pair: TinyPair, engine_arguments: dict[str, Any]) -> Iterator[Engine]:
    arguments = {
        **engine_arguments,
        "max_running_requests": 1,
        "max_total_tokens": 64,
        "disable_logprobs": True,
        "load_format": "dummy",
        "speculative_algorithm": "NGRAM",
        "speculative_draft_model_path": None,
        "speculative_num_draft_tokens": 4,
        "skip_tokenizer_init": True,
        "tokenizer_path": None,
        "simulate_acceptance": 3.0,
    }
    (tiny_pair.target_path / "tokenizer.json").rename(tiny_pair.target_path / "hidden.json")
    try:
        engine = Engine(**arguments)
    finally:
        (tiny_pair.target_path / "hidden.json").rename(tiny_pair.target_path / "tokenizer.json")
    with engine:
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        yield engine


@pytest.mark.slow
def test_ids_in_ids_out_three_a_verification(measured: Engine) -> None:
    result = measured.generate(input_ids=[1, 2, 3], sampling_params=PARAMS)
    assert result["text"] == ""
    assert len(result["output_ids"]) == 13
    assert result["meta_info"]["spec_verify_ct"] == 4
    assert result["meta_info"]["acceptance_length"] == 3.0


@pytest.mark.slow
def test_over_http_too(measured: Engine) -> None:
    app = create_app(measured)
    body = {"input_ids": [1, 2, 3], "sampling_params": PARAMS}
    assert len(ask(app, "POST", "/generate", json=body).json()["output_ids"]) == 13
    streamed = events_of(ask(app, "POST", "/generate", json={**body, "stream": True}).text)
    assert len(streamed[-1]["output_ids"]) == 13
    assert ask(app, "GET", "/model_info").json()["eos_token_ids"] == [256]
    assert ask(app, "GET", "/health_generate").status_code == 200


@pytest.mark.slow
def test_a_length_cut_by_the_pool_is_said_once(
    measured: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    app, long = create_app(measured), {"max_new_tokens": 100, "ignore_eos": True}
    lengths = set()
    with caplog.at_level("WARNING", "jspec.server"):
        for sampling in ({"ignore_eos": True}, long, long):
            body = {"input_ids": [1], "sampling_params": sampling}
            answer = ask(app, "POST", "/generate", json=body).json()
            reason = answer["meta_info"]["finish_reason"]
            assert reason["type"] == "length"
            lengths.add(reason["length"])
    (length,) = lengths
    assert 50 < length <= 64
    (record,) = [r for r in caplog.records if r.name == "jspec.server"]
    assert f"max_new_tokens 100 was cut to {length}" in record.getMessage()
    assert "max_total_tokens" in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "def"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop": ["x"]}}),
        ("/generate", {"input_ids": [1], "stream": True, "return_spec_tokens": True}),
        ("/v1/completions", {"prompt": "def"}),
    ],
)
def test_text_is_a_clear_error(measured: Engine, path: str, body: dict[str, Any]) -> None:
    answer = ask(create_app(measured), "POST", path, json=body)
    assert answer.status_code == 400
    assert "the engine has no tokenizer (skip_tokenizer_init)" in answer.text
    assert measured.stats.num_queued + measured.stats.num_running == 0


@pytest.mark.slow
def test_the_tokenizer_is_a_clear_error_as_well(measured: Engine) -> None:
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        measured.tokenizer  # noqa: B018


@pytest.mark.slow
def test_server_info_and_the_log_say_that_it_is_on(measured: Engine) -> None:
    info = ask(create_app(measured), "GET", "/server_info").json()
    assert info["simulate_acceptance"] == 3.0
    assert info["load_format"] == "dummy"
    assert info["internal_states"][0]["simulate_acceptance"] == 3.0
    assert "NGRAM 3/1/4 with SIMULATED acceptance 3" in describe(measured)
    warnings = measurement_warnings(measured.args)
    assert "the text is not the model's" in warnings[0]
    assert "the weights are random" in warnings[1]


def test_an_ordinary_engine_says_nothing(engine: Engine) -> None:
    assert "SIMULATED" not in describe(engine)
    assert measurement_warnings(engine.args) == ()


def test_no_request_can_switch_it_on(client: httpx.Client) -> None:
    for path, body in (
        ("/generate", {"text": "a", "simulate_acceptance": 3.0}),
        ("/generate", {"text": "a", "sampling_params": {"simulate_acceptance": 3.0}}),
        ("/v1/completions", {"prompt": "a", "simulate_acceptance": 3.0}),
    ):
        client.post(path, json=body).raise_for_status()  # an unknown field, which is ignored
    assert client.get("/server_info").json()["simulate_acceptance"] is None


def test_flags() -> None:
    args = parse("--simulate-acceptance", "2.5", "--skip-tokenizer-init").engine_args
    assert (args.simulate_acceptance, args.skip_tokenizer_init) == (2.5, True)
    assert parse("--load-format", "dummy").engine_args.load_format == "dummy"
    assert parse("--load-format", "safetensors").engine_args == EngineArgs()
