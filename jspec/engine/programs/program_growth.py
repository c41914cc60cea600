"""Programs missing at the start, which are built while the engine serves.

Lowering holds the GIL for seconds, so a separate process does it and writes to the program store; a
thread here loads the results. Without a second process (a TPU serves one) or a store, a thread
builds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import jax
from jax.sharding import Mesh

from jspec.device import hosts
from jspec.device.parallel import Parallel
from jspec.engine.programs.compilation import Recipe, compile_all
from jspec.engine.programs.program_bucket import ProgramBucket
from jspec.engine.programs.program_store import SETTINGS, ProgramStore
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import JspecError

log = logging.getLogger(__name__)

MODULE = "jspec.engine.programs.build_programs"
PACKAGE_ROOT = Path(__file__).resolve().parents[3]
# On a GPU the builder needs memory only for autotuning scratch, from what the engine left free.
DEVICE_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
PLATFORM_SETTINGS = ("jax_platforms", "jax_num_cpu_devices")
PAUSE_SECONDS = 0.05  # between two programs made in this process
STOP_SECONDS = 5.0  # a compiler running in this process cannot be interrupted
REASON_CHARS = 300

Made = tuple[ProgramKey, Any]


class BuildError(JspecError):
    """Raised when programs could not be built in the background; the engine is unharmed."""


class Maker(Protocol):
    """Makes executables one after another. Raises BuildError for one that it cannot make."""

    def __iter__(self) -> Iterator[Made]: ...

    def stop(self) -> None:
        """End the iteration soon, even before its start. Thread-safe and idempotent."""
        ...


class ProgramGrowth:
    """A thread that hands programs from `maker`, num_later of num_wanted, to a runner."""

    def __init__(self, maker: Maker, *, num_wanted: int, num_later: int, started: float) -> None:
        self.num_wanted = num_wanted
        self._maker = maker
        self._num_later = num_later
        self._started = started
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, find_add: Callable[[], Callable[[ProgramKey, Any], None] | None]) -> None:
        """Start. find_add: returns the function that takes a program, or None to stop."""
        ready = self.num_wanted - self._num_later
        log.info("ready with %d of %d programs, the rest is being built", ready, self.num_wanted)
        self._thread = threading.Thread(
            target=self._run, args=(find_add,), name="jspec-programs", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        self._is_stopped.set()
        self._maker.stop()

    def stop(self) -> None:
        self.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _run(self, find_add: Callable[[], Callable[[ProgramKey, Any], None] | None]) -> None:
        missing, reason = self._num_later, "the builder ended early"
        try:
            for key, executable in self._maker:
                add = None if self._is_stopped.is_set() else find_add()
                if add is None:
                    return
                add(key, executable)
                missing -= 1
                if not missing:
                    seconds = time.monotonic() - self._started
                    log.info("all %d programs are ready after %.1f s", self.num_wanted, seconds)
                    return
        except Exception as error:  # any compiler or file error: other programs serve
            reason = str(error) if isinstance(error, BuildError) else repr(error)
        finally:
            self._maker.stop()
        if not self._is_stopped.is_set():
            log.warning(
                "%d of %d programs could not be built, the others serve all requests: %s",
                missing,
                self.num_wanted,
                reason,
            )


def maker_of(
    recipe: Recipe, keys: tuple[ProgramKey, ...], *, mesh: Mesh, store: ProgramStore | None
) -> Maker:
    paths = recipe.paths(keys, mesh=mesh, store=store)
    is_apart = hosts.is_one_process(mesh) and mesh.devices.flat[0].platform != "tpu"
    if store is None or not paths or not is_apart:
        return ThreadMaker(recipe, keys, mesh=mesh, store=store)
    task = BuildTask(
        recipe=recipe,
        paths=paths,
        directory=store.directory,
        bucket=store.bucket,
        parallel=Parallel.of(mesh),
        device_ids=tuple(device.id for device in mesh.devices.flat),
        settings=settings_of((*SETTINGS, *PLATFORM_SETTINGS)),
    )
    return ProcessMaker(task, mesh=mesh)


def settings_of(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in names if hasattr(jax.config, name)}


class ThreadMaker:
    def __init__(
        self,
        recipe: Recipe,
        keys: tuple[ProgramKey, ...],
        *,
        mesh: Mesh,
        store: ProgramStore | None,
    ) -> None:
        self._recipe = recipe
        self._keys = keys
        self._mesh = mesh
        self._store = store
        self._settings = settings_of(SETTINGS)
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        self._is_stopped.set()

    def __iter__(self) -> Iterator[Made]:
        # a jax context manager sets its own thread only
        if settings_of(SETTINGS) != self._settings:
            raise BuildError(
                f"the engine was started with {self._settings} set for its own thread only; "
                f"expected jax.config.update, which sets all threads"
            )
        recipe = self._recipe
        for key in self._keys:
            if self._is_stopped.wait(PAUSE_SECONDS):
                return
            made = compile_all(
                recipe.program,
                recipe.limits,
                mesh=self._mesh,
                params=recipe.params,
                state=recipe.state,
                keys=(key,),
                store=self._store,
            )
            yield key, made[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTask:
    """The input of the building process, which must derive the same `paths`."""

    recipe: Recipe
    paths: dict[ProgramKey, Path]
    directory: Path
    bucket: ProgramBucket | None
    parallel: Parallel
    device_ids: tuple[int, ...]
    settings: dict[str, Any]


class ProcessMaker:
    def __init__(self, task: BuildTask, *, mesh: Mesh) -> None:
        self.task = task
        self._mesh = mesh
        self._lock = threading.RLock()  # reentrant, since a finalizer on this thread may call stop
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    @property
    def process_id(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()  # the store's files are written whole or not at all

    def __iter__(self) -> Iterator[Made]:
        by_name = {str(key): key for key in self.task.paths}
        with tempfile.TemporaryFile() as errors:
            process = self._start(errors)
            if process is None:
                return
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                tell(process.stdin, self.task)
                for line in process.stdout:
                    key = by_name.get(line.decode(errors="replace").strip())
                    made = None if key is None else self._load(key)
                    if key is not None and made is not None:
                        yield key, made
                if process.wait() and not self._is_stopped:
                    raise BuildError(f"{MODULE} ended with {process.returncode}: {tail(errors)}")
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                close_quietly(process.stdin)

    def _load(self, key: ProgramKey) -> Any | None:
        return self.task.recipe.load(key, self.task.paths[key], mesh=self._mesh)

    def _start(self, errors: IO[bytes]) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if not self._is_stopped:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=child_environment() | DEVICE_MEMORY,
                    # Ctrl-C reaches only this process, which stops the builder
                    start_new_session=True,
                )
            return self._process


def child_environment() -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}


def tell(to: IO[bytes], task: BuildTask) -> None:
    """Send the task and keep the pipe open. If the process ended early, its status shows it."""
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(task, to)
        to.flush()


def close_quietly(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split()
    return " ".join(lines)[-REASON_CHARS:]
