"""Streams that outlive their engine: answers equal those of one engine that never ends.

One engine plays all replicas. A connection to it is lost after every few chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from jspec.cli.batch import run_batch_command
from jspec.cli.batch_files.batch_file import AnswerFile, read_lines
from jspec.cli.batch_files.batch_run import BatchSettings, run_batch
from jspec.distributed import continued_stream, ray_batch, ray_data
from jspec.distributed import replica as replica_module
from jspec.distributed.continued_stream import MOST_LOSSES, EngineLostError, Item
from jspec.distributed.ray_data import Generate
from jspec.distributed.remote_engine import RemoteEngine, remote_engine
from jspec.distributed.replica import EngineReplica, Facts
from jspec.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    JspecError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    RequestFailedError,
)
from jspec.messages.request import FinishKind, Request
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from jspec.serving.streams.readers import SLOW_READER
from tests.server.helpers import ENDLESS, events_of, wait_idle


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued_stream, "PAUSE_SECONDS", 0.0)


class ReplicaOf(EngineReplica):
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._num_steps, self._moved_at = 0, time.monotonic()

    def __del__(self) -> None:
        """Leave the engine open: it is not its own."""


class LosingReplicas:
    """Replicas of one engine. lengths: after how many chunks a request's connections are lost."""

    def __init__(self, engine: Engine, lengths: Sequence[int | None]) -> None:
        self._replica = ReplicaOf(engine)
        self._lengths: dict[str, Iterator[int | None]]
        self._lengths = defaultdict(lambda: itertools.cycle(lengths))
        self.num_lost = 0

    async def facts(self) -> Facts:
        return self._replica.facts()

    async def connect(self, request: Request, *, waits: bool) -> AsyncGenerator[Item]:
        sent = pickle.dumps(request)  # as between processes
        left = next(self._lengths[request.request_id.rpartition("@")[0]])
        async with aclosing(self._replica.stream(pickle.loads(sent), waits=waits)) as items:
            async for item in items:
                received = pickle.loads(pickle.dumps(item))
                if isinstance(received, JspecError) or not received:
                    yield received
                    continue
                for chunk in received:
                    if left == 0:
                        self.num_lost += 1
                        raise EngineLostError("it was killed")
                    yield (chunk,)
                    left = None if left is None else left - 1

    async def each(self, method: str) -> list[Any]:
        return [getattr(self._replica, method)()]


def without_times(found: Any) -> Any:
    """Leave out what differs between two runs of one request."""
    own = {"id", "created", "e2e_latency", "num_retractions", "cached_tokens", "response_id"}
    own |= {"prompt_tokens_details", "created_at", "completed_at", "acceptance_length"}
    if isinstance(found, dict):
        kept = {name: value for name, value in found.items() if name not in own}
        return {n: without_times(v) for n, v in kept.items() if not str(n).startswith("spec_")}
    if isinstance(found, list):
        return [without_times(each) for each in found]
    return round(found, 4) if isinstance(found, float) else found


async def ask(engine: Engine, path: str, body: dict[str, Any]) -> Any:
    app = create_app(engine, ServerArgs(log_interval=0))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return events_of(answer.text) if body.get("stream") else answer.json()


GREEDY = {"temperature": 0, "max_new_tokens": 12, "sampling_seed": 0}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 7, "ignore_eos": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/generate", {"text": "def f(", "sampling_params": GREEDY}),
    "streamed": ("/generate", {"text": "def f(", "sampling_params": SAMPLED, "stream": True}),
    "n and stop": (
        "/v1/completions",
        {"prompt": ["a b", "c"], "n": 3, "max_tokens": 24, "seed": 5, "stop": ["e", "th", "  "]},
    ),
    "penalties and a least length": (
        "/generate",
        {
            "text": "one two three one two",
            "sampling_params": {
                **SAMPLED,
                "ignore_eos": False,
                "min_new_tokens": 8,
                "stop": ["a", "e"],
                "frequency_penalty": 1.5,
                "repetition_penalty": 1.4,
                "top_p": 0.9,
            },
        },
    ),
    "log-probabilities": (
        "/generate",
        {
            "text": "one two three",
            "sampling_params": SAMPLED,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        },
    ),
    "grammar": (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 40, "seed": 3, "regex": "(yes|no|maybe){6,9}", "logprobs": 1},
    ),
    "grammar and stop": (
        "/generate",
        {
            "text": "x",
            "stream": True,
            "sampling_params": {"regex": "[a-z ]{30}", "stop_regex": ["[aeiou] "], "n": 2}
            | SAMPLED
            | {"ignore_eos": False, "max_new_tokens": 30},
        },
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1, "n": 2},
    ),
}


@pytest.mark.slow_cases("grammar")
@pytest.mark.parametrize("name", BODIES)
def test_an_answer_does_not_tell_which_engines_made_it(
    engine: Engine, engine_arguments: dict[str, Any], name: str
) -> None:
    path, body = BODIES[name]

    async def both() -> tuple[Any, Any, int]:
        replicas = LosingReplicas(engine, lengths=[1, 0, 2, None])
        async with remote_engine(replicas, engine_arguments) as remote:
            there = await ask(remote, path, body)
        return await ask(engine, path, body), there, replicas.num_lost

    whole, continued, num_lost = asyncio.run(both())
    assert num_lost >= 3
    if body.get("stream"):  # each event has all text so far
        whole, continued = ({e.get("index"): e for e in events} for events in (whole, continued))
    assert without_times(continued) == without_times(whole)


def test_a_request_that_no_engine_survives_ends(
    engine: Engine, engine_arguments: dict[str, Any]
) -> None:
    async def main() -> None:
        replicas = LosingReplicas(engine, [1, *[0] * MOST_LOSSES])
        remote = RemoteEngine(replicas, await replicas.facts(), engine_arguments)
        (request,) = remote.requests("a", sampling_params=ENDLESS)
        (stream,) = await remote.submit((request,))
        assert (await anext(stream)).new_ids
        with pytest.raises(RequestFailedError, match=f"when each of {MOST_LOSSES} engines ended"):
            assert not [chunk.finish async for chunk in stream]

    asyncio.run(main())
    wait_idle(engine)


def test_what_an_engine_refuses_is_refused_before_the_stream(
    engine: Engine, engine_arguments: dict[str, Any]
) -> None:
    async def main() -> None:
        replicas = LosingReplicas(engine, [None])
        remote = RemoteEngine(replicas, await replicas.facts(), engine_arguments)
        good = remote.requests("a", sampling_params=ENDLESS)
        bad = remote.requests("b", sampling_params={"regex": "("})
        with pytest.raises(RequestError, match="regex"):
            await remote.submit((*good, *bad))
        with pytest.raises(RequestError, match="does not reach all replicas; expected a new dep"):
            await remote.update_weight_version("2")

    asyncio.run(main())
    wait_idle(engine)  # the good one was aborted


def test_aborts_and_slow_readers(engine: Engine, engine_arguments: dict[str, Any]) -> None:
    async def main() -> None:
        replicas = LosingReplicas(engine, [12])
        remote = RemoteEngine(replicas, await replicas.facts(), engine_arguments)
        aborted, slow, closed = remote.requests("a", sampling_params={**ENDLESS, "n": 3})
        (stream,) = await remote.submit((aborted,))
        await anext(stream)
        assert await remote.abort(aborted.request_id)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.kind is FinishKind.ABORT
        assert not await remote.abort(aborted.request_id)
        (stream,) = await remote.submit((slow,), max_unread=3)
        while not stream.is_over:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.message == SLOW_READER
        (stream,) = await remote.submit((closed,))
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []

    asyncio.run(main())
    wait_idle(engine)


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError("full", retry_after_seconds=3.0),
        QueueTimeoutError("a", 2.0),
        RequestFailedError("what", ", in detail"),
        ContextLengthError("long", context_length=9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error: JspecError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


LINES = [
    {"prompt": "a", "max_tokens": 9},
    {"prompt": "b", "max_tokens": -1},
    {"prompt": ["c", "d"], "max_tokens": 20, "n": 2},
    {"prompt": "e", "max_tokens": 6, "temperature": 0},
]


def test_replicas_answer_a_batch_file_as_one_engine_does(
    engine: Engine,
    engine_arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = LosingReplicas(engine, [1, None])
    asked: dict[str, Any] = {}

    @contextmanager
    def fake_replicas(arguments: dict[str, Any], *, address: str | None) -> Iterator[Any]:
        asked.update(arguments, address=address)
        yield replicas

    monkeypatch.setattr(ray_batch, "replicas_on_ray", fake_replicas)
    requests, answers = tmp_path / "in", [tmp_path / "one", tmp_path / "many"]
    url = "/v1/completions"
    lines = [{"custom_id": f"{i}", "url": url, "body": each} for i, each in enumerate(LINES)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        word
        for name in ("model_path", "speculative_algorithm", "speculative_draft_model_path")
        for word in (f"--{name.replace('_', '-')}", engine_arguments[name])
    ]
    words += ["--context-length", "16384", "--max-running-requests", "2", "--num-replicas", "2"]
    with pytest.raises(ConfigError, match="num_replicas is 2 without --ray; expected --ray"):
        run_batch_command([str(requests), str(answers[1]), *words])
    assert run_batch_command([str(requests), str(answers[1]), *words, "--ray", "ray://a:1"]) == 0
    assert (asked["num_replicas"], asked["address"]) == (2, "ray://a:1")
    assert replicas.num_lost >= 2
    with closing(AnswerFile(answers[0], requests)) as file, closing(read_lines(requests)) as given:
        run = BatchSettings(seed=0, created=0, window=4)
        asyncio.run(run_batch(engine, given, file, run, on_answer=lambda _: None))
    one, many = ([*map(json.loads, path.read_text().splitlines())] for path in answers)
    assert without_times(many) == without_times(one)


def test_rows_of_a_data_set_have_the_same_text_wherever_they_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "Engine", lambda **_: engine)
    generate = Generate(sampling_params={"max_new_tokens": 5}, prompt_column="asked")
    batch = {"asked": np.array(["a", "b", "", "a"], dtype=object), "other": np.arange(4)}
    found = generate(batch)
    assert [*found] == ["asked", "other", "text", "finish_reason", "error"]
    assert [*found["finish_reason"]] == ["length", "length", "error", "length"]
    assert found["text"][0] == found["text"][3]
    assert "empty" in found["error"][2]
    alone = generate({"asked": batch["asked"][1:2]})
    assert alone["text"][0] == found["text"][1]
    seeded = Generate(sampling_params={"max_new_tokens": 5}, seed_column="seed")
    again = seeded({"prompt": ["a", "a"], "seed": np.array([1, 2])})
    assert again["text"][0] != again["text"][1]
    with pytest.raises(RequestError, match="column 'seed' is missing; expected one of"):
        seeded({"prompt": ["a"]})
    with pytest.raises(RequestError, match="n is 2; expected 1"):
        Generate(sampling_params={"n": 2})


def test_a_replica_is_well_while_its_engine_makes_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = SimpleNamespace(num_running=1, num_steps=5)
    engine = SimpleNamespace(stats=stats, is_closed=False, is_restarting=False)
    replica, now = ReplicaOf(engine), time.monotonic()

    def check_at(seconds: float) -> None:
        monkeypatch.setattr(replica_module.time, "monotonic", lambda: now + seconds)
        replica.check_health()

    check_at(1)
    check_at(replica_module.STUCK_SECONDS)
    stats.num_steps += 1
    check_at(150)
    engine.is_restarting = True
    check_at(400)
    engine.is_restarting = False
    with pytest.raises(EngineClosedError, match="requests run, and no step ended in 120 s"):
        check_at(521)
    stats.num_running = 0
    check_at(522)
    engine.is_closed = True
    with pytest.raises(EngineClosedError, match="closed"):
        check_at(523)
