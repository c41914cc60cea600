"""Answers that are scored again in the background: what is counted, and what is left alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest

from jspec.cli.diagnosis.prompts import Prompt
from jspec.errors import ConfigError, RequestError
from jspec.messages.request import FinishKind, FinishReason, Request, StreamChunk
from jspec.messages.response import Completion
from jspec.server.app import create_app
from jspec.server.background_checks import BackgroundChecks, CheckCounts
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

ASKED = {"temperature": 0.8, "max_new_tokens": 20, "ignore_eos": True}


async def answered(engine: Engine, request: Request) -> Completion:
    completion = Completion.of(request)
    async for chunk in engine.stream_chunks(request):
        completion.add(chunk)
    return completion


def altered(completion: Completion, request: Request) -> Completion:
    """The same answer with one other token in it."""
    ids = list(completion.output_ids)
    ids[4] = (ids[4] + 1) % 256
    other = Completion.of(request)
    chunk = StreamChunk(
        request_id=request.request_id,
        new_ids=tuple(ids),
        num_accepted=0,
        text="",
        finish=completion.finish,
        weight_version=completion.weight_version,
    )
    other.add(chunk)
    return other


async def checked(checks: BackgroundChecks, *, until: int) -> CheckCounts:
    """The counts once so many answers are dealt with."""
    running = asyncio.create_task(checks.run())
    async with asyncio.timeout(120):
        while checks.counts.num_requests + checks.counts.num_skipped < until:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    return checks.counts


def test_right_answers_are_counted_and_wrong_ones_are_faults(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> CheckCounts:
        checks = BackgroundChecks(engine, 1.0)
        for i in range(3):
            (request,) = engine.requests("a prompt", None, {**ASKED, "sampling_seed": i})
            checks.watch([request], engine.weights_serial)
            completion = await answered(engine, request)
            if i == 1:
                completion = altered(completion, request)
            checks.finish(completion)
            checks.finish(completion)  # told twice, counted once
        return await checked(checks, until=3)

    counts = asyncio.run(run())
    assert (counts.num_requests, counts.num_tokens, counts.num_skipped) == (3, 60, 0)
    assert counts.num_faults >= 1
    assert counts.num_tie_flips == 0
    assert "token 4 of the answer" in caplog.text
    assert "a prompt" not in caplog.text


def test_what_cannot_be_told_is_skipped_or_forgotten(engine: Engine) -> None:
    async def run() -> CheckCounts:
        checks = BackgroundChecks(engine, 1.0)
        (request,) = engine.requests("a prompt", None, ASKED)
        whole = await answered(engine, request)
        aborted = Completion.of(request)
        aborted.output_ids = whole.output_ids
        aborted.finish = FinishReason(kind=FinishKind.ABORT)
        for completion in (aborted, whole):  # the request is forgotten with its end
            checks.watch([request] if completion is aborted else [], engine.weights_serial)
            checks.finish(completion)
        checks.watch([request], engine.weights_serial)
        norm = await engine.weight("model.norm.weight", selector="target")
        await engine.async_update_weights_from_tensor({"model.norm.weight": norm})  # no new version
        assert engine.weight_version == whole.weight_version
        checks.finish(whole)
        return await checked(checks, until=1)

    assert asyncio.run(run()) == CheckCounts(num_skipped=1)


def test_an_answer_under_a_grammar_is_no_fault(engine: Engine) -> None:
    """Its tokens are those that the grammar left; rescoring knows no grammar."""

    async def run() -> CheckCounts:
        checks = BackgroundChecks(engine, 1.0)
        (request,) = engine.requests("a prompt", None, ASKED)
        answer = altered(await answered(engine, request), request)
        tied = dataclasses.replace(request.sampling, ignore_eos=False, regex="[a-f]{20}")
        checks.watch([dataclasses.replace(request, sampling=tied)], engine.weights_serial)
        checks.finish(answer)
        return await checked(checks, until=1)

    assert asyncio.run(run()) == CheckCounts(num_skipped=1)
    asks = Prompt(number=3, kind="prompt", given="a", sampling={"regex": "[a-f]"})
    with pytest.raises(RequestError, match="prompt 3: regex is given; expected none"):
        asks.request(engine)


def test_a_share_is_chosen(engine: Engine) -> None:
    draws = iter([0.05, 0.5, 0.09, 0.2])
    checks = BackgroundChecks(engine, 0.1, draw=lambda: next(draws))
    (request,) = engine.requests("a prompt", None, ASKED)
    several = [dataclasses.replace(request, request_id=f"r{i}") for i in range(4)]
    checks.watch(several, engine.weights_serial)
    assert sorted(checks._running) == ["r0", "r2"]


def test_nothing_is_kept_without_the_flag(engine: Engine) -> None:
    checks = BackgroundChecks(engine, 0.0)
    checks.watch(engine.requests("a prompt", None, ASKED), engine.weights_serial)
    assert not checks._running
    asyncio.run(checks.run())  # ends by itself


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_share_lies_between_0_and_1(value: Any) -> None:
    with pytest.raises(ConfigError, match="verify_fraction"):
        ServerArgs(verify_fraction=value)


def test_the_server_s_answers_are_counted_in_its_metrics(engine: Engine) -> None:
    async def run() -> str:
        app = create_app(engine, ServerArgs(verify_fraction=1.0, log_interval=0))
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as client,
        ):
            body = {"text": "a prompt", "sampling_params": ASKED}
            assert (await client.post("/generate", json=body)).status_code == 200
            async with asyncio.timeout(120):
                while not app.state.service.checks.counts.num_requests:
                    await asyncio.sleep(0.02)
            return (await client.get("/metrics")).text

    metrics = asyncio.run(run())
    ours = [line for line in metrics.splitlines() if line.startswith("jspec:verify")]
    lines = dict(line.rsplit(" ", 1) for line in ours)
    values = {name.split("{")[0]: float(value) for name, value in lines.items()}
    assert values["jspec:verify_requests_total"] == 1
    assert values["jspec:verify_tokens_total"] == 20
    assert values["jspec:verify_faults_total"] == 0
