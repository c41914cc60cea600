"""A follower: another host's runner process executes what host 0 sends over the channel."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.engine.hosts.frames import Frame, FrameError, FrameSocket, message_of
from jspec.engine.hosts.handshake import Identity, greet, identity_of
from jspec.engine.process.child_process import EngineProcess
from jspec.engine.process.process_messages import Answer, Call, Enqueue, Read
from jspec.engine.programs.program_keys import wanted_programs
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import ConfigError, JspecError, RunnerError

log = logging.getLogger("jspec.engine")
RETRY_SECONDS = 0.25


def follow(args: EngineArgs, place: HostPlace, token: bytes) -> None:
    """Run what host 0 runs until it ends, and restart with the other hosts if one is lost.

    Raises ConfigError if host 0 refuses this host or fails, RunnerError if it is away for
    `place.timeout` seconds.
    """
    identity = identity_of(args, count=place.count)
    while True:
        channel = _arrive(place, token, identity)
        log.info("host %d of %d follows %s", place.rank, place.count, place.address)
        following = _Following(channel, args, place)
        try:
            if following.run():
                log.info("host 0 has ended")
                return
        finally:
            following.end()
        log.warning(
            "host %d: %s; waiting up to %g s for host 0", place.rank, following.why, place.timeout
        )


def _arrive(place: HostPlace, token: bytes, identity: Identity) -> FrameSocket:
    deadline = time.monotonic() + place.timeout
    last = ""
    while (left := deadline - time.monotonic()) > 0:
        with suppress(FrameError):
            try:
                channel = FrameSocket(socket.create_connection((place.host, place.port), left))
                channel.set_timeout(left)
                try:
                    greet(channel, token, place.rank, identity)
                except BaseException:
                    channel.close()
                    raise
                channel.set_timeout(None)
                return channel
            except (OSError, EOFError) as error:
                last = f" ({error})" if str(error) else ""
        time.sleep(min(RETRY_SECONDS, max(0.0, left)))
    raise RunnerError(
        f"dist_timeout is {place.timeout:g}: host 0 did not answer at {place.address} within that "
        f"time{last}; expected the same command there, with --node-rank 0"
    )


class _Following:
    """One life of this host's runner process, from host 0's `begin` to the first loss."""

    def __init__(self, channel: FrameSocket, args: EngineArgs, place: HostPlace) -> None:
        self.why = "host 0 was lost"
        self._channel, self._args, self._place = channel, args, place
        self._process: EngineProcess | None = None
        self._programs: dict[str, ProgramKey] = {}
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._is_ended = False
        self._unread: int | None = None  # last output to be read

    def run(self) -> bool:
        """Return True if host 0 has ended in order. Raises ConfigError if a start failed."""
        try:
            while True:
                frame = self._channel.receive()
                if frame.kind == "end":
                    if "error" in frame.fields:
                        raise ConfigError(str(frame.fields["error"]))
                    return True
                self._pass_on(frame)
        except (OSError, EOFError, FrameError, RunnerError) as error:
            if str(error):
                self.why = str(error)
            return False

    def end(self) -> None:
        self._is_ended = True
        self._calls.put(None)
        if self._process is not None:
            self._process.kill()
            self._process.end()
        self._channel.close()

    def _pass_on(self, frame: Frame) -> None:
        if frame.kind == "begin":
            tokens = frame.fields.get("max_total_tokens")
            args = replace(self._args, max_total_tokens=tokens)
            self._process = EngineProcess(args, on_end=lambda _: None, place=self._place)
            self._in_thread(self._start_and_report, self._process)
            return
        if self._process is None:
            raise FrameError(f"{frame.kind} came before begin")
        message = message_of(frame, self._programs)
        if isinstance(message, Call) and not frame.fields.get("in_order"):
            self._calls.put(message)
            return
        self._process.send(message)
        if isinstance(message, Enqueue):
            if self._unread is not None:  # read one step later, so that it delays no program
                self._process.send(Read(self._unread))
            self._unread = message.number if message.is_read else None

    def _start_and_report(self, process: EngineProcess) -> None:
        started = process.started(None)
        self._programs = {str(key): key for key, *_ in wanted_programs(started.limits)}
        self._channel.send("started", limits=repr(started.limits))
        self._in_thread(self._answer_calls, process)
        while True:
            said = process.receive()
            if isinstance(said, Answer):
                failed = said.failed
                self._channel.send(
                    "answer", in_order=True, error=None if failed is None else failed.text
                )

    def _answer_calls(self, process: EngineProcess) -> None:
        while (call := self._calls.get()) is not None:
            error = None
            try:
                process.call(call.name, *call.args)
            except RunnerError:
                raise
            except JspecError as found:
                error = str(found)
            self._channel.send("answer", error=error)

    def _in_thread(self, run: Callable[[EngineProcess], None], process: EngineProcess) -> None:
        def reporting() -> None:
            try:
                run(process)
            except JspecError as error:
                if not self._is_ended:
                    self.why = str(error)
                with suppress(OSError):  # host 0 answers `end` or closes the connection
                    self._channel.send("failed", text=str(error), error=type(error).__name__)
            except OSError:
                self._channel.close()

        threading.Thread(target=reporting, name="jspec-follow", daemon=True).start()
