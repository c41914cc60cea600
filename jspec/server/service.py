"""The endpoints' shared service: one engine, its metrics, and each request's sequences."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.types import Receive

from jspec.errors import (
    EngineClosedError,
    JspecError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)
from jspec.messages.request import Request, StreamChunk
from jspec.messages.response import Completion, SpecTokens
from jspec.scheduler.pages import budget
from jspec.scheduler.stats import SchedulerStats
from jspec.server.control.metrics import RateMeter, ServerMetrics
from jspec.server.control.probe import makes_progress
from jspec.server.control.request_spans import (
    NO_PARENT,
    RequestSpans,
    exporting_spans,
    parent_headers,
)
from jspec.server.control.trace_file import open_trace
from jspec.server.http.exchange import unless_gone
from jspec.server.http.model_names import adapter_of, of_model
from jspec.server.http.streaming import (
    DONE,
    EventStream,
    close_all,
    events_of,
    failure_event,
    grown,
)
from jspec.server.openai.chat_schema import ChatCall
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from jspec.serving.generation import INLINE_CHARS
from jspec.serving.request_trace import Border, RequestTrace
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.text.intake import Prompt
from jspec.text.spec_tokens import SpecTokenTracker
from jspec.text.tokenizer.tokenizer import Tokenizer

SAMPLE_SECONDS = 1.0
LOGGER = logging.getLogger("jspec.server")


@dataclass(slots=True, kw_only=True)
class Work:
    """The sequences of one accepted call: prompt by prompt, choice by choice. Await close()."""

    streams: tuple[ChunkStream, ...]
    completions: tuple[Completion, ...]
    prompt_idxs: tuple[int, ...]  # the prompt of each sequence
    service: Service
    names: Mapping[str, tuple[str, ...]]  # sequences by the id that aborts them
    trace_parent: Mapping[str, str]  # headers of the caller's trace
    is_closed: bool = False

    async def close(self) -> None:
        """Abort unfinished sequences and forget the call. Idempotent."""
        if not self.is_closed:  # else its names may be those of a later call
            self.is_closed = True
            self.service.forget(self.names, self.completions, self.trace_parent)
        await close_all(self.streams)

    async def finish(self, receive: Receive) -> None:
        try:
            await unless_gone(receive, self._read())
        except QueueTimeoutError as error:
            error.retry_after_seconds = self.service.retry_after_wait(len(self.streams))
            raise
        finally:
            await self.close()

    async def _read(self) -> None:
        async with aclosing(grown(self.streams, self.completions, self.service.observe)) as growth:
            async for _ in growth:
                pass


def answer_stream(
    work: Work,
    event: Callable[[int, Completion], dict[str, Any] | bytes | None],
    last: Callable[[], dict[str, Any] | None] = lambda: None,
    *,
    failure: Callable[[JspecError], bytes] = failure_event,
    done: bytes = DONE,
) -> EventStream:
    """Return the answer as events made by `event` and `failure`, then `done`; see events_of."""
    service = work.service
    events = events_of(
        work.streams,
        work.completions,
        interval=service.args.stream_interval,
        event=event,
        last=last,
        failure=failure,
        observe=service.observe,
        sent=service.sent,
    )
    return EventStream(events, close=work.close, done=done)


class Service:
    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine = engine
        self.args = args
        self.started = time.time()
        self.meter = RateMeter(clock=lambda: engine.busy_seconds)
        self.metrics = ServerMetrics(
            model_name=self.model_name,
            limits=engine.limits,
            read_stats=lambda: engine.stats,
            read_loras=lambda: tuple(engine.lora_adapters),
            max_loras=engine.args.max_loras_per_batch * engine.limits.programs.has_loras,
            meter=self.meter,
        )
        self.profiler = engine.profiler
        self._trace = None if args.trace_requests is None else open_trace(args.trace_requests)
        self._spans: RequestSpans | None = None
        if args.otlp_traces_endpoint is not None:
            self._trace = self._trace or RequestTrace(lambda _: None)
            endpoint = args.otlp_traces_endpoint
            self._spans = exporting_spans(endpoint, model_name=self.model_name)
        if self._trace is not None:
            engine.trace_requests(self._trace)
        self.is_shutting_down = False
        self._groups: dict[str, tuple[str, ...]] = {}
        self._is_cut_said = False

    @property
    def unready(self) -> str:
        """The reason why the server should get no requests now, or ""."""
        if self.engine.is_closed:
            return "the engine is closed"
        if self.is_shutting_down:
            return "the server is shutting down"
        if self.engine.is_restarting:
            return "the engine failed and is restarting"
        return "generation is paused" if self.engine.is_paused else ""

    @property
    def model_name(self) -> str:
        if self.args.served_model_name is not None:
            return self.args.served_model_name
        path = self.engine.args.model_path
        return "jspec-bundled" if path is None else path.rstrip("/").rsplit("/", 1)[-1]

    def check_model(self, name: str | None) -> str | None:
        """Return the LoRA adapter that a model's name means, if any; HTTPException if unknown."""
        own = (self.model_name, "default", self.engine.args.model_path)
        return adapter_of(name, own, self.engine.lora_adapters)

    async def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        model: str | None = None,  # the client's name of it, which may mean an adapter
        group: str | None = None,
        return_spec_tokens: bool = False,
        received: float | None = None,  # time.monotonic() of the call's first byte
        return_text_in_logprobs: bool = False,
    ) -> Work:
        """Queue all prompts of a call, or none. Raises RequestError, QueueFullError or
        EngineClosedError before anything is queued."""
        started = time.monotonic()
        if self.is_shutting_down:
            raise EngineClosedError("the server is shutting down")
        tokenizer = self.engine.tokenizer if return_spec_tokens else None
        token_text = self.engine.token_texts.text if return_text_in_logprobs else None
        node_text = token_text if tokenizer is None else self.engine.token_texts.text
        indexed = await self._tokenized(of_model(prompts, model, self.check_model(model)))
        requests, names = [request for _, request in indexed], _names(indexed, group)
        self._take(names)
        if self._trace is not None:
            marks = {Border.RECEIVED: received or started, Border.PARSED: started}
            _begin(self._trace, requests, {**marks, Border.TOKENIZED: time.monotonic()})
        streams = await self._queue(requests, names)
        for request in requests:
            self._say_if_cut(request)
        completions = tuple(
            Completion.of(
                request,
                token_text=token_text,
                node_text=node_text,
                spec_tokens=None if tokenizer is None else _split_text(tokenizer, request),
                started=started,
            )
            for request in requests
        )
        return Work(
            streams=streams,
            completions=completions,
            prompt_idxs=tuple(index for index, _ in indexed),
            service=self,
            names=names,
            trace_parent=parent_headers(),
        )

    def observe(self, completion: Completion, chunk: StreamChunk) -> None:
        if self._trace is not None and chunk.new_ids:
            self._trace.mark((chunk.request_id,), Border.READ, time.monotonic())
        self.metrics.observe(completion, chunk)

    def sent(self, completion: Completion) -> None:
        if self._trace is not None and completion.output_ids:
            self._trace.mark((completion.request_id,), Border.SENT, time.monotonic())

    async def _tokenized(self, prompts: Sequence[Prompt]) -> list[tuple[int, Request]]:
        # Check first: tokenizing is slow, and wasted on a call that will be refused.
        budget.check_number(self.engine.limits, sum(prompt.num_choices for prompt in prompts))
        made = await self.engine.requests_of(
            [replace(each, request_id=each.request_id or uuid.uuid4().hex) for each in prompts]
        )
        return [(index, request) for index, each in enumerate(made) for request in each]

    def _take(self, names: Mapping[str, tuple[str, ...]]) -> None:
        for name in names:
            if name in self._groups:
                raise RequestError(f"rid is {name!r}; expected one that is not in use")
        self._groups |= names

    async def _queue(
        self, requests: Sequence[Request], names: Mapping[str, tuple[str, ...]]
    ) -> tuple[ChunkStream, ...]:
        is_queued = False
        try:
            streams = await self.engine.submit(requests, max_unread=self.args.max_unread_events)
            is_queued = True
            return streams
        except QueueFullError as error:
            seconds = self._retry_after(len(requests))
            raise QueueFullError(str(error), retry_after_seconds=seconds) from None
        finally:
            if not is_queued:
                self.forget(names)
                if self._trace is not None:
                    self._trace.forget(request.request_id for request in requests)

    async def chat_prompt(self, call: ChatCall) -> Prompt:
        make = partial(
            self.engine.chat_prompt, call.messages, call.sampling, **call.template_options
        )
        if call.num_chars > INLINE_CHARS:
            ids, sampling = await asyncio.to_thread(make)
        else:
            ids, sampling = make()
        return replace(call.prompt, input_ids=ids, sampling=sampling)

    def _retry_after(self, num_sequences: int) -> float:
        stats, bound = self.engine.stats, self.engine.limits.scheduling.max_queued_requests
        return self.meter.seconds_until_left(stats, stats.num_queued + num_sequences - bound)

    def retry_after_wait(self, num_sequences: int) -> float:
        """Return the seconds until a call of that many sequences would wait within its limit."""
        stats, limit = self.engine.stats, self.engine.args.queue_time_limit or 0.0
        ahead = stats.num_queued + num_sequences
        return self.meter.seconds_until_left(stats, ahead, less=limit)

    def _say_if_cut(self, request: Request) -> None:
        wanted, prompt_len = request.sampling.max_new_tokens, len(request.prompt_ids)
        most = budget.clip_max_new_tokens(self.engine.limits, prompt_len, wanted)
        if wanted is not None and most < wanted and not self._is_cut_said:
            self._is_cut_said = True
            LOGGER.warning(
                "max_new_tokens %d was cut to %d after a prompt of %d tokens: the KV pool holds "
                "max_total_tokens %d; finish_reason is length (logged once)",
                *(wanted, most, prompt_len, self.engine.limits.max_total_tokens),
            )

    def forget(
        self,
        names: Mapping[str, tuple[str, ...]],
        completions: Sequence[Completion] = (),
        trace_parent: Mapping[str, str] = NO_PARENT,
    ) -> None:
        for name in names:
            del self._groups[name]
        if self._trace is None:
            return
        for completion in completions:
            times = self._trace.end(completion.request_id)
            if self._spans is not None:
                self._spans.record(completion, times, trace_parent)

    async def close_spans(self) -> None:
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def abort(self, rid: str) -> int:
        """Abort the sequences of a call, of a prompt, or a single one by its id."""
        names = self._groups.get(rid, (rid,))
        return sum([await self.engine.abort(name) for name in names])

    async def probe(self) -> bool:
        return not self.unready and await makes_progress(self.engine)

    async def watch(self) -> None:
        """Sample the rates and write the decode log, until cancelled."""
        last_logged = time.monotonic()
        while True:
            stats = self.engine.stats
            self.meter.sample(stats)
            interval = self.args.log_interval
            now = time.monotonic()
            if interval and stats.num_running and now - last_logged >= interval:
                LOGGER.info("%s", self.decode_line(stats))
                last_logged = now
            await asyncio.sleep(SAMPLE_SECONDS)

    def decode_line(self, stats: SchedulerStats) -> str:
        """Format a log line like SGLang's, with recent rates once there is output."""
        rates = self.meter.rates(stats)
        load = (
            f"#running-req: {stats.num_running}, #queue-req: {stats.num_queued}, "
            f"token usage: {stats.token_usage:.2f}"
        )
        if not rates.has_tokens:
            return f"Prefill batch, {load}"
        accepted = (
            f"accept len: {rates.acceptance_length:.2f}, accept rate: {rates.accept_rate:.2f}, "
            if rates.has_verifications
            else ""
        )
        throughput = f"gen throughput (token/s): {rates.gen_throughput:.1f}"
        return f"Decode batch, {load}, {accepted}{throughput}"


def _split_text(tokenizer: Tokenizer, request: Request) -> SpecTokens:
    tracker = SpecTokenTracker(
        tokenizer,
        skip_special_tokens=request.sampling.skip_special_tokens,
        shown_ids=request.shown_ids,
    )
    return tracker.to_json


def _begin(trace: RequestTrace, requests: Sequence[Request], marks: Mapping[Border, float]) -> None:
    for request in requests:
        trace.begin(request.request_id)
        for border, when in marks.items():
            trace.mark((request.request_id,), border, when)


def _names(indexed: Sequence[tuple[int, Request]], group: str | None) -> dict[str, tuple[str, ...]]:
    """Map the ids that abort to their sequences: each prompt's first choice, and the whole call.

    rids a and b with n = 2: a → (a, a-1), b → (b, b-1).
    """
    by_prompt: dict[int, list[str]] = {}
    for index, request in indexed:
        by_prompt.setdefault(index, []).append(request.request_id)
    names = {ids[0]: tuple(ids) for ids in by_prompt.values()}
    if group is not None:
        names[group] = tuple(request.request_id for _, request in indexed)
    return names
