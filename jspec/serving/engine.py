"""`jspec.Engine`: the composition root, for offline generation and for the server.

engine = jspec.Engine()                       # the bundled pair, EAGLE-3, 3/1/4
engine.generate("def fib(", {"max_new_tokens": 32, "temperature": 0})["text"]
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing, suppress
from typing import Any

from jspec import __version__
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.building import build_runner
from jspec.engine.expert_record import ExpertRecord
from jspec.engine.hosts.slices import place_of
from jspec.engine.interrupts import interruptible
from jspec.engine.plan_runner import PlanRunner
from jspec.engine.process.process_runner import ProcessProfiler, ProcessRunner
from jspec.engine.profiling import Profiler
from jspec.engine.programs.compilation import Progress
from jspec.engine.programs.program_keys import describe_ready
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.loading import resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import ConfigError, EngineClosedError
from jspec.messages.adapter import Adapter
from jspec.messages.protocols import Weights
from jspec.messages.request import Request, StreamChunk
from jspec.scheduler.scheduler import Scheduler
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import ShapeChooser
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.gathering import to_its_end
from jspec.serving.generation import Generation
from jspec.serving.live_weights import LiveWeights
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.method_forms import forwarded, mirrored
from jspec.serving.submission import Preparation, Submission
from jspec.serving.text_engine import TextEngine
from jspec.serving.trace import TraceEvent
from jspec.text.grammar.grammars import Grammars
from jspec.text.stream import stream_of


class Engine(TextEngine):
    """A model pair, loaded and compiled, ready for requests. Names are SGLang's.

    model: `model_path`; None: the bundled pair. Other keyword arguments are those of `EngineArgs`,
    stored as `args`; `config` is the resolved configuration. The engine runs on an event loop in
    its own thread, and any thread or event loop may use it. Each method `async_...` has a
    synchronous form without that prefix.

    The constructor raises ConfigError and CheckpointError; requests raise RequestError,
    QueueFullError and QueueTimeoutError, and EngineClosedError after shutdown. Ctrl-C during
    startup raises KeyboardInterrupt.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Progress | None = None,
        trace: list[TraceEvent] | None = None,
        **arguments: Any,
    ) -> None:
        started = time.monotonic()
        with interruptible():
            self.args = EngineArgs.from_mapping(_with_model(arguments, model))
            weights = self._start(progress)
            self._loop_thread = LoopThread()
            self._loop = EngineLoop(
                self._scheduler,
                self._runner,
                trace=trace,
                queue_time_limit=self.args.queue_time_limit,
                ask=self._loop_thread.ask,
            )
            most = self.args.max_loras_per_batch * self._limits.programs.has_loras
            self._weights = LiveWeights(self._loop_thread, self._loop, weights, max_loras=most)
            with ExitStack() as ends:
                ends.callback(self._runner.close)
                self._weights.load_at_start(self.args.named_lora_paths)
                ends.pop_all()
        self._submission = Submission(
            self._loop_thread, self._loop, self._preparation, self._weights
        )
        self._generation = Generation(self, self._intake, self._preparation)
        if isinstance(self._runner, ProcessRunner):
            self._runner.watch(self._on_process_end)
        self.startup_seconds = time.monotonic() - started

    def _start(self, progress: Progress | None) -> Weights:
        make_intake = self._intake_from(resolve_paths(self.args), find_adapter=self._find_adapter)
        runner, weights = self._start_runner(progress)
        self._runner, self._limits = runner, runner.limits
        self._intake = make_intake(
            vocab_size=runner.vocab_size,
            context_length=runner.limits.pool.context_length,
            random_seed=self.config.random_seed,
        )
        grammars = Grammars(
            self._tokenizer,
            vocab_size=runner.vocab_size,
            eos_token_ids=self.eos_token_ids,
            backend=self.config.grammar_backend,
        )
        self._preparation = Preparation(grammars, runner)
        self._scheduler = Scheduler(
            runner.limits,
            make_stream=functools.partial(stream_of, self._tokenizer),
            shapes=self._shapes(runner),
        )
        return weights

    def _find_adapter(self, name: str) -> Adapter:
        return self._weights.adapters.find(name)

    def _start_runner(self, progress: Progress | None) -> tuple[PlanRunner, Weights]:
        place = place_of(self.args)
        if place is not None and place.rank:
            raise ConfigError(
                f"node_rank is {place.rank}; expected 0 here: the other hosts run jspec serve"
            )
        if self.args.engine_process or place is not None:
            process = ProcessRunner.start(self.args, progress=progress, place=place)
            self.config = process.config
            return process, process
        runner, self.config, self._served = self._build_runner(progress)
        return runner, self._served

    def _on_process_end(self, why: str) -> None:
        self._loop_thread.start_thread()
        with suppress(EngineClosedError):  # we end, too
            self._loop_thread.run(self._loop_thread.ask(lambda: self._loop.runner_ended(why)))

    @functools.cached_property
    def profiler(self) -> Profiler | ProcessProfiler:
        runner = self._runner
        return ProcessProfiler(runner) if isinstance(runner, ProcessRunner) else Profiler()

    def _shapes(self, runner: PlanRunner) -> ShapeChooser | None:
        """Return the adaptive shape chooser, or None for a fixed shape. Tests may override it."""
        if not self.config.speculative_adaptive:
            return None
        return AdaptiveShapes(runner.limits, step_costs=runner.step_costs)

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        """Return the runner, its configuration and its weights. Tests may override it."""
        return build_runner(self.args, progress=progress)

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def served(self) -> ServedWeights:
        """The models and weights in service. Raises ConfigError if another process has them."""
        if isinstance(self._runner, ProcessRunner):
            raise ConfigError(
                "engine_process is True, or there are several hosts, and weights are to be read by "
                "this process; expected engine_process False on one host"
            )
        return self._served

    @property
    def busy_seconds(self) -> float:
        return self._loop.busy_seconds

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    @property
    def is_restarting(self) -> bool:
        """True while a failed runner restarts; requests are accepted and wait."""
        return self._loop.is_restarting

    @property
    def process_id(self) -> int | None:
        return self._runner.process_id if isinstance(self._runner, ProcessRunner) else None

    trace_requests = forwarded("_loop", EngineLoop.trace_requests)

    # Sequences.

    submit = forwarded("_submission", Submission.submit)
    abort = forwarded("_submission", Submission.abort)
    abort_all = forwarded("_submission", Submission.abort_all)

    async def stream_chunks(self, request: Request) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one request. Closing the iterator aborts the request."""
        (stream,) = await self.submit((request,))
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk

    # Weights.

    async_update_weights_from_disk = forwarded(
        "_weights", LiveWeights.async_update_weights_from_disk
    )
    update_weights_from_disk = mirrored(async_update_weights_from_disk)
    async_update_weights_from_tensor = forwarded(
        "_weights", LiveWeights.async_update_weights_from_tensor
    )
    update_weights_from_tensor = mirrored(async_update_weights_from_tensor)
    async_get_weights_by_name = forwarded("_weights", LiveWeights.async_get_weights_by_name)
    get_weights_by_name = mirrored(async_get_weights_by_name)
    weight = forwarded("_weights", LiveWeights.weight)
    update_weight_version = forwarded("_weights", LiveWeights.update_weight_version)

    async_load_lora_adapter = forwarded("_weights", LiveWeights.async_load_lora_adapter)
    load_lora_adapter = mirrored(async_load_lora_adapter)
    async_unload_lora_adapter = forwarded("_weights", LiveWeights.async_unload_lora_adapter)
    unload_lora_adapter = mirrored(async_unload_lora_adapter)

    @property
    def lora_adapters(self) -> Mapping[str, Adapter]:
        return self._weights.adapters.by_name

    @property
    def weight_version(self) -> str:
        return self._weights.weight_version

    @property
    def updated_model_path(self) -> str | None:
        return self._weights.updated_model_path

    # Experts of an MoE.

    @functools.cached_property
    def _expert_record(self) -> ExpertRecord:
        config = self.config
        how: Any = {"expert_map": config.expert_map, "num_devices": config.ep_size}
        return ExpertRecord(self._runner.expert_counts, **how)

    async def async_start_expert_distribution_record(self) -> None:
        """Start counting the tokens of each expert. Raises RequestError without counts."""
        await to_its_end(self._expert_record.start)

    start_expert_distribution_record = mirrored(async_start_expert_distribution_record)

    async def async_stop_expert_distribution_record(self) -> None:
        """Stop counting the tokens of experts until the next start."""
        await to_its_end(self._expert_record.stop)

    stop_expert_distribution_record = mirrored(async_stop_expert_distribution_record)

    async def async_dump_expert_distribution_record(self) -> dict[str, Any]:
        """Return {"logical_count": tokens of each expert, by layer} (zeros without experts).

        As a file, the result can be given as `init_expert_location`. A token counts once for each
        of its experts, also as a draft that is not accepted; padding does not count.
        """
        return await to_its_end(self._expert_record.dump)

    dump_expert_distribution_record = mirrored(async_dump_expert_distribution_record)

    async def expert_balancedness(self) -> Mapping[int, float]:
        """Return `ExpertRecord.balancedness`, or {} for an engine that does not count."""
        counts = self._limits.programs.counted_experts
        return {} if counts is None else await to_its_end(self._expert_record.balancedness)

    # The engine itself.

    @property
    def stats(self) -> SchedulerStats:
        return self._loop.stats

    async def async_flush_cache(self) -> bool:
        """Empty the prefix cache. While there are requests, do nothing and return False."""
        return await self._loop_thread.ask(self._loop.flush_cache)

    flush_cache = mirrored(async_flush_cache)

    async def pause_generation(self, *, abort: bool = False) -> int:
        """Plan no step until `continue_generation`; requests wait. With `abort`, end the present
        requests and return their number."""
        self._loop.pause()
        return await self.abort_all() if abort else 0

    async def continue_generation(self) -> None:
        await self._loop_thread.ask(self._loop.resume)

    @property
    def is_paused(self) -> bool:
        return self._loop.is_paused

    def describe_programs(self) -> tuple[str, ...]:
        """Return lines on the compiled programs and on when the others will be compiled."""
        ready, building = self._runner.ready_programs, self._preparation.building
        return describe_ready(self._limits, ready, building=building)

    def get_server_info(self) -> dict[str, Any]:
        """Return resolved arguments, flat, and live counters (SGLang's /server_info)."""
        resolved, stats = self.config.values(), self.stats
        return {
            **resolved,
            "max_total_num_tokens": self._limits.max_total_tokens,
            "num_programs": self._runner.num_programs,
            "num_programs_wanted": self._runner.num_programs_wanted,
            "startup_seconds": round(self.startup_seconds, 3),
            "weight_version": self.weight_version,
            "device": self._runner.device_kind,
            "version": __version__,
            "internal_states": [{**resolved, **stats.to_json()}],
        }

    async def close(self) -> None:
        """End every stream with EngineClosedError and wait for the device."""
        if self._loop_thread.is_running or not self._loop_thread.is_started:
            with suppress(EngineClosedError):  # closed concurrently
                await self._loop_thread.call(self._loop.close())
            self._loop_thread.stop_soon()

    def shutdown(self) -> None:
        """Close the engine from synchronous code; its thread has ended when this returns."""
        self._loop_thread.start_thread()  # an engine that was never used is closed as well
        if self._loop_thread.is_running:
            with suppress(EngineClosedError):  # closed concurrently
                self._loop_thread.run(self._loop.close())
        self._loop_thread.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _with_model(arguments: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    if model is None:
        return dict(arguments)
    if arguments.get("model_path") is not None:
        raise ConfigError(
            f"model is {model!r} and model_path {arguments['model_path']!r}; expected one of them"
        )
    return {**arguments, "model_path": str(model)}
