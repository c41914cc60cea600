"""The engine's calls: generation for one or many prompts, whole or streamed; scores; tokens.

It knows no device. The requests of a list are queued as earlier ones finish.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, closing, nullcontext
from typing import Any, Unpack

from jspec.config.limits import ServeLimits
from jspec.errors import QueueTimeoutError, RequestError, RequestFailedError
from jspec.messages.request import Request, StreamChunk
from jspec.messages.response import Completion, TokenText
from jspec.scheduler.pages import budget
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.batch_progress import BatchProgress
from jspec.serving.chunk_stream import ChunkStream
from jspec.serving.gathering import each_of, run_all
from jspec.serving.live_weights import LiveWeights
from jspec.serving.loop_thread import EngineStream
from jspec.serving.queue_room import QueueRoom, Submit
from jspec.text.intake import Ids, Intake, LogprobOptions, Params, PromptSource, in_list
from jspec.text.scoring import ScoreCall, label_names, watched_of
from jspec.text.tokenizer.encoding import encoded
from jspec.text.tokenizer.token_texts import TokenTexts
from jspec.text.tokenizer.tokenizer import Tokenizer

INLINE_CHARS = 16_384  # longest prompt that is tokenized on the event loop
Answers = list[Any]  # of a prompt: one per choice, or the error


class EngineCalls(LiveWeights, ABC):
    """Each call has a synchronous form and an asynchronous one, `async_...`."""

    _intake: Intake
    _limits: ServeLimits

    @property
    def stats(self) -> SchedulerStats:
        return self._loop.stats

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""

    @property
    @abstractmethod
    def token_texts(self) -> TokenTexts:
        """The text of each id."""

    @abstractmethod
    async def _constrained(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with their grammars compiled.

        Raises RequestError for an invalid grammar.
        """

    # Sequences.

    async def submit(
        self, requests: Sequence[Request], *, max_unread: int | None = None
    ) -> tuple[EngineStream, ...]:
        """Queue all requests or none; return their chunk streams, which the caller must close.

        max_unread: unread chunks of a request after which it is aborted; None: no limit.
        Raises RequestError, QueueFullError or EngineClosedError before anything is queued.
        """
        streams = await self._loop_thread.call(self._submit(requests, max_unread))
        return tuple(EngineStream(self._loop_thread, stream) for stream in streams)

    async def _submit(
        self, requests: Sequence[Request], max_unread: int | None
    ) -> list[ChunkStream]:
        requests = await self._constrained(requests)
        await self._may_submit.wait()
        return self._loop.submit(requests, max_unread=max_unread)

    async def _check(self, requests: Sequence[Request], *, num_queued: int) -> None:
        in_use = self._loop.request_ids
        budget.check_batch(self._limits, requests, in_use=in_use, num_queued=num_queued)

    async def stream_chunks(self, request: Request) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one request. Closing the iterator aborts the request."""
        (stream,) = await self.submit((request,))
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    async def _complete(
        self, request: Request, text: TokenText | None, submit: Submit
    ) -> dict[str, Any]:
        (stream,) = await submit((request,))
        async with aclosing(stream):
            started = time.monotonic()
            completion = Completion.of(request, token_text=text)
            async for chunk in stream:
                completion.add(chunk)
            return completion.to_json(e2e_latency=time.monotonic() - started)

    async def _stream(
        self, request: Request, text: TokenText | None, submit: Submit
    ) -> AsyncGenerator[dict[str, Any]]:
        completion = Completion.of(request, token_text=text)
        (stream,) = await submit((request,))
        started = time.monotonic()
        async with aclosing(stream):
            async for chunk in stream:
                for each in (chunk, *stream.ready()):  # a slow reader gets fewer, longer ones
                    completion.add(each)
                yield completion.to_json(e2e_latency=time.monotonic() - started)

    async def _stream_all(
        self, requests: Sequence[Request], text: TokenText | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of `_stream` of all requests as they come, with their `index`.

        A sequence has at most one unread event, so a slow reader gets fewer, longer ones.
        """
        events: asyncio.Queue[tuple[dict[str, Any], asyncio.Event] | None] = asyncio.Queue()
        submit = QueueRoom(self.submit).submit

        async def pump(numbered: tuple[int, Request]) -> None:
            index, request = numbered
            async with aclosing(self._stream(request, text, submit)) as found:
                async for event in found:
                    taken = asyncio.Event()
                    events.put_nowait(({**event, "index": index}, taken))
                    await taken.wait()

        most = min(len(requests), self._limits.max_queued_requests)
        pumping = asyncio.ensure_future(run_all(each_of(enumerate(requests)), pump, most=most))
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

    # Lists.

    async def _answers(
        self,
        calls: Sequence[PromptSource],
        text: TokenText | None,
        *,
        is_list: bool = True,
        progress: bool = False,
        return_exceptions: bool = False,
    ) -> list[Answers]:
        """Return the answers of each prompt, in order.

        A long list is tokenized on demand. Unless errors are returned, the whole list is checked
        before the first request is queued.
        """
        found: list[dict[int, Any]] = [{} for _ in calls]
        bound = self._limits.max_queued_requests
        screen = self._progress_of(len(calls)) if progress else None
        left = [0] * len(calls)

        async def run(item: tuple[int, int, Request | RequestError]) -> None:
            prompt, choice, request = item
            try:
                if isinstance(request, RequestError):
                    raise request
                answer: Any = await self._complete(request, text, submit)
            except (RequestError, RequestFailedError, QueueTimeoutError) as error:
                if not return_exceptions:
                    raise
                answer = error
            found[prompt][choice] = answer
            left[prompt] -= 1
            if screen is not None and left[prompt] == 0:
                screen.add(not isinstance(answer, Exception))

        num_sequences = sum(call.num_choices for call in calls)
        if not return_exceptions and num_sequences > 1:  # a single one is checked when queued
            await self._check_all(calls)
        most = min(bound, num_sequences)
        submit = QueueRoom(self.submit).submit if is_list else self.submit
        with nullcontext() if screen is None else closing(screen):
            await run_all(self._requests_of(calls, left), run, most=most)
        return [[by_choice[i] for i in sorted(by_choice)] for by_choice in found]

    def _progress_of(self, num_prompts: int) -> BatchProgress:
        return BatchProgress(
            sys.stderr,
            total=num_prompts,
            before=0,
            read_stats=lambda: self.stats,
            noun="prompts",
            emitted_before=self.stats.num_emitted,
        )

    async def _check_all(self, calls: Sequence[PromptSource]) -> None:
        """Raise the error of any request; making them again later is cheaper than keeping them."""
        bound = self._limits.max_queued_requests
        for start in range(0, len(calls), bound):
            some = calls[start : start + bound]
            made = [
                await self._make(call, i + start, len(calls), trial=True)
                for i, call in enumerate(some)
            ]
            requests = [request for each in made for request in each]
            for first in range(0, len(requests), bound):
                some_requests = requests[first : first + bound]
                await self._loop_thread.call(self._check(some_requests, num_queued=0))

    async def _requests_of(
        self, calls: Sequence[PromptSource], left: list[int]
    ) -> AsyncIterator[tuple[int, int, Request | RequestError]]:
        """Yield (prompt, choice, request or error), made one prompt at a time."""
        for index, call in enumerate(calls):
            try:
                made: deque[Request | RequestError] = deque(
                    await self._make(call, index, len(calls))
                )
            except RequestError as error:
                made = deque([error] * call.num_choices)  # so that an index identifies the prompt
            left[index] = len(made)
            for choice, request in enumerate(made):
                yield index, choice, request

    async def _make(
        self, call: PromptSource, index: int, total: int, *, trial: bool = False
    ) -> Sequence[Request]:
        def make() -> tuple[Request, ...]:
            with in_list(index, total):
                return self._intake.requests(
                    call.prompt, call.input_ids, call.sampling_params, trial=trial
                )

        is_long = isinstance(call.prompt, str) and len(call.prompt) > INLINE_CHARS
        made = await asyncio.to_thread(make) if is_long else make()
        with in_list(index, total):
            return await self._constrained(made)

    # Generation.

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Ids | Sequence[Ids] | None = None,
        *,
        stream: bool = False,
        progress: bool = False,
        return_exceptions: bool = False,
        **logprobs: Unpack[LogprobOptions],
    ) -> Any:
        """Return one result for one prompt, a list for a list (or n > 1), an iterator if `stream`.

        A list of results is flat: each prompt has n consecutive entries. A streamed result is
        cumulative, like SGLang's: each dict has all text so far and, for a list (or n > 1), its
        `index`. progress: write a progress line to standard error. A list waits for space in the
        queue, where one prompt raises QueueFullError. An invalid list is refused as a whole; with
        return_exceptions, errors (RequestError, QueueTimeoutError) replace results instead: all n
        of a refused prompt. Neither of the two works with stream. logprobs: return_logprob and
        related options, for all prompts; see `LogprobOptions`.
        """
        if stream:
            _check_whole(return_exceptions=return_exceptions, progress=progress)
            return self._streamed(prompt, sampling_params, input_ids, **logprobs)
        calls, is_list = self._intake.calls(prompt, sampling_params, input_ids, **logprobs)
        answers = await self._answers(
            calls,
            self._token_text(**logprobs),
            is_list=is_list or calls[0].num_choices > 1,
            progress=progress,
            return_exceptions=return_exceptions,
        )
        results = [answer for of_prompt in answers for answer in of_prompt]
        return results if is_list or len(results) != 1 else results[0]

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Ids | Sequence[Ids] | None = None,
        *,
        stream: bool = False,
        progress: bool = False,
        return_exceptions: bool = False,
        **logprobs: Unpack[LogprobOptions],
    ) -> Any:
        """Synchronous async_generate; an iterator if `stream`."""
        self._loop_thread.start_thread()
        if stream:
            _check_whole(return_exceptions=return_exceptions, progress=progress)
            events = self._streamed(prompt, sampling_params, input_ids, **logprobs)
            return self._loop_thread.iterate(events)
        options: Any = {"progress": progress, "return_exceptions": return_exceptions, **logprobs}
        return self._loop_thread.run(
            self.async_generate(prompt, sampling_params, input_ids, **options)
        )

    def _streamed(
        self,
        prompt: str | Sequence[str] | None,
        sampling_params: Params | Sequence[Params],
        input_ids: Ids | Sequence[Ids] | None,
        **logprobs: Unpack[LogprobOptions],
    ) -> AsyncGenerator[dict[str, Any]]:
        requests, is_single = self._intake.batch(prompt, sampling_params, input_ids, **logprobs)
        text = self._token_text(**logprobs)
        if is_single:
            return self._stream(requests[0], text, self.submit)
        return self._stream_all(requests, text)

    def _token_text(self, **logprobs: Unpack[LogprobOptions]) -> TokenText | None:
        return self.token_texts.text if logprobs.get("return_text_in_logprobs") else None

    # Scores and tokens.

    async def async_score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Return, per item, how likely each label is as the token after query and item.

        Probabilities over the vocabulary or, with apply_softmax, over the labels, like SGLang's
        /v1/score. item_first: put the item before the query. Raises RequestError.
        """
        call = ScoreCall.of(
            query, items, label_token_ids, apply_softmax=apply_softmax, item_first=item_first
        )
        with label_names():
            answers = await self._answers(
                [PromptSource.of(prompt, sampling) for prompt, sampling in call.requests()], None
            )
        return call.scores([watched_of(answer) for (answer,) in answers])

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Synchronous async_score."""
        self._loop_thread.start_thread()
        options = {"apply_softmax": apply_softmax, "item_first": item_first}
        return self._loop_thread.run(self.async_score(query, items, label_token_ids, **options))

    def encode(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Any:
        """Return the ids of a text, or of each text of a list, encoded like a prompt."""
        return encoded(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def check_ids(self, name: str, ids: Ids) -> tuple[int, ...]:
        """Return the ids as Python integers.

        Raises RequestError, with `name`, for the first id outside the vocabulary.
        """
        return self._intake.check_ids(name, ids)

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Raises RequestError for an id outside the vocabulary."""
        known = self.check_ids("ids", ids)
        return self.tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    async def async_flush_cache(self) -> bool:
        """Empty the prefix cache; return False, without effect, while there are requests."""
        return await self._loop_thread.ask(self._loop.flush_cache)

    def flush_cache(self) -> bool:
        """Synchronous async_flush_cache."""
        self._loop_thread.start_thread()
        return self._loop_thread.run(self.async_flush_cache())


def _check_whole(**asked: bool) -> None:
    """Raise RequestError for options that streaming does not support."""
    for name, value in asked.items():
        if value:
            raise RequestError(
                f"{name} is {value!r}, and so is stream; expected one of them: it is for a call "
                "that waits for whole results"
            )
