"""The host's cost of a step: planning, packing, unpacking, committing, text, and HTTP.

    python -m benchmarks.host_cost [--rows 64 256] [--parts steps loop http] [--output FILE]

The device is a clock (benchmarks.null_runner), so only the host is measured, in CPU time, which
other load on the same machine affects least.

    steps   the scheduler alone, step by step: CPU time of plan and commit (before the next step),
            of text and chunks (concurrent with it)
    loop    the engine's loop with readers that discard their input: CPU time per step
    http    the whole server and streaming clients in another process, with a device of --step-ms:
            CPU time per step, and the idle time of the device, in total (mostly waiting for the
            first prompts) and before decodes. An 8B's chain takes 10.6 ms for 64 rows on an H200;
            256 rows have 16 TFLOP, 25 ms there
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvicorn

from benchmarks.environment import write_result
from benchmarks.null_runner import NullRunner
from jspec.cli.measurement.client import run_point
from jspec.cli.measurement.figures import summary
from jspec.cli.measurement.load import Pattern, Point
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.gc_control import freeze_heap
from jspec.engine.programs.compilation import Progress
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, resolve
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.loading import resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.request import Request, SamplingParams
from jspec.scheduler.scheduler import Scheduler
from jspec.server.app import create_app
from jspec.server.serve import bind, url_of
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from jspec.serving.loop import EngineLoop
from jspec.spec.indexing import powers_of_two
from jspec.text.stream import IdsOnlyStream, TokenizedStream
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.support.flat_limits import flat_limits

STOPS = ("\nclass Nobody", "never written", "### END")
PROMPT_LEN = 64
CONTEXT = 4096
TEXTS = ("ids", "text", "stop")


def limits_of(rows: int, *, prefill_rows: int = 16) -> ServeLimits:
    """Return limits of a large GPU: chain 3/1/4, pages of 64, every row may fill its context."""
    return flat_limits(
        draft_shape=SpeculativeConfig(
            algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4
        ),
        num_slots=rows,
        num_pages=rows * (CONTEXT // 64 + 1),
        page_size=64,
        context_length=CONTEXT,
        decode_buckets=powers_of_two(1, rows),
        prefill_buckets=powers_of_two(128, 8192),
        prefill_rows=min(prefill_rows, rows),
        max_queued_requests=4 * rows,
    )


def requests_of(rows: int, *, text: str, new_tokens: int) -> list[Request]:
    stop = STOPS if text == "stop" else ()
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True, stop=stop)
    prompt = tuple(range(1, PROMPT_LEN + 1))
    return [
        Request(request_id=f"r{i}", prompt_ids=prompt, sampling=sampling, seed=i)
        for i in range(rows)
    ]


def streams_of(text: str, tokenizer: Tokenizer) -> Callable[[Request], Any]:
    """Return stream makers. ids: no text; text: detokenized; stop: with unmatched stop strings."""
    if text == "ids":
        return lambda _: IdsOnlyStream()
    return lambda request: TokenizedStream(tokenizer, stop=request.sampling.stop)


# The scheduler alone.


def measure_steps(rows: int, text: str, *, steps: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return medians over decode steps of all rows, in milliseconds of CPU time."""
    limits = limits_of(rows)
    scheduler = Scheduler(limits, make_stream=streams_of(text, tokenizer))
    runner = NullRunner(limits, vocab_size=tokenizer.vocab_size)
    for request in requests_of(rows, text=text, new_tokens=CONTEXT - PROMPT_LEN):
        scheduler.enqueue([request])
    times: dict[str, list[float]] = {
        name: [] for name in ("plan", "pack", "unpack", "commit", "text")
    }
    in_flight = []
    while len(times["commit"]) < steps:
        marks = [time.thread_time()]
        plan = scheduler.plan()
        marks.append(time.thread_time())
        assert plan is not None
        before = runner.pack_seconds, runner.unpack_seconds
        in_flight.append(runner.dispatch(plan))
        if len(in_flight) <= limits.scheduling.overlap_depth:
            continue
        oldest, _ = handle = in_flight.pop(0)
        result = runner.collect(handle)
        marks.append(time.thread_time())
        pieces = scheduler.read(oldest, result)
        marks.append(time.thread_time())
        for piece in pieces:
            piece.chunk()
        marks.append(time.thread_time())
        if not oldest.is_prefill and len(oldest.rows) == len(plan.rows) == rows:
            times["plan"].append(marks[1] - marks[0])
            times["pack"].append(runner.pack_seconds - before[0])
            times["unpack"].append(runner.unpack_seconds - before[1])
            times["commit"].append(marks[3] - marks[2])
            times["text"].append(marks[4] - marks[3])
    return {f"{name}_ms": _median_ms(values) for name, values in times.items()}


def _median_ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 4)


# The engine's loop.


def measure_loop(rows: int, text: str, *, steps: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return CPU milliseconds of the whole process per step; readers discard their input."""
    limits = limits_of(rows)
    runner = NullRunner(limits, vocab_size=tokenizer.vocab_size)
    new_tokens = min(3 * steps, CONTEXT - PROMPT_LEN)

    async def main() -> tuple[float, float]:
        scheduler = Scheduler(limits, make_stream=streams_of(text, tokenizer))
        loop = EngineLoop(scheduler, runner)
        requests = requests_of(rows, text=text, new_tokens=new_tokens)

        async def read(request: Request) -> None:
            async for _ in loop.submit([request])[0]:
                pass

        began = time.process_time(), time.monotonic()
        await asyncio.gather(*map(read, requests))
        ended = time.process_time(), time.monotonic()
        await loop.close()
        return ended[0] - began[0], ended[1] - began[1]

    cpu, wall = asyncio.run(main())
    per_step = 1e3 / runner.num_steps
    return {
        "cpu_ms_per_step": round(cpu * per_step, 4),
        "wall_ms_per_step": round(wall * per_step, 4),
        "num_steps": runner.num_steps,
    }


# The server.


class HostEngine(Engine):
    """An engine with the bundled pair's sizes and tokenizer, without its weights."""

    def __init__(self, *, rows: int, step_seconds: float, **arguments: Any) -> None:
        self._rows, self._step_seconds = rows, step_seconds
        super().__init__(max_running_requests=rows, **arguments)

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        del progress
        paths = resolve_paths(self.args)
        facts = CheckpointFacts(
            model_path=str(paths.target),
            tokenizer_path=str(paths.tokenizer),
            draft_path=None if paths.draft is None else str(paths.draft),
            max_position=CONTEXT,
            head_dims=(64,),
        )
        config = resolve(self.args, facts, DeviceFacts(platform="cpu"))
        limits = limits_of(self._rows)
        vocab_size = Tokenizer.from_directory(paths.tokenizer).vocab_size
        self.null_runner = NullRunner(
            limits, vocab_size=vocab_size, step_seconds=self._step_seconds
        )
        # This engine has no weights.
        return cast(DeviceRunner, self.null_runner), config, cast(ServedWeights, None)


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Serve `engine` on a thread and yield its address."""
    with bind(ServerArgs(port=0)) as bound:
        app = create_app(engine, ServerArgs(log_interval=0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, loop="asyncio"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join()


def measure_http(rows: int, text: str, *, steps: int, step_seconds: float) -> dict[str, Any]:
    """Measure all rows busy through HTTP, with the client in another process."""
    new_tokens = min(3 * steps, CONTEXT - PROMPT_LEN)
    pattern = Pattern(
        prompt_len=PROMPT_LEN,
        new_tokens=new_tokens,
        jitter=1.0,
        vocab_size=250,
        stop=STOPS if text == "stop" else (),
    )
    point = Point(name="host", num_requests=rows, clients=rows)
    arguments = {"skip_tokenizer_init": text == "ids"}
    engine = HostEngine(rows=rows, step_seconds=step_seconds, **arguments)
    with engine:
        with served(engine) as url:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            client = context.Process(target=_client, args=(url, point, pattern, theirs))
            client.start()
            ours.recv()  # warm
            freeze_heap()  # as a server does
            engine.null_runner.reset()
            began = time.process_time()
            ours.send(None)
            figures = ours.recv()
            cpu = time.process_time() - began
            client.join()
        runner = engine.null_runner
        device = runner.busy_seconds + runner.idle_seconds
        decodes = runner.decode_busy_seconds + runner.decode_idle_seconds
        idle, decode_idle = runner.idle_seconds, runner.decode_idle_seconds
        return {
            "cpu_ms_per_step": round(1e3 * cpu / runner.num_steps, 4),
            "cpu_us_per_event": round(1e6 * cpu / max(figures.pop("num_events"), 1), 2),
            "device_idle_share": round(idle / device, 4) if device else None,
            "decode_idle_share": round(decode_idle / decodes, 4) if decodes else None,
            "num_steps": runner.num_steps,
            **{k: figures[k] for k in ("output_tokens_per_second", "ttft_ms", "gap_ms")},
            "num_errors": figures["num_errors"],
        }


def _client(url: str, point: Point, pattern: Pattern, pipe: Any) -> None:
    """Run a client process: warm up, report ready, wait for the signal, measure and report."""

    def on_start() -> None:
        pipe.send(None)
        pipe.recv()

    seen, seconds = asyncio.run(run_point(url, point, pattern, on_start=on_start))
    pipe.send({**summary(seen, seconds), "num_events": len(seen.gaps) + len(seen.ttft)})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--parts", nargs="+", default=["steps", "loop", "http"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[10.0, 25.0], help="of the device, for http"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.from_directory(resolve_paths(EngineArgs()).tokenizer)
    result: dict[str, Any] = {}
    for rows in options.rows:
        for text in options.texts:
            cell: dict[str, Any] = {}
            if "steps" in options.parts:
                cell |= measure_steps(rows, text, steps=options.steps, tokenizer=tokenizer)
            if "loop" in options.parts:
                cell["loop"] = measure_loop(rows, text, steps=options.steps, tokenizer=tokenizer)
            if "http" in options.parts:
                for ms in options.step_ms:
                    cell[f"http_{ms:g}ms"] = measure_http(
                        rows, text, steps=options.steps, step_seconds=ms / 1e3
                    )
            result[f"{text}/{rows}"] = cell
            print(f"{text}/{rows:4} {json.dumps(cell)}", flush=True)
    if options.output is not None:
        write_result(options.output, {"cells": result})


if __name__ == "__main__":
    main()
