"""The server's side of the engine process: start, calls, steps, watching, end."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.engine.process.process_messages import (
    MODULE,
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
from jspec.engine.programs.compilation import Progress
from jspec.engine.programs.program_growth import PLATFORM_SETTINGS, child_environment, settings_of
from jspec.engine.programs.program_store import SETTINGS
from jspec.errors import RunnerError

END_SECONDS = 5.0


class EngineProcess:
    """One engine process. on_end gets the reason, on a thread, if it ends unexpectedly."""

    def __init__(
        self, args: EngineArgs, *, on_end: Callable[[str], None], place: HostPlace | None = None
    ) -> None:
        self._on_end = on_end
        self._is_ending = False
        self._calling = threading.Lock()
        self._sending, self._reading = threading.RLock(), threading.RLock()  # of `steps`
        (self.steps, steps_there), (self._control, control_there) = _pipe(), _pipe()
        with steps_there, control_there:
            numbers = (steps_there.fileno(), control_there.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # a terminal's Ctrl-C must reach only the server
            )
        root = logging.getLogger()
        settings = settings_of((*SETTINGS, *PLATFORM_SETTINGS))
        level = root.level if root.handlers else None
        with suppress(BrokenPipeError):  # it has ended already, as `started` will find
            task = StartTask(args=args, settings=settings, log_level=level, place=place)
            self._control.send(task)
        self._watching = threading.Thread(
            target=self._watch, name="jspec-watch-engine", daemon=True
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def started(self, progress: Progress | None) -> Started:
        """Wait until the process is ready. Raises the error that prevented its start."""
        while True:
            message = self._receive(self._control)
            if isinstance(message, Progressed):
                if progress is not None:
                    progress(*message)
            elif isinstance(message, Failed):
                raise message.error or RunnerError(f"the engine did not start: {message.text}")
            else:
                assert isinstance(message, Started)
                self._watching.start()
                return message

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of `engine_process.Calls` and raise its error. Thread-safe, serialized."""
        with self._calling:
            try:
                self._control.send(Call(name, args))
            except OSError as error:
                raise RunnerError(self.why_ended()) from error
            answer = self._receive(self._control)
        if isinstance(answer, Failed):
            raise answer.error or RunnerError(f"the engine failed: {answer.text}")
        return answer

    @property
    def is_calling(self) -> bool:
        return self._calling.locked()

    def send(self, message: Enqueue | Read | Call) -> None:
        """Send a message to the steps' thread. Raises RunnerError if the process is gone."""
        try:
            with self._sending:
                self.steps.send(message)
        except OSError as error:
            self._raise_failure(error)

    def read(self, number: int) -> Output:
        """Wait for an output. Raises RunnerError if the step or the process failed."""
        with self._reading:
            self.send(Read(number))
            output = self.receive()
        assert isinstance(output, Output)
        return output

    def call_in_order(self, name: str, *args: Any) -> Any:
        """Like `call`, but between the programs sent before and after it."""
        with self._reading:
            self.send(Call(name, args))
            answer = self.receive()
        if isinstance(answer, Answer) and answer.failed is not None:
            raise answer.failed.error or RunnerError(f"the engine failed: {answer.failed.text}")
        return answer

    def receive(self) -> Output | Answer:
        """Receive the answer to a Read or a Call. Raises RunnerError like `read`."""
        message = self._receive(self.steps)
        if isinstance(message, Failed):
            raise RunnerError(f"the engine failed: {message.text}")
        assert isinstance(message, Output | Answer)
        return message

    def _raise_failure(self, error: OSError) -> None:
        with suppress(EOFError, OSError):
            if self.steps.poll():
                self.receive()
        raise RunnerError(self.why_ended()) from error

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise RunnerError(self.why_ended()) from error

    def why_ended(self) -> str:
        """Describe how the process ended. It has closed its pipes, so it is about to exit."""
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine's process closed its pipes"
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the engine's process {self._process.pid} was ended {how}"

    def kill(self) -> None:
        self._is_ending = True
        self._process.kill()

    def end(self) -> None:
        self._is_ending = True
        self._control.close()
        self.steps.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watching.ident is not None:
            self._watching.join(END_SECONDS)

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_ending:
            self._on_end(self.why_ended())


def _pipe() -> tuple[Connection, Connection]:
    here, there = socket.socketpair()
    return Connection(here.detach()), Connection(there.detach())
