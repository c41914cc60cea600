"""A runner whose devices, weights and state are in a separate process (`engine_process`), which a
device error or a signal ends, and `restart` replaces. Packed arrays (`plan_runner`) cross."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.hosts.gate import Gate
from jspec.engine.hosts.handshake import identity_of, token_in
from jspec.engine.hosts.host_process import HostsProcess
from jspec.engine.plan_runner import PlanRunner, ReadyPrograms
from jspec.engine.process.child_process import EngineProcess
from jspec.engine.process.process_messages import Enqueue, Started
from jspec.engine.programs.compilation import Progress
from jspec.engine.programs.program_keys import later_programs
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import EngineClosedError, JspecError, RequestError, RunnerError
from jspec.messages.weight_update import (
    AdapterUpdate,
    ArrayUpdate,
    DiskUpdate,
    Model,
    WeightUpdate,
)

Launch = Callable[[EngineArgs], EngineProcess]


class ProcessRunner(PlanRunner):
    """Implements the protocols Runner and Weights (`messages.protocols`) with an EngineProcess."""

    def __init__(
        self,
        process: EngineProcess,
        started: Started,
        args: EngineArgs,
        *,
        ends: Ends,
        launch: Launch,
        gate: Gate | None,
    ) -> None:
        super().__init__(
            limits=started.limits,
            vocab_size=started.vocab_size,
            programs={},
        )
        self._learn(started.programs)
        self._process = process
        self._started = started
        # A restart must not choose another pool size because of other free memory.
        self._args = replace(args, max_total_tokens=started.limits.max_total_tokens)
        self._ends = ends
        self._launch, self._gate = launch, gate
        self._next_number = 0
        self._ensured: dict[ProgramKey, None] = {}
        self._update = DiskUpdate()  # all disk updates so far, merged
        self._adapters: dict[int, AdapterUpdate] = {}  # by slot
        self._has_arrays = False  # current weights include arrays that no file has
        self._restarting = threading.Lock()
        self._is_given_up = False
        self._is_closed = False

    @classmethod
    def start(
        cls, args: EngineArgs, *, progress: Progress | None, place: HostPlace | None = None
    ) -> ProcessRunner:
        """Start the process, with those of the other hosts if `place` is that of host 0. Raises the
        errors of `building.build_runner`, and ConfigError for hosts that do not match."""
        ends, gate = Ends(), None
        launch: Launch = partial(EngineProcess, on_end=ends)
        if place is not None:
            token = token_in(os.environ)
            gate = Gate(place, token, identity_of(args, count=place.count))
            launch = partial(HostsProcess, on_end=ends, gate=gate)
        process: EngineProcess | None = None
        try:
            process = launch(args)
            started = process.started(progress)
        except BaseException:
            if process is not None:
                process.kill()
                process.end()
            if gate is not None:
                gate.close()
            raise
        runner = cls(process, started, args, ends=ends, launch=launch, gate=gate)
        runner._grow_together()
        return runner

    @property
    def config(self) -> ResolvedConfig:
        return self._started.config

    @property
    def process_id(self) -> int:
        return self._process.process_id

    def watch(self, on_end: Callable[[str], None]) -> None:
        self._ends.tell = on_end

    @property
    def device_kind(self) -> str:
        return self._started.device_kind

    @property
    def num_programs(self) -> int:
        known = len(self._programs.executables)
        if known < self.num_programs_wanted and not (self._is_closed or self._process.is_calling):
            with suppress(JspecError):
                self._learn(self._process.call("programs"))
        return len(self._programs.executables)

    @property
    def num_programs_wanted(self) -> int:
        return max(self._started.num_wanted, len(self._programs.executables))

    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        missing = [key for key in keys if key not in self._programs.executables]
        if missing:
            self._learn(self._process.call("ensure", keys))
        self._ensured |= dict.fromkeys(keys)

    def _learn(self, programs: Mapping[ProgramKey, float | None]) -> None:
        self._programs = ReadyPrograms.of_measured(programs)

    def _grow_together(self) -> None:
        """Build later programs in a thread, each on all hosts before it is used. A single host's
        process builds them itself."""
        if self._gate is None:
            return
        keys, process = later_programs(self._limits, self.ready_programs), self._process

        def grow() -> None:
            with suppress(JspecError):  # the hosts have ended, or start again
                for key in keys:
                    self._learn(process.call("ensure", (key,)))

        threading.Thread(target=grow, name="jspec-grow-together", daemon=True).start()

    # Steps.

    def _enqueue(
        self,
        key: ProgramKey,
        *operands: np.ndarray | int,
        is_read: bool,
        is_kept: bool,
        drops: tuple[int, ...],
    ) -> int:
        self._next_number += 1
        message = Enqueue(self._next_number, str(key), operands, is_read, is_kept, drops)
        self._process.send(message)
        return self._next_number

    def _read(self, output: int) -> np.ndarray:
        message = self._process.read(output)
        if message.programs is not None:
            self._learn(message.programs)
        return message.array

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the runner is closed; it has no process")

    # Restart and end.

    def restart(self) -> None:
        """Start another process with the same weights. Raises the error that prevents it:
        EngineClosedError if the weights cannot be read again."""
        if self._has_arrays:
            raise EngineClosedError(
                "the current weights were given as arrays and were lost with the engine process; "
                "expected weights from disk, which can be read again"
            )
        self._process.kill()
        self._process.end()
        self._check_wanted()
        with self._restarting:
            self._process = self._launch(self._args)
            self._check_wanted()
            started = self._process.started(None)
            if started.limits != self._limits:
                raise EngineClosedError(
                    f"the engine's process came back with {started.limits}; expected {self._limits}"
                )
            self._learn(started.programs)
            if self._ensured:
                self.ensure(tuple(self._ensured))
            updates = () if self._update == DiskUpdate() else (self._update,)
            for update in (*updates, *self._adapters.values()):
                self._process.call("prepare", update)
                self._process.call_in_order("switch")
        self._grow_together()

    def _check_wanted(self) -> None:
        if self._is_given_up:
            raise EngineClosedError("the engine was closed while its process was restarting")

    def give_up(self) -> None:
        self._is_given_up = True
        if self._gate is not None:
            self._gate.close()
        if self._restarting.locked():
            self._process.kill()

    def close(self) -> None:
        self._is_closed = True
        self._process.end()

    # Weights.

    @property
    def has_draft(self) -> bool:
        return self._started.has_draft

    @property
    def draft_is_in_target(self) -> bool:
        return self._started.draft_is_in_target

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        if isinstance(update, ArrayUpdate):
            arrays = {name: np.asarray(array) for name, array in update.arrays.items()}
            update = replace(update, arrays=arrays)
        self._process.call("prepare", update)
        return update

    def switch(self, prepared: WeightUpdate) -> None:
        self._process.call_in_order("switch")
        if isinstance(prepared, AdapterUpdate):
            self._adapters.pop(prepared.slot, None)
            if prepared.path is not None:
                self._adapters[prepared.slot] = prepared
            return
        if isinstance(prepared, ArrayUpdate):
            self._has_arrays = True
            return
        target, draft = prepared.target, prepared.draft
        is_whole = target is not None and (draft is not None or not self.has_draft)
        self._has_arrays = self._has_arrays and not is_whole
        self._update = DiskUpdate(
            target=target or self._update.target, draft=draft or self._update.draft
        )

    def tensor(self, name: str, model: Model | None) -> Any:
        return self._process.call("tensor", name, model)

    def expert_counts(self) -> np.ndarray:
        counts: np.ndarray = self._process.call("expert_counts")
        return counts

    # Profiles.

    def start_profile(self, directory: str) -> None:
        self._process.call("start_profile", os.path.abspath(directory))

    def stop_profile(self) -> str:
        directory: str = self._process.call("stop_profile")
        return directory


class Ends:
    def __init__(self) -> None:
        self.tell: Callable[[str], None] = lambda _: None

    def __call__(self, why: str) -> None:
        self.tell(why)


class ProcessProfiler:
    def __init__(self, runner: ProcessRunner) -> None:
        self._runner = runner

    def start(self, directory: str) -> None:
        try:
            self._runner.start_profile(directory)
        except RunnerError as error:
            raise RequestError("no profile can be taken", f": {error}") from error

    def stop(self) -> str:
        try:
            return self._runner.stop_profile()
        except RunnerError as error:
            raise RequestError("no profile can be taken", f": {error}") from error
