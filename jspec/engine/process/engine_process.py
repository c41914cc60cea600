"""The process that holds devices, weights and state.

Run as `python -m jspec.engine.process.engine_process FD FD`.

It runs packed steps for a server in another process, which plans, makes text, and speaks to clients
(`process_runner`). It ends when its pipes do, so it never outlives the server; and after any error
of a step, because what follows such an error cannot be trusted: the server begins another one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax

from jspec.engine.building import build_runner
from jspec.engine.gc_control import collect_seldom, settle_heap
from jspec.engine.plan_runner import ReadyPrograms
from jspec.engine.process.process_messages import (
    Call,
    Enqueue,
    Failed,
    Output,
    Progressed,
    Started,
    StartTask,
)
from jspec.engine.profiling import Profiler
from jspec.engine.programs.program_keys import ProgramKey
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import EngineClosedError
from jspec.messages.weight_update import Model, WeightUpdate

LOGGER = logging.getLogger("jspec.engine")
LOG_FORMAT = "[%(asctime)s] %(message)s"


class StepServer:
    """Runs steps one after the other, in the order in which they come."""

    def __init__(self, runner: DeviceRunner, steps: Connection) -> None:
        self._runner = runner
        self._steps = steps
        self._outputs: dict[int, jax.Array] = {}
        self._kept: dict[int, Any] = {}  # outputs that later programs take
        self._by_name: dict[str, ProgramKey] = {}
        self._told: ReadyPrograms | None = None

    def run(self) -> None:
        """Until the pipe ends. Raises what a step raises, after the server was told."""
        try:
            while True:
                try:
                    message = self._steps.recv()
                except EOFError:
                    return
                if isinstance(message, Enqueue):
                    self._enqueue(message)
                else:
                    self._send(message.number)
        except Exception as error:
            self._steps.send(Failed.of(error))
            raise

    def _enqueue(self, message: Enqueue) -> None:
        key = self._by_name.get(message.program)
        if key is None:
            self._by_name = {str(key): key for key in self._runner.ready_programs}
            key = self._by_name[message.program]
        operands = (self._kept[x] if isinstance(x, int) else x for x in message.operands)
        output = self._runner.enqueue(key, tuple(operands), is_read=message.is_read)
        for number in message.drops:
            del self._kept[number]
        if message.is_read:
            self._outputs[message.number] = output
        if message.is_kept:
            self._kept[message.number] = output

    def _send(self, number: int) -> None:
        array = self._runner.read(self._outputs.pop(number))
        ready = self._runner.programs
        news = None if ready is self._told else ready.measured
        self._told = ready
        self._steps.send(Output(array, news))


class Calls:
    """What is rare, one method a name; on a thread of its own."""

    def __init__(self, runner: DeviceRunner, weights: ServedWeights) -> None:
        self._runner = runner
        self._weights = weights
        self._profiler = Profiler()
        self._prepared: Any = None

    def programs(self) -> dict[ProgramKey, float | None]:
        """All that are ready, with the seconds of a step."""
        return self._runner.programs.measured

    def ensure(self, keys: tuple[ProgramKey, ...]) -> dict[ProgramKey, float | None]:
        """DeviceRunner.ensure; all that are ready then."""
        self._runner.ensure(keys)
        return self._runner.programs.measured

    def prepare(self, update: WeightUpdate) -> None:
        """ServedWeights.prepare; what it gave stays here."""
        self._prepared = self._weights.prepare(update)

    def switch(self) -> None:
        """ServedWeights.switch, to what was prepared last; no step is in flight."""
        prepared, self._prepared = self._prepared, None
        self._weights.switch(prepared)

    def tensor(self, name: str, model: Model | None) -> Any:
        return self._weights.tensor(name, model)

    def start_profile(self, directory: str) -> None:
        self._profiler.start(directory)

    def stop_profile(self) -> str:
        return self._profiler.stop()

    def serve(self, control: Connection) -> None:
        """Answers until the pipe ends, and then ends the process, whatever else it does."""
        while True:
            try:
                call: Call = control.recv()
            except (EOFError, OSError):
                os._exit(0)
            method: Callable[..., Any] = getattr(self, call.name)
            answer: Any
            try:
                answer = method(*call.args)
            except Exception as error:
                answer = Failed.of(error)
            control.send(answer)
            if isinstance(answer, Failed) and isinstance(answer.error, EngineClosedError):
                os._exit(1)  # what is left cannot run a step


def end_with(control: Connection, built: threading.Event) -> None:
    """Ends this process if the pipe does while nothing is built yet."""
    while not built.is_set():
        if control.poll(0.1):
            if built.is_set():
                return
            os._exit(0)  # nobody sends anything before it is told that we are ready


def start(task: StartTask, control: Connection) -> tuple[DeviceRunner, ServedWeights, Started]:
    """Builds what the task says, and what the server is to know of it."""
    for name, value in task.settings.items():
        jax.config.update(name, value)
    if task.log_level is not None:
        logging.basicConfig(
            level=task.log_level, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
        )
        logging.getLogger("jax").setLevel(max(task.log_level, logging.WARNING))
    runner, config, weights = build_runner(
        task.args, progress=lambda *all_of_it: control.send(Progressed(*all_of_it))
    )
    started = Started(
        config=config,
        limits=runner.limits,
        vocab_size=runner.vocab_size,
        programs=runner.programs.measured,
        num_wanted=runner.num_programs_wanted,
        device_kind=runner.device_kind,
        has_draft=weights.has_draft,
        draft_is_in_target=weights.draft_is_in_target,
    )
    return runner, weights, started


def main() -> int:
    """Serves the pipes whose file descriptors are the arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever signals a group means the server
        signal.signal(number, signal.SIG_IGN)
    steps, control = (Connection(int(each)) for each in sys.argv[1:3])
    try:
        task = control.recv()
    except EOFError:
        return 0
    collect_seldom()
    built = threading.Event()
    threading.Thread(target=end_with, args=(control, built), daemon=True).start()
    try:
        runner, weights, started = start(task, control)
    except Exception as error:  # the server says it
        control.send(Failed.of(error))
        return 1
    built.set()
    settle_heap()
    control.send(started)
    calls = Calls(runner, weights)
    threading.Thread(target=calls.serve, args=(control,), daemon=True).start()
    StepServer(runner, steps).run()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except BrokenPipeError:
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # a device that failed may hang in its own clean-up
