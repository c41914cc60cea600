"""`jspec.Engine`: the composition root, for offline generation and for the server.

It loads a model pair, compiles, and connects tokenizer, scheduler, loop and runner. Names are
SGLang's: `generate(prompt=... | input_ids=..., sampling_params=...)`.

    engine = jspec.Engine()                       # the bundled pair, EAGLE-3, 3/1/4
    engine.generate("def fib(", {"max_new_tokens": 32, "temperature": 0})["text"]
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jspec import __version__
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.building import build_runner
from jspec.engine.interrupts import interruptible
from jspec.engine.plan_runner import PlanRunner
from jspec.engine.process.process_runner import ProcessProfiler, ProcessRunner
from jspec.engine.profiling import Profiler
from jspec.engine.programs.compilation import Progress
from jspec.engine.programs.program_growth import BuildError
from jspec.engine.programs.program_keys import programs_on_demand
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.loading import end_of_sequence_ids, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import ConfigError, EngineClosedError, RequestError
from jspec.messages.grammar import ReasoningMarks
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import PLAIN, StepOption, StepOptions
from jspec.models.files.checkpoint import load_sampling_defaults
from jspec.scheduler.scheduler import ABORTED, Scheduler
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import ShapeChooser
from jspec.serving.engine_calls import EngineCalls
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.request_trace import RequestTrace
from jspec.serving.trace import TraceEvent
from jspec.text.calls.tools import check_tools
from jspec.text.grammar.grammars import Grammars
from jspec.text.intake import NO_TOKENIZER, Ids, Intake, Params
from jspec.text.stream import stream_of
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.token_texts import TokenTexts
from jspec.text.tokenizer.tokenizer import Tokenizer


class Engine(EngineCalls):
    """A model pair, loaded and compiled, ready for requests.

    model: `model_path`, as first argument or by this name; None: the bundled pair. Other keyword
    arguments are those of `EngineArgs`, stored as `args`; `config` is the resolved configuration.
    The engine runs on an event loop in its own thread, so any thread and any event loop, also one
    asyncio.run after another, may use it.

    Raises ConfigError and CheckpointError from the constructor, RequestError, QueueFullError and
    QueueTimeoutError for a request, EngineClosedError after shutdown. Ctrl-C during startup raises
    KeyboardInterrupt.
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
            self._start(progress)
            self._loop = EngineLoop(
                self._scheduler,
                self._runner,
                trace=trace,
                queue_time_limit=self.args.queue_time_limit,
            )
        self._loop_thread = LoopThread()
        if isinstance(self._runner, ProcessRunner):
            self._runner.watch(self._on_process_end)
        self.startup_seconds = time.monotonic() - started

    def _start(self, progress: Progress | None) -> None:
        paths = resolve_paths(self.args)
        self._tokenizer: Tokenizer | None = None
        if not self.args.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_directory(paths.tokenizer)
        self.eos_token_ids = end_of_sequence_ids(paths.target, self._tokenizer)
        templates = ChatTemplates.find(paths.tokenizer, named=self.args.chat_template)
        is_models = self.args.sampling_defaults == "model"
        defaults = load_sampling_defaults(paths.target) if is_models else {}
        runner = self._start_runner(progress)
        self._runner, self._limits = runner, runner.limits
        self._intake = Intake(
            self._tokenizer,
            vocab_size=runner.vocab_size,
            eos_token_ids=self.eos_token_ids,
            context_length=runner.limits.context_length,
            random_seed=self.config.random_seed,
            chat_templates=templates,
            defaults=defaults,
        )
        self._grammars = Grammars(
            self._tokenizer,
            vocab_size=runner.vocab_size,
            eos_token_ids=self.eos_token_ids,
            backend=self.config.grammar_backend,
        )
        self._asked, self._asking = PLAIN, threading.Lock()
        self._scheduler = Scheduler(
            runner.limits,
            make_stream=functools.partial(stream_of, self._tokenizer),
            shapes=self._shapes(runner),
        )

    def _start_runner(self, progress: Progress | None) -> PlanRunner:
        if self.args.engine_process:
            process = ProcessRunner.start(self.args, progress=progress)
            self.config = process.config
            self._init_weights(process)
            return process
        runner, self.config, self._served = self._build_runner(progress)
        self._init_weights(self._served)
        return runner

    def _on_process_end(self, why: str) -> None:
        """Report the end of the engine process; called on the thread that watches it."""
        self._loop_thread.start_thread()
        with suppress(EngineClosedError):  # we end, too
            self._loop_thread.run(self._loop_thread.ask(lambda: self._loop.runner_ended(why)))

    @functools.cached_property
    def profiler(self) -> Profiler | ProcessProfiler:
        """Profiles the process that has the devices."""
        runner = self._runner
        return ProcessProfiler(runner) if isinstance(runner, ProcessRunner) else Profiler()

    def _shapes(self, runner: PlanRunner) -> ShapeChooser | None:
        """Return the adaptive shape chooser, or None for a fixed shape. An override point."""
        if not self.config.speculative_adaptive:
            return None
        return AdaptiveShapes(runner.limits, step_costs=runner.step_costs)

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        """Return the runner, its configuration and its weights. An override point."""
        return build_runner(self.args, progress=progress)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError if the engine was started with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise RequestError(f"text was asked for; {NO_TOKENIZER} token ids only")
        return self._tokenizer

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """The text of each single id. Raises RequestError like `tokenizer`."""
        return TokenTexts(self.tokenizer)

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def served(self) -> ServedWeights:
        """The models and weights in service, to check or measure them.

        Raises ConfigError if they are in another process.
        """
        if self.args.engine_process:
            raise ConfigError(
                "engine_process is True, and weights are to be read by this process; expected False"
            )
        return self._served

    @property
    def busy_seconds(self) -> float:
        """Seconds during which a step was in flight."""
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
        """Process id of a separate engine process, else None."""
        return self._runner.process_id if isinstance(self._runner, ProcessRunner) else None

    def trace_requests(self, trace: RequestTrace) -> None:
        """Record the stages that requests pass in `trace` from now on."""
        self._loop.trace_requests(trace)

    def requests(
        self,
        prompt: str | None = None,
        input_ids: Ids | None = None,
        sampling_params: Params = None,
        *,
        request_id: str | None = None,
        extra_key: str | None = None,
        priority: int = 0,
        reasoning: ReasoningMarks | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> tuple[Request, ...]:
        """Return the n Requests of one prompt, tokenized and seeded. Raises RequestError.

        reasoning: marks of the reasoning that may precede a grammar's text. shown_ids: see Request.
        """
        return self._intake.requests(
            prompt,
            input_ids,
            sampling_params,
            request_id=request_id,
            extra_key=extra_key,
            priority=priority,
            reasoning=reasoning,
            shown_ids=shown_ids,
        )

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The checkpoint's default sampling parameters."""
        return self._intake.defaults

    def chat_prompt(
        self, messages: object, sampling_params: Params = None, **options: Any
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Return ids and sampling of a chat; options are those of `chat`. Raises RequestError."""
        return self._intake.chat(messages, sampling_params, **options)

    # Generation; see also EngineCalls.

    async def _constrained(self, requests: Sequence[Request]) -> Sequence[Request]:
        if all(r.grammar is not None or not _asks_more(r.sampling) for r in requests):
            return requests
        return await asyncio.to_thread(self._prepared, tuple(requests))

    def _prepared(self, requests: Sequence[Request]) -> list[Request]:
        """Compile the grammars of requests and build the programs that they need.

        Raises RequestError for an invalid grammar.
        """
        made: list[Request] = []
        for request in requests:
            source = request.sampling.grammar
            grammar = None if source is None else self._grammars.compile(source)
            if grammar is not None and request.reasoning is not None:
                grammar = self._grammars.after_reasoning(grammar, request.reasoning)
            made.append(replace(request, grammar=grammar))
        # Two concurrent new kinds need programs for both together: the later call builds them.
        asked = PLAIN.union(request.sampling.features for request in requests)
        with self._asking:
            new = asked.members - self._asked.members
            self._asked = self._asked.union((asked,))
            asked = self._asked
        try:
            self._runner.ensure(programs_on_demand(self._limits, asked))
        except BuildError:  # must not block the other kind
            with self._asking:
                self._asked = StepOptions(self._asked.members - new)
            raise
        return made

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params = None,
        *,
        stream: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Like generate, for messages ({"role", "content"}) through the chat template.

        Without max_new_tokens an answer may fill the context.
        continue_final_message: the answer continues the assistant's last message.
        tools: shown to the model through the template; its calls are part of the answer's text.
        """
        ids, sampling = self.chat_prompt(
            messages,
            sampling_params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
            tools=None if tools is None else check_tools(tools, None, None).shown_tools,
        )
        return self.generate(input_ids=ids, sampling_params=sampling, stream=stream)

    # The engine itself.

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets a last chunk. False if there is no such request."""
        return await self._loop_thread.ask(lambda: self._loop.abort(request_id))

    async def abort_all(self, *, why: str = ABORTED) -> int:
        """End every request; return how many. why: the message of their finish reason."""
        loop = self._loop
        return await self._loop_thread.ask(
            lambda: sum(loop.abort(name, why=why) for name in loop.request_ids)
        )

    async def pause_generation(self, *, abort: bool = False) -> int:
        """Plan no further step until `continue_generation`; requests are accepted and wait.

        abort: end the present requests, and return how many.
        """
        self._loop.pause()
        return await self.abort_all() if abort else 0

    async def continue_generation(self) -> None:
        await self._loop_thread.ask(self._loop.resume)

    @property
    def is_paused(self) -> bool:
        return self._loop.is_paused

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
        """Like close, for synchronous callers; the engine's thread has ended when it returns."""
        self._loop_thread.start_thread()  # an engine that was never used is closed as well
        if self._loop_thread.is_running:
            with suppress(EngineClosedError):  # closed concurrently
                self._loop_thread.run(self._loop.close())
        self._loop_thread.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _asks_more(sampling: SamplingParams) -> bool:
    return bool(set(sampling.features) & {StepOption.HIDDEN, StepOption.GRAMMAR})


def _with_model(arguments: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Return `arguments` with `model` as model_path. Raises ConfigError if both are given."""
    if model is None:
        return dict(arguments)
    if arguments.get("model_path") is not None:
        raise ConfigError(
            f"model is {model!r} and model_path {arguments['model_path']!r}; expected one of them"
        )
    return {**arguments, "model_path": str(model)}
