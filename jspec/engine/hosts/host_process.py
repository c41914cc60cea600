"""The runner process of host 0, with the processes of the other hosts, which mirror it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.engine.hosts.frames import (
    SHARED_CALLS,
    Frame,
    FrameError,
    FrameSocket,
    encoded,
    frame_of,
)
from jspec.engine.hosts.gate import Gate
from jspec.engine.process.child_process import EngineProcess
from jspec.engine.process.process_messages import Call, Enqueue, Output, Read, Started
from jspec.engine.programs.compilation import Progress
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import (
    CheckpointError,
    ConfigError,
    JspecError,
    RequestError,
    RunnerError,
)
from jspec.messages.weight_update import ArrayUpdate

log = logging.getLogger("jspec.engine")
REASON_SECONDS = 1.0
ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError)}


class Member:
    def __init__(
        self, rank: int, channel: FrameSocket, on_loss: Callable[[JspecError], None]
    ) -> None:
        self.rank, self.channel = rank, channel
        self.ended = threading.Event()
        self._on_loss = on_loss
        # Answers to calls among steps, and to other calls, since two threads may wait.
        self._said: dict[bool, queue.SimpleQueue[Frame | None]] = {
            in_order: queue.SimpleQueue() for in_order in (False, True)
        }
        threading.Thread(target=self._listen, name=f"jspec-host-{rank}", daemon=True).start()

    def next(self, *, in_order: bool = False) -> Frame | None:
        """Wait for the next answer; None means that the host was lost."""
        frame = self._said[in_order].get()
        if frame is None:
            self._said[in_order].put(None)  # also for a later call
        return frame

    def _listen(self) -> None:
        why = "the connection was closed"
        kind: type[JspecError] = RunnerError
        try:
            while (frame := self.channel.receive()).kind != "failed":
                self._said[bool(frame.fields.get("in_order"))].put(frame)
            why = str(frame.fields.get("text"))
            kind = ERRORS.get(str(frame.fields.get("error")), RunnerError)
        except (EOFError, OSError, FrameError) as error:
            why = str(error) or why
        self.ended.set()
        for queue_ in self._said.values():
            queue_.put(None)
        self._on_loss(kind(f"host {self.rank}: {why}"))


class HostsProcess(EngineProcess):
    """An EngineProcess on every host: each message goes to all of them, in one order. Losing a host
    kills the own process, since a step that waits for that host would not end."""

    def __init__(self, args: EngineArgs, *, on_end: Callable[[str], None], gate: Gate) -> None:
        self._gate = gate
        self._loss: JspecError | None = None
        self._agreed: dict[ProgramKey, float | None] = {}  # programs that all hosts have
        self._calling_all = threading.Lock()
        self._channels = gate.gather()
        super().__init__(args, on_end=on_end, place=gate.place)
        self._members = [Member(rank, each, self._lose) for rank, each in self._channels.items()]
        self._tell("begin", max_total_tokens=args.max_total_tokens)

    def _lose(self, loss: JspecError) -> None:
        if not self._is_ending:
            self._loss = self._loss or loss
            self._process.kill()

    def why_ended(self) -> str:
        found = super().why_ended()
        return found if self._loss is None else str(self._loss)

    def started(self, progress: Progress | None) -> Started:
        try:
            started = super().started(progress)
            for member in self._members:
                said = member.next()
                if said is None:
                    raise RunnerError(self.why_ended())
                if said.fields.get("limits") != repr(started.limits):
                    raise ConfigError(
                        f"host {member.rank} would run with {said.fields.get('limits')}; expected "
                        f"{started.limits}, as host 0"
                    )
        except JspecError as error:
            found = error
            if isinstance(error, RunnerError):  # the other host's reason may arrive a moment later
                for member in self._members:
                    member.ended.wait(REASON_SECONDS)
                found = self._loss or error
            self._is_ending = True
            self._gate.dismiss(self._channels, found)
            if found is error:
                raise
            raise found from error
        self._gate.is_first = False
        self._agreed = started.programs
        return started

    # Steps.

    def send(self, message: Enqueue | Read | Call) -> None:
        with self._sending:
            if not isinstance(message, Read):  # the other hosts read by themselves
                self._send_bytes(encoded(frame_of(message, in_order=True)))
            super().send(message)

    def read(self, number: int) -> Output:
        return super().read(number)._replace(programs=None)  # `ensure` says which ones all have

    def call_in_order(self, name: str, *args: Any) -> Any:
        """Raise the error of all hosts. If only some hosts fail, all are lost."""
        with self._reading:
            failed: JspecError | None = None
            try:
                super().call_in_order(name, *args)
            except RunnerError:
                raise
            except JspecError as error:
                failed = error
            texts = self._answers(in_order=True)
            self._check_alike(name, failed, texts)
            if failed is not None:
                raise failed

    # Calls.

    def call(self, name: str, *args: Any) -> Any:
        if name == "programs":
            return self._agreed
        if name == "tensor":
            raise RequestError(
                f"the weights are spread over {self._gate.place.count} hosts; expected one host "
                "where weights are read by name"
            )
        if name not in SHARED_CALLS:
            return super().call(name, *args)
        if isinstance(args[0], ArrayUpdate):
            raise RequestError(
                f"weights are given as arrays to an engine on {self._gate.place.count} hosts; "
                "expected weights from disk, which every host reads"
            )
        return self._call_all(name, *args)

    def _call_all(self, name: str, *args: Any) -> Any:
        answer = None
        with self._calling_all:
            self._send_bytes(encoded(frame_of(Call(name, args))))
            failed: JspecError | None = None
            try:
                answer = super().call(name, *args)
            except RunnerError:
                raise
            except JspecError as error:
                failed = error
            texts = self._answers()
        if name == "ensure":
            self._check_alike(name, failed, texts)
            self._agreed = answer or self._agreed
        elif name == "prepare" and failed is None and any(texts.values()):
            self._call_all("drop")
            rank, text = next((rank, text) for rank, text in texts.items() if text)
            failed = CheckpointError(f"host {rank}: {text}")
        if failed is not None:
            raise failed
        return answer

    def _answers(self, *, in_order: bool = False) -> dict[int, str | None]:
        found = {}
        for member in self._members:
            said = member.next(in_order=in_order)
            if said is None:
                raise RunnerError(self.why_ended())
            found[member.rank] = said.fields.get("error")
        return found

    def _check_alike(
        self, name: str, failed: JspecError | None, texts: dict[int, str | None]
    ) -> None:
        others = [f"host {rank}: {text}" for rank, text in texts.items() if bool(text)]
        if len(others) not in (0, len(texts)) or (failed is None) == bool(others):
            loss = RunnerError(
                f"{name} succeeded on some hosts only: {'; '.join(others) or failed}"
            )
            self._lose(loss)
            raise loss

    def _tell(self, kind: str, **fields: Any) -> None:
        self._send_bytes(encoded(Frame(kind, fields)))

    def _send_bytes(self, frame: bytes) -> None:
        for member in self._members:
            with suppress(OSError):  # its thread finds that it is lost
                member.channel.send_bytes(frame)

    # The end.

    def kill(self) -> None:
        super().kill()
        self._gate.dismiss(self._channels, None)

    def end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._tell("end")
            for member in self._members:
                member.ended.wait(1.0)
        self._gate.dismiss(self._channels, None)
        super().end()
