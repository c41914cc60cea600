"""Answers to one or many prompts, whole or streamed, and scores."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, closing, nullcontext
from dataclasses import replace
from typing import Any, Protocol, Unpack

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.errors import QueueTimeoutError, RequestError, RequestFailedError
from jspec.messages.adapter import adapter_names
from jspec.messages.request import Request, SamplingParams
from jspec.messages.response import Completion, TokenText
from jspec.scheduler.pages import budget
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.batch_progress import BatchProgress
from jspec.serving.gathering import run_all
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.serving.submission import Preparation
from jspec.text.intake import (
    Ids,
    Intake,
    LogprobOptions,
    Params,
    Prompt,
    in_list,
)
from jspec.text.scoring import ScoreCall, label_names, watched_of
from jspec.text.tokenizer.token_texts import TokenTexts

INLINE_CHARS = 16_384  # longer prompts are tokenized in a thread


class Queues(Protocol):
    """The part of `jspec.Engine` that runs requests."""

    @property
    def limits(self) -> ServeLimits: ...

    @property
    def stats(self) -> SchedulerStats: ...

    @property
    def token_texts(self) -> TokenTexts: ...

    async def submit(
        self, requests: Sequence[Request], *, wait: bool = False
    ) -> tuple[ChunkStream, ...]: ...


class Generation:
    def __init__(self, engine: Queues, intake: Intake, preparation: Preparation) -> None:
        self._engine, self._intake, self._preparation = engine, intake, preparation

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Ids | Sequence[Ids] | None = None,
        *,
        stream: bool = False,
        progress: bool = False,
        return_exceptions: bool = False,
        lora_path: str | Sequence[str | None] | None = None,
        lora_name: str | Sequence[str | None] | None = None,
        **logprobs: Unpack[LogprobOptions],
    ) -> Any:
        """Return one result for one prompt, a list for a list (or n > 1), an iterator if `stream`.

        A list of results is flat: each prompt has n consecutive entries. Streamed results are
        cumulative, like SGLang's: each dict has all text so far and, for a list (or n > 1), its
        `index`. A list waits for space in the queue; a single prompt raises QueueFullError.

        An invalid list is refused as a whole. With return_exceptions, RequestErrors and
        QueueTimeoutErrors replace results instead, all n of a refused prompt. progress writes a
        progress line to standard error. Neither works with stream. logprobs: see `LogprobOptions`;
        they apply to all prompts. lora_path (SGLang's name) or lora_name: the name of a loaded LoRA
        adapter, or a name or None for each prompt.
        """
        if stream:
            _check_whole(return_exceptions=return_exceptions, progress=progress)
        prompts, is_list = self._intake.prompts(prompt, sampling_params, input_ids, **logprobs)
        names = adapter_names({"lora_path": lora_path, "lora_name": lora_name}, len(prompts))
        if any(names):
            prompts = [replace(p, lora=name) for p, name in zip(prompts, names, strict=True)]
        if stream or (len(prompts) > 1 and not return_exceptions):
            prompts = await self._checked(prompts)
        waits = is_list or prompts[0].num_choices > 1
        text = self._engine.token_texts.text if logprobs.get("return_text_in_logprobs") else None
        if stream:
            return self._stream_all(prompts, text) if waits else self._stream_one(prompts[0], text)
        screen = self._progress_of(len(prompts)) if progress else None
        with nullcontext() if screen is None else closing(screen):
            results = await self._answers(
                prompts, text, waits=waits, screen=screen, return_exceptions=return_exceptions
            )
        return results if is_list or len(results) != 1 else results[0]

    async def async_score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Return, per item, the probability of each label as the token after query and item.

        Probabilities are over the vocabulary or, with apply_softmax, over the labels, like SGLang's
        /v1/score. item_first: put the item before the query. Raises RequestError.
        """
        call = ScoreCall.of(
            query, items, label_token_ids, apply_softmax=apply_softmax, item_first=item_first
        )
        with label_names():
            answers = await self._answers(await self._checked(call.as_prompts()), None)
        return call.scores([watched_of(answer) for answer in answers])

    async def requests_of(
        self, prompts: Sequence[Prompt], *, first: int = 0, total: int | None = None
    ) -> list[tuple[Request, ...]]:
        """Return each prompt's requests. first, total: its place in a list. Raises RequestError."""
        total = len(prompts) if total is None else total

        def make() -> list[tuple[Request, ...]]:
            made = []
            for index, prompt in enumerate(prompts, start=first):
                with in_list(index, total):
                    made.append(self._intake.requests(prompt))
            return made

        is_long = sum(prompt.num_chars for prompt in prompts) > INLINE_CHARS
        return await asyncio.to_thread(make) if is_long else make()

    async def _checked(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Check all prompts and return them tokenized, in 4 bytes per id. Raises RequestError."""
        checked: list[Prompt] = []
        known: dict[int, SamplingParams] = {}  # by identity: prompts often share their parameters
        for index, given in enumerate(prompts):
            prompt = replace(given, sampling=known.get(id(given.sampling), given.sampling))
            with in_list(index, len(prompts)):
                is_long = prompt.num_chars > INLINE_CHARS
                read = self._intake.read
                ids, sampling = await asyncio.to_thread(read, prompt) if is_long else read(prompt)
                await self._preparation.check(sampling)
                budget.check_prompt(self._engine.limits, len(ids), sampling)
            known[id(given.sampling)] = sampling
            packed = np.array(ids, np.int32)
            checked.append(replace(prompt, text=None, input_ids=packed, sampling=sampling))
        return checked

    async def _each_request(
        self, prompts: Sequence[Prompt]
    ) -> AsyncIterator[tuple[int, int, Request | RequestError]]:
        """Yield (index, prompt's index, request or error), made one prompt at a time."""
        index = 0
        for number, prompt in enumerate(prompts):
            made: Sequence[Request | RequestError]
            try:
                (made,) = await self.requests_of([prompt], first=number, total=len(prompts))
            except RequestError as error:
                made = [error] * prompt.num_choices  # so that an index identifies the prompt
            for request in made:
                yield index, number, request
                index += 1

    async def _answers(
        self,
        prompts: Sequence[Prompt],
        text: TokenText | None,
        *,
        waits: bool = True,
        screen: BatchProgress | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        found: dict[int, Any] = {}
        left = [prompt.num_choices for prompt in prompts]

        async def run(item: tuple[int, int, Request | RequestError]) -> None:
            index, number, request = item
            try:
                if isinstance(request, RequestError):
                    raise request
                with in_list(number, len(prompts)):
                    answer: Any = await self._complete(request, text, waits=waits)
            except (RequestError, RequestFailedError, QueueTimeoutError) as error:
                if not return_exceptions:
                    raise
                answer = error
            found[index] = answer
            left[number] -= 1
            if screen is not None and left[number] == 0:
                screen.add(not isinstance(answer, Exception))

        most = min(self._engine.limits.scheduling.max_queued_requests, sum(left))
        await run_all(self._each_request(prompts), run, most=most)
        return [found[index] for index in sorted(found)]

    def _progress_of(self, num_prompts: int) -> BatchProgress:
        return BatchProgress(
            sys.stderr,
            total=num_prompts,
            before=0,
            read_stats=lambda: self._engine.stats,
            noun="prompts",
            emitted_before=self._engine.stats.num_emitted,
        )

    async def _complete(
        self, request: Request, text: TokenText | None, *, waits: bool
    ) -> dict[str, Any]:
        (stream,) = await self._engine.submit((request,), wait=waits)
        async with aclosing(stream):
            completion = Completion.of(request, token_text=text)
            async for chunk in stream:
                completion.add(chunk)
            return completion.to_json()

    async def _stream(
        self, request: Request, text: TokenText | None, *, waits: bool
    ) -> AsyncGenerator[dict[str, Any]]:
        (stream,) = await self._engine.submit((request,), wait=waits)
        completion = Completion.of(request, token_text=text)
        async with aclosing(stream):
            async for chunk in stream:
                for each in (chunk, *stream.ready()):  # a slow reader gets fewer, longer ones
                    completion.add(each)
                yield completion.to_json()

    async def _stream_one(
        self, prompt: Prompt, text: TokenText | None
    ) -> AsyncGenerator[dict[str, Any]]:
        ((request,),) = await self.requests_of([prompt])
        async with aclosing(self._stream(request, text, waits=False)) as events:
            async for event in events:
                yield event

    async def _stream_all(
        self, prompts: Sequence[Prompt], text: TokenText | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of all requests as they come, with their `index`."""
        # A sequence has at most one unread event, so a slow reader gets fewer, longer ones.
        events: asyncio.Queue[tuple[dict[str, Any], asyncio.Event] | None] = asyncio.Queue()

        async def pump(item: tuple[int, int, Request | RequestError]) -> None:
            index, _, request = item
            if isinstance(request, RequestError):
                raise request
            async with aclosing(self._stream(request, text, waits=True)) as found:
                async for event in found:
                    taken = asyncio.Event()
                    events.put_nowait(({**event, "index": index}, taken))
                    await taken.wait()

        num_sequences = sum(prompt.num_choices for prompt in prompts)
        most = min(num_sequences, self._engine.limits.scheduling.max_queued_requests)
        pumping = asyncio.ensure_future(run_all(self._each_request(prompts), pump, most=most))
        pumping.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (item := await events.get()) is not None:
                event, taken = item
                taken.set()
                yield event
            await pumping  # raises what ended it
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)


def _check_whole(**asked: bool) -> None:
    for name, value in asked.items():
        if value:
            raise RequestError(
                f"{name} is {value!r}, and so is stream; expected one of them: it is for a call "
                "that waits for whole results"
            )
