"""The server's answers while its engine fails: the real loop, no model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import RequestFailedError
from jspec.messages.plan import StepKind, StepPlan
from jspec.messages.protocols import TextCut
from jspec.messages.request import Request
from jspec.server.app import create_app
from jspec.serving.recovery import RestartLimits
from tests.support.speaking_engine import SpeakingEngine, write_text_files

from .helpers import ask, events_of, wait_idle

SAYS = "It is sunny in Paris, and it will be tomorrow. " * 4
POISON = "poison"


class BrokenText:
    """A text stream that raises at the third id."""

    def __init__(self) -> None:
        self._num_ids = 0
        self.matched: str | None = None

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        del allow_stop
        self._num_ids += len(ids)
        if self._num_ids > 2:
            raise ValueError("no such character")
        return TextCut(num_ids=len(ids), text="x" * len(ids))

    def flush(self) -> str:
        raise ValueError("no such character")

    def watch(self) -> None:
        """Return None: only the text can tell where it ends."""


class BrokenTextEngine(SpeakingEngine):
    """An engine in which prompts that start with POISON have a BrokenText."""

    def _start(self, progress: Any) -> None:
        super()._start(progress)
        make = self._scheduler._make_stream
        ids = self.tokenizer.encode(POISON, add_special_tokens=False)

        def make_stream(request: Request) -> Any:
            is_broken = request.prompt_ids[: len(ids)] == tuple(ids)
            return BrokenText() if is_broken else make(request)

        self._scheduler._make_stream = make_stream


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_files(tmp_path_factory.mktemp("text"), template="{{ messages }}")


@contextmanager
def speaking(
    texts: Path, kind: Callable[..., SpeakingEngine] = SpeakingEngine, **options: Any
) -> Iterator[SpeakingEngine]:
    engine = kind(texts, says=SAYS, **options)
    engine._loop._recovery._limits = RestartLimits(first_pause=0.0)
    with engine:
        yield engine


def once_at(step: int) -> Callable[[StepPlan], bool]:
    return lambda plan: plan.step == step


def is_poisoned(plan: StepPlan) -> bool:
    return any(each.request.request_id == POISON for each in plan.admissions)


def metric(app: Any, name: str) -> float:
    lines = ask(app, "GET", "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_over_a_failure(texts: Path, *, stream: bool) -> None:
    with speaking(texts, fails=once_at(5)) as engine:
        app = create_app(engine)
        body = {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 500}}
        answer = ask(app, "POST", "/generate", json=body)
        assert answer.status_code == 200
        last = events_of(answer.text)[-1] if stream else answer.json()
        assert last["text"] == SAYS
        assert last["meta_info"]["finish_reason"]["type"] == "stop"
        assert metric(app, "jspec:num_engine_restarts_total") == 1
        wait_idle(engine)


def test_a_restarting_engine_is_alive_but_not_ready_and_requests_wait(texts: Path) -> None:
    may_restart = threading.Event()
    with speaking(texts, fails=once_at(3), may_restart=may_restart) as engine:
        app = create_app(engine)
        body = {"text": "x", "sampling_params": {"max_new_tokens": 500}}
        with ThreadPoolExecutor() as pool:
            running = pool.submit(ask, app, "POST", "/generate", json=body)
            while not engine.is_restarting:
                time.sleep(0.001)
            later = pool.submit(ask, app, "POST", "/generate", json=body)
            assert ask(app, "GET", "/health").status_code == 200  # a liveness probe kills nothing
            for path in ("/ready", "/health_generate"):
                assert ask(app, "GET", path).status_code == 503
            assert "restarting" in ask(app, "GET", "/ready").json()["message"]
            while engine.stats.num_queued < 2:
                time.sleep(0.001)
            may_restart.set()
            for answer in (running.result(timeout=60), later.result(timeout=60)):
                assert answer.json()["text"] == SAYS
        for path in ("/health", "/ready", "/health_generate"):
            assert ask(app, "GET", path).status_code == 200


def test_who_ran_in_two_failures_is_told_so(texts: Path) -> None:
    with speaking(texts, fails=is_poisoned) as engine:
        app = create_app(engine)
        body: dict[str, Any] = {"text": "x", "rid": POISON}
        answer = ask(app, "POST", "/generate", json=body)
        assert answer.status_code == 500
        assert f"'{POISON}' ran each of 2 times that the engine failed" in answer.json()["message"]
        last = events_of(ask(app, "POST", "/generate", json={**body, "stream": True}).text)[-1]
        assert last["code"] == 500
        assert "ran each of 2 times" in last["error"]["message"]
        body = {"text": "x", "sampling_params": {"max_new_tokens": 500}}
        assert ask(app, "POST", "/generate", json=body).json()["text"] == SAYS
        assert metric(app, "jspec:num_engine_restarts_total") == 4
        wait_idle(engine)


@pytest.mark.parametrize("cuts", [False, True])
def test_a_text_that_raises_ends_its_own_request_alone(texts: Path, *, cuts: bool) -> None:
    """cuts: stop strings are found in the engine's turn; else the reader makes the text."""
    params: dict[str, Any] = {"max_new_tokens": 500, "stop": ["~~~"] if cuts else []}
    with speaking(texts, BrokenTextEngine) as engine:
        app = create_app(engine)
        with ThreadPoolExecutor() as pool:
            well, *broken = (
                pool.submit(
                    ask,
                    app,
                    "POST",
                    "/generate",
                    json={"text": text, "stream": stream, "sampling_params": params},
                )
                for text, stream in (("x", False), (POISON, False), (POISON, True))
            )
            assert well.result(timeout=60).json()["text"] == SAYS
            whole, streamed = (each.result(timeout=60) for each in broken)
        if cuts:
            for last in (whole.json(), events_of(streamed.text)[-1]):
                reason = last["meta_info"]["finish_reason"]
                assert reason["type"] == "abort"
                assert reason["message"] == "its text could not be made (ValueError)"
        else:
            assert whole.status_code == 500
            assert whole.json()["message"].endswith("could not be made")
            assert events_of(streamed.text)[-1]["code"] == 500
        assert not engine.is_closed
        wait_idle(engine)
        one, two = engine.generate(["x", POISON], params, return_exceptions=True)
        assert one["text"] == SAYS
        assert cuts or isinstance(two, RequestFailedError)


def test_a_step_that_fails_in_the_midst_of_a_long_prompt(texts: Path) -> None:
    def fails(plan: StepPlan) -> bool:
        return plan.step == 4 and plan.kind is StepKind.PREFILL

    with speaking(texts, fails=fails) as engine:
        answer = engine.generate("y" * 2000, {"max_new_tokens": 500})
        assert answer["text"] == SAYS
        assert answer["meta_info"]["prompt_tokens"] == 2000
        assert engine.stats.num_restarts == 1
