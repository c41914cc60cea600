"""An engine in a separate process: the same text, however that process ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jspec.engine.process.process_messages import Enqueue
from jspec.engine.process.process_runner import ProcessRunner
from jspec.errors import ConfigError, EngineClosedError
from jspec.serving.engine import Engine
from jspec.serving.recovery import RestartLimits
from tests.support.broken_step import FailingEngine

from .helpers import wait_idle

LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True, "sampling_seed": 7}
# One request of each kind, which must continue unchanged.
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {**LONG, "temperature": 0.9},
    "greedy": {**LONG, "temperature": 0.0},
    "filtered": {**LONG, "top_k": 20, "top_p": 0.9},
    "penalized": {**LONG, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stops": {**LONG, "stop": ["never written ~~~"]},
}
CONSTRAINED = {"max_new_tokens": 60, "sampling_seed": 7, "regex": "[a-z ]{60,200}"}


@pytest.fixture(scope="module")
def apart(engine_arguments: dict[str, Any]) -> Iterator[Engine]:
    arguments = {**engine_arguments, "max_running_requests": 2}
    with Engine(engine_process=True, **arguments) as engine:
        engine._loop._recovery._limits = RestartLimits(most=100)  # as many as there are tests
        yield engine


def runner_of(engine: Engine) -> ProcessRunner:
    return cast(ProcessRunner, engine._runner)


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def wait_restarted(engine: Engine, before: int, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.stats.num_restarts == before or engine.is_restarting:
        assert time.monotonic() < deadline, engine.stats
        time.sleep(0.01)


def kill_while(
    engine: Engine, running: Future[Any], *, after_tokens: int, number: signal.Signals
) -> None:
    """Kill the process after some more tokens, while requests run."""
    emitted = engine.stats.num_emitted
    while engine.stats.num_emitted < emitted + after_tokens:
        assert not running.done()
        time.sleep(0.001)
    assert engine.process_id is not None
    os.kill(engine.process_id, number)


@pytest.mark.slow
def test_text_goes_on_over_a_kill(engine: Engine, apart: Engine) -> None:
    prompts = [f"def {name}(" for name in KINDS]
    params = list(KINDS.values())
    expected = ids_of(engine.generate(prompts, params))
    before = apart.stats.num_restarts
    with ThreadPoolExecutor() as pool:
        running = pool.submit(apart.generate, prompts, params)
        kill_while(apart, running, after_tokens=60, number=signal.SIGKILL)
        assert ids_of(running.result(timeout=120)) == expected
    assert apart.stats.num_restarts == before + 1
    wait_idle(apart)
    # No step ran meanwhile, and it continues in a process with an empty cache.
    assert ids_of(apart.generate(prompts[:1], params[:1])) == expected[:1]


def test_text_goes_on_over_a_lost_state(engine: Engine, engine_arguments: dict[str, Any]) -> None:
    """In this process: the state is made again, with the same weights and programs."""
    prompts, params = [f"def {name}(" for name in KINDS], list(KINDS.values())
    expected = ids_of(engine.generate(prompts, params))
    with FailingEngine(**engine_arguments) as failing:
        assert ids_of(failing.generate(prompts, params)) == expected
        assert failing.stats.num_restarts == 1
        wait_idle(failing)


@pytest.mark.slow
def test_a_grammar_goes_on_over_a_kill(engine: Engine, apart: Engine) -> None:
    expected = ids_of(engine.generate(["def f("], [CONSTRAINED]))
    assert ids_of(apart.generate(["def f("], [CONSTRAINED])) == expected  # its programs exist
    with ThreadPoolExecutor() as pool:
        running = pool.submit(apart.generate, ["def f("], [CONSTRAINED])
        kill_while(apart, running, after_tokens=5, number=signal.SIGKILL)
        assert ids_of(running.result(timeout=120)) == expected


@pytest.mark.slow
def test_an_end_is_noticed_while_nothing_runs(apart: Engine) -> None:
    wait_idle(apart)
    before, first = apart.stats.num_restarts, apart.process_id
    assert first is not None
    os.kill(first, signal.SIGSEGV)
    wait_restarted(apart, before)
    assert apart.process_id != first
    assert apart.generate("x", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] == 3


@pytest.mark.slow
def test_an_error_in_a_step_goes_no_further(engine: Engine, apart: Engine) -> None:
    before = apart.stats.num_restarts
    with ThreadPoolExecutor() as pool:
        running = pool.submit(apart.generate, ["def f("], [KINDS["sampled"]])
        while apart.stats.num_running == 0:
            time.sleep(0.001)
        bad = Enqueue(0, "no such program", (np.zeros(1, np.int32),), is_read=False)
        runner_of(apart)._process.send(bad)
        found = running.result(timeout=120)
    assert ids_of(found) == ids_of(engine.generate(["def f("], [KINDS["sampled"]]))
    assert apart.stats.num_restarts == before + 1


@pytest.mark.slow
def test_a_request_that_ran_at_two_ends_fails_and_the_engine_goes_on(apart: Engine) -> None:
    endless = {"max_new_tokens": 16000, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(apart.generate, ["x"], [endless], return_exceptions=True)
        for _ in range(2):
            before = apart.stats.num_restarts
            kill_while(apart, running, after_tokens=20, number=signal.SIGKILL)
            wait_restarted(apart, before)
        (failed,) = running.result(timeout=120)
    assert "ran each of 2 times that the engine failed" in str(failed)
    assert "ended by signal 9" in str(failed)
    wait_idle(apart)
    assert apart.generate("x", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] == 3


@pytest.mark.slow
def test_it_answers_as_an_engine_in_this_process(
    engine: Engine, apart: Engine, tmp_path: Path
) -> None:
    assert apart.limits == engine.limits
    info, here = apart.get_server_info(), engine.get_server_info()
    assert {name for name in here if info[name] != here[name]} <= {
        *("engine_process", "startup_seconds", "internal_states", "random_seed"),
        *("num_programs", "num_programs_wanted"),  # programs that other tests requested
    }
    params = {"max_new_tokens": 8, "temperature": 0.0}
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    one, two = (each.generate("def f(", params, **options)["meta_info"] for each in (engine, apart))
    assert one["output_token_logprobs"] == two["output_token_logprobs"]
    with pytest.raises(ConfigError, match="engine_process is True"):
        _ = apart.served
    apart.profiler.start(str(tmp_path))
    apart.generate("x", {"max_new_tokens": 2})
    apart.profiler.stop()
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.slow
def test_closing_does_not_wait_for_a_new_start(engine_arguments: dict[str, Any]) -> None:
    begun = time.monotonic()
    engine = Engine(engine_process=True, **engine_arguments)
    seconds_of_a_start = time.monotonic() - begun
    runner = runner_of(engine)
    assert engine.process_id is not None
    os.kill(engine.process_id, signal.SIGKILL)
    while not engine.is_restarting or not runner._restarting.locked():
        time.sleep(0.001)
    begun = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - begun < 0.75 * seconds_of_a_start
    assert threading.active_count() < 50


@pytest.mark.slow
def test_what_cannot_start_is_said_as_it_is_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for options in cast(
        tuple[dict[str, Any], ...],
        ({"model_path": str(tmp_path)},),
    ):
        errors = []
        for engine_process in (False, True):
            with pytest.raises(Exception, match=r"\S") as error:
                Engine(None, engine_process=engine_process, **options)
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]


@pytest.mark.slow
@pytest.mark.exhaustive  # starts four engines
def test_weights_from_disk_come_back_and_given_ones_end_it(
    apart: Engine, engine_arguments: dict[str, Any]
) -> None:
    """This must be the last test of `apart`."""
    target = engine_arguments["model_path"]
    ids = ids_of(apart.generate(["def f("], [KINDS["greedy"]]))
    name = "model.norm.weight"
    assert np.shape(apart.get_weights_by_name(name)) != ()
    apart.update_weights_from_disk(target, weight_version="two")
    before = apart.stats.num_restarts
    assert apart.process_id is not None
    os.kill(apart.process_id, signal.SIGKILL)
    wait_restarted(apart, before)
    assert ids_of(apart.generate(["def f("], [KINDS["greedy"]])) == ids
    assert apart.weight_version == "two"
    array = np.asarray(apart.get_weights_by_name(name, 10_000), np.float32)
    apart.update_weights_from_tensor({name: array * 2})
    os.kill(apart.process_id, signal.SIGKILL)
    while not apart.is_closed:
        time.sleep(0.01)
    with pytest.raises(EngineClosedError, match="given as arrays"):
        apart.generate("x", {"max_new_tokens": 3})
