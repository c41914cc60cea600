"""Compare plain and speculative decoding, each on an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

from jspec.cli.measurement.environment import without_paths
from jspec.cli.measurement.figures import Seen, Stopwatch
from jspec.cli.measurement.load import Job
from jspec.cli.measurement.report import chrome_trace
from jspec.cli.measurement.session import Measured, Plan, measure, result_of
from jspec.cli.measurement.settings import BenchSettings
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm
from jspec.engine.weights.loading import resolve_paths
from jspec.errors import ConfigError, EngineClosedError, JspecError
from jspec.messages.request import FinishKind, StreamChunk
from jspec.serving.engine import Engine
from jspec.serving.trace import TraceEvent
from jspec.text.tokenizer.tokenizer import Tokenizer

SLACK_TOKENS = 128  # per row besides prompt and answer: scratch, and the rest of a page
MOST_ROWS = 64  # of an engine whose load has a rate without a limit


class EngineTarget:
    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    async def before(self) -> None: ...

    async def after(self, seen: Seen) -> None:
        del seen

    async def send(self, job: Job, seen: Seen) -> None:
        source = "prompt" if isinstance(job.prompt, str) else "input_ids"
        given: dict[str, Any] = {source: job.prompt}
        sampling = {**job.sampling, "sampling_seed": job.index}  # equal for plain decoding
        try:
            (request,) = self.engine.requests(**given, sampling_params=sampling)
            watch = Stopwatch(time.perf_counter())
            (stream,) = await self.engine.submit((request,))
            ids: list[int] = []
            last: StreamChunk | None = None
            async with aclosing(stream):
                async for chunk in stream:
                    for last in (chunk, *stream.ready()):
                        ids += last.new_ids
                    watch.tokens(len(ids), time.perf_counter())
        except EngineClosedError:
            raise
        except JspecError as error:
            seen.errors.append(f"{type(error).__name__}: {error}"[:300])
            return
        if last is not None and last.finish is not None and last.finish.kind is FinishKind.ABORT:
            seen.errors.append(f"aborted: {last.finish.message}"[:300])
            return
        first = watch.finish(
            seen,
            new_tokens=job.new_tokens,
            is_exact=job.is_exact,
            prompt_tokens=len(request.prompt_ids),
            index=job.index,
        )
        if first is not None and last is not None:
            seen.output_ids[job.index] = tuple(ids)
            seen.add_histogram(last.counters.accept_histogram)


def engine_arguments(
    given: Mapping[str, Any], settings: BenchSettings, *, longest: int
) -> dict[str, Any]:
    """Return the smallest engine for the load, since two share the device; `given` overrides it."""
    rows = settings.point.clients or min(settings.num_prompts, MOST_ROWS)
    small: dict[str, Any] = {
        "max_running_requests": rows,
        "max_queued_requests": settings.num_prompts,
        "disable_radix_cache": True,
        "disable_logprobs": True,
    }
    if "mem_fraction_static" not in given:
        small["max_total_tokens"] = rows * (longest + SLACK_TOKENS)
    return {**small, **given}


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    speculative = ("speculative_", "enable_multi_layer_eagle", "simulate_acceptance")
    kept = {
        name: value
        for name, value in arguments.items()
        if not name.startswith(speculative) and name != "disable_speculative_draft_noise"
    }
    return {**kept, "speculative_algorithm": Algorithm.NONE.name}


def modes_of(args: EngineArgs, asked: str) -> tuple[str, ...]:
    """Return plain, speculative, or both in this order. Raises ConfigError without a draft."""
    if args.algorithm != Algorithm.NONE:
        return ("plain", "speculative") if asked == "both" else (asked,)
    if asked == "speculative":
        raise ConfigError("mode is speculative, but no draft is; expected --speculative-algorithm")
    return ("plain",)


def run_offline(
    args: EngineArgs,
    given: Mapping[str, Any],
    settings: BenchSettings,
    *,
    mode: str,
    is_traced: bool,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    modes = modes_of(args, mode)
    if modes == ("plain",) and mode == "both":
        say("no --speculative-algorithm was named for this model: plain decoding alone")
    jobs, longest = jobs_of(args, settings)
    arguments = engine_arguments(given, settings, longest=longest)
    traces: dict[str, list[TraceEvent]] = {name: [] for name in modes} if is_traced else {}
    with ExitStack() as stack:
        targets = []
        for name in modes:
            say(f"starting the {name} engine")
            own = plain_arguments(arguments) if name == "plain" else arguments
            engine = stack.enter_context(Engine(trace=traces.get(name), **own))
            say(f"the {name} engine is ready after {engine.startup_seconds:.1f} s")
            targets.append(EngineTarget(name, engine))
        measured = asyncio.run(_measure(targets, jobs, settings, say))
    startup = {target.name: round(target.engine.startup_seconds, 2) for target in targets}
    result = {
        "chip": None,
        "engine": {
            name: without_paths([value])[0] if isinstance(value, str) else value
            for name, value in arguments.items()
        },
        "startup_seconds": startup,
        **result_of(measured, modes),
    }
    return result, chrome_trace(measured.seen, traces)


async def _measure(
    targets: Sequence[EngineTarget],
    jobs: list[Job],
    settings: BenchSettings,
    say: Callable[[str], None],
) -> Measured:
    plan = Plan(
        point=settings.point,
        warm_up=settings.warm_up(jobs, None),
        jobs=[jobs] * settings.repeats,
        seed=settings.seed,
    )
    return await measure(targets, plan, say=say)


def jobs_of(args: EngineArgs, settings: BenchSettings) -> tuple[list[Job], int]:
    """Return the requests with their true lengths, and the longest prompt with answer in tokens."""
    tokenizer = None
    if not args.skip_tokenizer_init:
        tokenizer = Tokenizer.from_directory(resolve_paths(args).tokenizer)
    vocab_size = settings.vocab_size or (None if tokenizer is None else tokenizer.vocab_size)
    jobs = settings.jobs(tokenizer, repeat=0, to_body=None, vocab_size=vocab_size)
    if tokenizer is not None:
        jobs = [_counted(job, tokenizer) for job in jobs]
    return jobs, max(job.prompt_len + job.new_tokens for job in jobs)


def _counted(job: Job, tokenizer: Tokenizer) -> Job:
    if not isinstance(job.prompt, str):
        return job
    return replace(job, prompt_len=len(tokenizer.encode(job.prompt)))
