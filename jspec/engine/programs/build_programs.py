"""The process that fills the program store for an engine.

Run as `python -m jspec.engine.programs.build_programs`. It reads a BuildTask from standard input,
writes the name of each stored program, and exits when standard input closes.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import IO

import jax

from jspec.engine.gc_control import collect_seldom
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_growth import BuildTask
from jspec.engine.programs.program_store import ProgramStore
from jspec.errors import ConfigError

NICE = 10  # serving has priority


def build(task: BuildTask, *, progress: IO[str]) -> None:
    """Compile and store a task's programs. Raises ConfigError if the engine's would differ."""
    for name, value in task.settings.items():
        jax.config.update(name, value)
    devices = {device.id: device for device in jax.devices()}
    missing = [i for i in task.device_ids if i not in devices]
    if missing:
        raise ConfigError(f"devices {missing} are not among {sorted(devices)} here")
    mesh = task.parallel.mesh([devices[i] for i in task.device_ids])
    store = ProgramStore.open(task.directory, task.bucket)
    recipe, keys = task.recipe, tuple(task.paths)
    if recipe.paths(keys, mesh=mesh, store=store) != task.paths:
        raise ConfigError(
            "programs would be stored under other names than the engine's; expected the same "
            "sources, libraries, settings and devices"
        )

    def say(_done: int, _total: int, what: str, _how: str) -> None:
        progress.write(f"{what}\n")
        progress.flush()

    compile_all(
        recipe.program,
        recipe.limits,
        mesh=mesh,
        params=recipe.params,
        state=recipe.state,
        keys=keys,
        store=store,
        progress=say,
    )


def end_with(source: int) -> None:
    while os.read(source, 1):
        pass
    os._exit(0)


def main() -> int:
    if hasattr(os, "nice"):
        os.nice(NICE)
    collect_seldom()
    task = pickle.load(sys.stdin.buffer)
    source = os.dup(sys.stdin.fileno())
    threading.Thread(target=end_with, args=(source,), daemon=True).start()
    # Only program names may reach the pipe; other prints, also of libraries, go to stderr.
    progress = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    build(task, progress=progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
