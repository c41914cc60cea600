"""The process that owns devices, weights and state.

Run as `python -m jspec.engine.process.engine_process FD FD`. It runs packed steps for a server in
another process (`process_runner`), and exits when its pipes close and after any step error, since
the device state is then unreliable; the server starts a new one.
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

from jspec.config.hosts import HostPlace
from jspec.engine.building import build_runner
from jspec.engine.gc_control import collect_seldom, freeze_heap
from jspec.engine.plan_runner import ReadyPrograms
from jspec.engine.process.process_messages import (
    Answer,
    Call,
    Enqueue,
    Failed,
    Output,
    Progressed,
    Read,
    Started,
    StartTask,
)
from jspec.engine.profiling import Profiler
from jspec.engine.runner import DeviceRunner
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import EngineClosedError
from jspec.messages.weight_update import Model, WeightUpdate

LOGGER = logging.getLogger("jspec.engine")
LOG_FORMAT = "[%(asctime)s] %(message)s"


class StepServer:
    def __init__(self, runner: DeviceRunner, steps: Connection, calls: Calls) -> None:
        self._runner = runner
        self._steps = steps
        self._calls = calls
        self._outputs: dict[int, jax.Array] = {}
        self._kept: dict[int, Any] = {}  # outputs that are operands of later programs
        self._by_name: dict[str, ProgramKey] = {}
        self._reported: ReadyPrograms | None = None

    def run(self) -> None:
        """Serve until the pipe closes. A step's error is sent to the server, then raised."""
        try:
            while True:
                try:
                    message = self._steps.recv()
                except EOFError:
                    return
                if isinstance(message, Enqueue):
                    self._enqueue(message)
                elif isinstance(message, Read):
                    self._send(message.number)
                else:
                    answer = self._calls.answer(message)
                    failed = answer if isinstance(answer, Failed) else None
                    self._steps.send(Answer(failed))
                    self._calls.end_after(answer)
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
        news = None if ready is self._reported else ready.measured
        self._reported = ready
        self._steps.send(Output(array, news))


class Calls:
    """Rare calls, one method each, on a separate thread."""

    def __init__(self, runner: DeviceRunner, weights: ServedWeights) -> None:
        self._runner = runner
        self._weights = weights
        self._profiler = Profiler()
        self._prepared: Any = None

    def programs(self) -> dict[ProgramKey, float | None]:
        return self._runner.programs.measured

    def ensure(self, keys: tuple[ProgramKey, ...]) -> dict[ProgramKey, float | None]:
        self._runner.ensure(keys)
        return self._runner.programs.measured

    def prepare(self, update: WeightUpdate) -> None:
        self._prepared = self._weights.prepare(update)

    def switch(self) -> None:
        prepared, self._prepared = self._prepared, None
        self._weights.switch(prepared)

    def drop(self) -> None:
        """Forget the prepared weights, because another host could not prepare them."""
        self._prepared = None

    def tensor(self, name: str, model: Model | None) -> Any:
        return self._weights.tensor(name, model)

    def expert_counts(self) -> Any:
        return self._runner.expert_counts()

    def start_profile(self, directory: str) -> None:
        self._profiler.start(directory)

    def stop_profile(self) -> str:
        return self._profiler.stop()

    def serve(self, control: Connection) -> None:
        """Answer calls until the pipe closes, then exit the process."""
        while True:
            try:
                call: Call = control.recv()
            except (EOFError, OSError):
                os._exit(0)
            answer = self.answer(call)
            control.send(answer)
            self.end_after(answer)

    def answer(self, call: Call) -> Any:
        method: Callable[..., Any] = getattr(self, call.name)
        try:
            return method(*call.args)
        except Exception as error:
            return Failed.of(error)

    @staticmethod
    def end_after(answer: Any) -> None:
        if isinstance(answer, Failed) and isinstance(answer.error, EngineClosedError):
            os._exit(1)  # the remaining state cannot run a step


def end_with(control: Connection, built: threading.Event) -> None:
    """Exit this process if the pipe closes before `built` is set."""
    while not built.is_set():
        if control.poll(0.1):
            if built.is_set():
                return
            os._exit(0)  # EOF: the server sends no call before it receives Started


def join_hosts(place: HostPlace) -> None:
    """Join the devices of all hosts in jax, once all hosts are there."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM
    jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=int(place.timeout),
        coordinator_bind_address=place.coordinator,
    )


def start(task: StartTask, control: Connection) -> tuple[DeviceRunner, ServedWeights, Started]:
    for name, value in task.settings.items():
        jax.config.update(name, value)
    if task.log_level is not None:
        logging.basicConfig(
            level=task.log_level, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
        )
        logging.getLogger("jax").setLevel(max(task.log_level, logging.WARNING))
    if task.place is not None:
        join_hosts(task.place)
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
    # a signal to the process group is for the server
    for number in (signal.SIGINT, signal.SIGTERM):
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
    except Exception as error:  # the server reports it
        control.send(Failed.of(error))
        return 1
    built.set()
    freeze_heap()
    control.send(started)
    calls = Calls(runner, weights)
    threading.Thread(target=calls.serve, args=(control,), daemon=True).start()
    StepServer(runner, steps, calls).run()
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
    os._exit(status)  # a failed device may hang in its own clean-up
