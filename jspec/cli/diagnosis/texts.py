"""Texts that an engine generates for requests, in a chosen order and concurrency."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from jspec.messages.request import FinishReason, Request, TokenLogprob
from jspec.serving.engine import Engine
from jspec.serving.gathering import run_all

TOP = 20  # most likely tokens whose log-probabilities are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    length: int  # tokens before it, prompt included, root excluded
    num_accepted: int
    num_emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    request: Request
    ids: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    steps: tuple[Verification, ...] = ()


def make_texts(
    engine: Engine,
    requests: Sequence[Request],
    *,
    at_once: int | None = None,
    reverse: bool = False,
    logprobs: bool = False,
) -> list[Text]:
    """Generate texts in the requests' order, at most `at_once` at a time, with TOP `logprobs`."""
    order = list(range(len(requests)))[:: -1 if reverse else 1]
    most = min(at_once or engine.limits.pool.max_rows, engine.limits.scheduling.max_queued_requests)

    found: dict[int, Text] = {}

    async def run(i: int) -> None:
        found[i] = await _make(engine, requests[i], logprobs=logprobs)

    async def in_order() -> AsyncIterator[int]:
        for i in order:
            yield i

    asyncio.run(run_all(in_order(), run, most=most))
    return [found[i] for i in range(len(requests))]


async def _make(engine: Engine, request: Request, *, logprobs: bool) -> Text:
    asked = request
    if logprobs:
        sampling = dataclasses.replace(
            request.sampling, return_logprob=True, top_logprobs_num=TOP, logprob_start_len=-1
        )
        asked = dataclasses.replace(request, sampling=sampling)
    ids: list[int] = []
    known: list[TokenLogprob] = []
    steps: list[Verification] = []
    finish = None
    (stream,) = await engine.submit((asked,))
    try:
        async for chunk in stream:
            if ids and chunk.new_ids and not chunk.finish:  # a truncated step shows too few
                steps.append(
                    Verification(
                        length=len(request.prompt_ids) + len(ids) - 1,
                        num_accepted=chunk.num_accepted,
                        num_emitted=len(chunk.new_ids),
                    )
                )
            ids += chunk.new_ids
            known += chunk.logprobs
            finish = chunk.finish
    finally:
        await stream.aclose()
    return Text(
        request=request, ids=tuple(ids), finish=finish, logprobs=tuple(known), steps=tuple(steps)
    )
