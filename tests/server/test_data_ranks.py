"""An engine of two data ranks answers as one of one rank, and tells what each rank does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jspec.cli.diagnosis.texts import make_texts
from jspec.engine.rescorer import Rescorer
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair

from .helpers import ask, wait_idle, wait_running

LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 7}
KINDS: tuple[dict[str, Any], ...] = (
    {**LONG, "temperature": 0.0},
    {**LONG, "temperature": 0.9, "n": 3},
    {**LONG, "top_k": 20, "frequency_penalty": 0.5},
    {**LONG, "stop": ["never written ~~~"], "min_p": 0.05},
    {"max_new_tokens": 30, "sampling_seed": 7, "regex": "[a-z ]{30,200}"},
)
PROMPTS = [f"def number_{i}(" + "x" * 40 * i for i in range(len(KINDS))]


def answers(engine: Engine) -> list[Any]:
    """Return ids and log-probabilities of every kind, all at once."""
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    found = engine.generate(PROMPTS, list(KINDS), **asked)
    wait_idle(engine)
    return [
        (
            answer["output_ids"],
            [i for _, i, _ in answer["meta_info"]["input_token_logprobs"]],
            np.array([p for p, _, _ in answer["meta_info"]["output_token_logprobs"]]).round(3),
        )
        for answer in found
    ]


def check_same(found: list[Any], expected: list[Any]) -> None:
    for (ids, prompt, logprobs), (others, other_prompt, theirs) in zip(
        found, expected, strict=True
    ):
        assert (ids, prompt) == (others, other_prompt)
        np.testing.assert_allclose(logprobs, theirs, atol=2e-3)


def both(pair: TinyPair) -> dict[str, str]:
    return {
        "model_path": str(pair.target_path),
        "speculative_draft_model_path": str(pair.draft_path),
    }


def check_rescored(engine: Engine) -> None:
    """Check that the target alone, on every rank, chooses what an engine of them emitted."""
    asked = {"prompt": PROMPTS[3], "sampling_params": KINDS[2]}
    (text,) = make_texts(engine, engine.requests(**asked))
    scores = Rescorer(engine.served, most_tokens=256).score(text.request, text.ids)
    assert scores.num_differences == 0
    assert tuple(scores.chosen_ids[scores.prompt_len :]) == text.ids


def check_loads(engine: Engine) -> None:
    """Check that two requests run on two ranks, and that every page says which rank has what."""
    app = create_app(engine, ServerArgs(log_interval=0))
    names = ["num_reqs", "num_waiting_reqs"]
    endless = {"max_new_tokens": 8000, "ignore_eos": True}
    streams = [engine.generate(prompt, endless, stream=True) for prompt in "ab"]
    for stream in streams:
        next(stream)
    wait_running(engine, 2)
    loads = ask(app, "GET", "/get_load").json()
    metrics = ask(app, "GET", "/metrics").text
    for stream in streams:
        stream.close()
    assert [load["dp_rank"] for load in loads] == [0, 1]
    assert [[load[name] for name in names] for load in loads] == [[1, 0]] * 2
    assert all(load["num_tokens"] > 0 for load in loads)
    lines = [line for line in metrics.splitlines() if line.startswith("jspec:rank_num_running")]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f'dp_rank="{rank}"' in line
        assert line.endswith(" 1.0")
    wait_idle(engine)


@pytest.mark.slow
def test_two_ranks_answer_as_one(
    engine: Engine, engine_arguments: dict[str, Any], other_pair: TinyPair, tiny_pair: TinyPair
) -> None:
    """Its pools are tight, its weights change, and its requests have priorities."""
    expected = answers(engine)
    arguments = {**engine_arguments, "max_running_requests": 4, "context_length": 8192}
    arguments |= {"dp_size": 2, "max_total_tokens": 8192 + 512}
    with Engine(**arguments, enable_priority_scheduling=True) as ranks:
        info = ranks.get_server_info()
        assert (info["dp_size"], info["max_running_requests"]) == (2, 4)
        check_same(answers(ranks), expected)
        check_loads(ranks)
        check_rescored(ranks)
        ranks.update_weights_from_disk(**both(other_pair))
        assert answers(ranks)[0][0] != expected[0][0]
        ranks.update_weights_from_disk(**both(tiny_pair))
        check_same(answers(ranks), expected)


@pytest.mark.slow
@pytest.mark.exhaustive  # texts of such meshes: tests/speculative/test_data_ranks.py
def test_ranks_of_two_devices_in_a_process_of_their_own(
    engine: Engine, engine_arguments: dict[str, Any]
) -> None:
    arguments = {**engine_arguments, "max_running_requests": 4}
    arguments |= {"dp_size": 2, "tp_size": 4, "enable_dp_attention": True}
    with Engine(**arguments, engine_process=True) as ranks:
        check_same(answers(ranks), answers(engine))
