"""Streams cost what is new, and a slow reader is not written to more often than it reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from jspec.messages.request import (
    FinishKind,
    FinishReason,
    SamplingParams,
    SpecCounters,
    StreamChunk,
    TokenLogprob,
)
from jspec.messages.response import GROWING, Completion, LogprobForm
from jspec.messages.verified_tree import VerifiedTree
from jspec.server.http.event_json import EventJson
from jspec.server.http.streaming import events_of
from jspec.serving.engine import Engine

from .helpers import wait_idle

NUM_CHUNKS = 400


def no_clock() -> float:
    return 0.0


def chunk_of(index: int) -> StreamChunk:
    is_last = index == NUM_CHUNKS - 1
    return StreamChunk(
        request_id="r",
        new_ids=(index, index, index),
        num_accepted=0,
        text="abc",
        finish=FinishReason(kind=FinishKind.LENGTH) if is_last else None,
        counters=SpecCounters(),
    )


class Source:
    """A source of all chunks, one per turn of the event loop, read or not."""

    def __init__(self) -> None:
        self._chunks: list[StreamChunk] = []

    async def _produce(self) -> None:
        for index in range(NUM_CHUNKS):
            await asyncio.sleep(0)
            self._chunks.append(chunk_of(index))

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        producing = asyncio.create_task(self._produce())
        while self._chunks or not producing.done():
            if self._chunks:
                yield self._chunks.pop(0)
            else:
                await asyncio.sleep(0)

    def ready(self) -> list[StreamChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    async def aclose(self) -> None:
        pass


def read_events(*, incremental: bool, turns: int) -> tuple[list[dict[str, Any]], Completion]:
    """Return the events of a reader that is away for `turns` turns of the loop after each."""
    completion = Completion("r", clock=no_clock)
    written = EventJson(completion, keeps_all=not incremental, index=None)

    async def run() -> list[dict[str, Any]]:
        events = events_of([Source()], [completion], interval=1, event=lambda *_: written.take())
        found = []
        async for event in events:
            found.append(json.loads(event.removeprefix(b"data: ")))
            for _ in range(turns):
                await asyncio.sleep(0)
        return found

    return asyncio.run(run()), completion


def test_an_incremental_stream_builds_each_character_once() -> None:
    events, completion = read_events(incremental=True, turns=0)
    assert len(events) > NUM_CHUNKS // 2
    assert "".join(event["text"] for event in events) == "abc" * NUM_CHUNKS
    assert sum(len(event["output_ids"]) for event in events) == 3 * NUM_CHUNKS
    assert len(completion.texts) == NUM_CHUNKS  # text that was sent is not joined again
    assert completion.text == "abc" * NUM_CHUNKS


def test_a_slow_reader_of_a_cumulative_stream_gets_few_events() -> None:
    fast, _ = read_events(incremental=False, turns=0)
    slow, _ = read_events(incremental=False, turns=50)
    assert fast[-1]["text"] == slow[-1]["text"] == "abc" * NUM_CHUNKS
    assert fast[-1]["output_ids"] == slow[-1]["output_ids"]
    sizes = [sum(len(event["text"]) for event in events) for events in (fast, slow)]
    assert len(slow) <= NUM_CHUNKS // 50 + 2
    assert sizes[1] < sizes[0] / 10


def test_a_slow_reader_of_a_generation_gets_few_results(engine: Engine) -> None:
    wait_idle(engine)
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = engine.generate("def fib(", params)
    stream = engine.generate("def fib(", params, stream=True)
    results = [next(stream)]
    deadline = time.monotonic() + 30
    while engine.stats.num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results += stream
    assert len(results) == 2  # the first chunk, and all that came meanwhile
    assert results[-1]["output_ids"] == whole["output_ids"]
    assert results[-1]["text"] == whole["text"]


def rich_completion(*, token_text: Callable[[int], str] | None = None) -> Completion:
    """Return a completion with every option that adds to a stream's events."""
    sampling = SamplingParams(
        return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(5,)
    )
    return Completion(
        'r"1',
        clock=no_clock,
        logprobs=LogprobForm.of(sampling, token_text=token_text),
        token_text=token_text,
    )


def everything_of(number: int, *, is_last: bool = False) -> StreamChunk:
    """Return two ids in every other chunk, with log-probabilities and their tree."""
    known = TokenLogprob(logprob=-0.5, top=((-0.5, 7), (-1.5, number)), watched=(-9.0,))
    has_ids = number % 2 == 1
    tree = VerifiedTree(ids=(1, number), parents=(-1, 0), accepted=(1,))
    return replace(
        chunk_of(number),
        new_ids=(number, 7) if has_ids else (),
        logprobs=(known, known) if has_ids else (),
        prompt_logprobs=((3, None), (4, known)) if number == 0 else (),
        draft_tree=tree if has_ids else None,
        finish=FinishReason(kind=FinishKind.STOP, matched="é") if is_last else None,
        counters=SpecCounters(verify_ct=2, num_accepted=3, num_proposed=6),
    )


@pytest.mark.parametrize("asks_more", [False, True])
@pytest.mark.parametrize("index", [None, 3])
def test_events_are_those_that_json_would_write(index: int | None, asks_more: bool) -> None:
    texts = ["a", "", 'say "hi"\\\n', "日本\u2028", "\x00\x1f\x7f", "\ufffd🙂"]
    completion = rich_completion() if asks_more else Completion('r"1', clock=no_clock)
    written = EventJson(completion, keeps_all=True, index=index)
    for number, text in enumerate(texts):
        chunk = everything_of(number, is_last=number == len(texts) - 1)
        if not asks_more:
            chunk = replace(chunk, logprobs=(), prompt_logprobs=(), draft_tree=None)
        completion.add(replace(chunk, text=text))
        if number == 2:
            continue  # two chunks in one event
        body = completion.to_json()
        expected = json.dumps(
            body if index is None else {"index": index, **body}, ensure_ascii=False
        )
        event = written.take()
        assert event == b"data: " + expected.encode() + b"\n\n"


def test_incremental_events_add_up_to_the_whole() -> None:
    completion = rich_completion()
    written = EventJson(completion, keeps_all=False, index=None)
    told: dict[str, Any] = {}
    for number in range(6):
        completion.add(everything_of(number, is_last=number == 5))
        event = json.loads(written.take().removeprefix(b"data: "))
        meta = event["meta_info"]
        assert meta["output_token_logprobs_length"] == len(event["output_ids"])
        for name in ("text", "output_ids"):
            told[name] = told[name] + event[name] if number else event[name]
        for name in GROWING.intersection(meta):
            told[name] = told.get(name, []) + meta[name]
    whole = json.loads(json.dumps(completion.to_json()))
    for name, value in told.items():
        assert value == whole.get(name, whole["meta_info"].get(name)), name
    assert set(told) >= GROWING


@pytest.mark.parametrize("incremental", [False, True])
def test_an_event_with_log_probabilities_costs_what_is_new(incremental: bool) -> None:
    named: list[int] = []

    def text_of(token_id: int) -> str:
        named.append(token_id)
        return "t"

    completion = rich_completion(token_text=text_of)
    written = EventJson(completion, keeps_all=not incremental, index=None)
    for number in range(NUM_CHUNKS):
        completion.add(everything_of(number))
        written.take()
    num_ids = len(completion.output_ids)
    # A token, its two most likely, the watched one; two nodes per two tokens; the prompt.
    assert len(named) <= num_ids * (1 + 2 + 1 + 1) + 2 * 4
