"""From arguments to a runner that is ready: cache, devices, weights, sizes, programs."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from jspec.core import sharding
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import ConfigError
from jspec.engine.compilation import Progress, enable_persistent_cache
from jspec.engine.loading import load_models, resolve_paths
from jspec.engine.memory import resolve_dtype, resolve_limits
from jspec.engine.program_store import ProgramStore
from jspec.engine.runner import DeviceRunner
from jspec.speculative.step import StepProgram

log = logging.getLogger(__name__)


def build_runner(args: EngineArgs, *, progress: Progress | None) -> DeviceRunner:
    """Loads, sizes and compiles. Raises ConfigError and CheckpointError for what cannot be."""
    store = _open_store(args.compilation_cache_dir)
    available = jax.devices()
    if args.tp_size > len(available):
        raise ConfigError(
            f"tp_size is {args.tp_size}; expected at most {len(available)}, the number of "
            f"{available[0].platform} devices"
        )
    devices = available[: args.tp_size]
    mesh = sharding.make_mesh(devices)
    dtype = resolve_dtype(args.dtype, devices[0].platform)
    models = load_models(args, resolve_paths(args), mesh=mesh, dtype=dtype)
    spec = args.speculative
    limits = resolve_limits(
        args,
        models.target_config,
        devices=devices,
        dtype=dtype,
        draft=models.draft_layer,
        backend=models.backend,
    )
    program = StepProgram(
        target=models.target,
        drafter=models.drafter,
        spec=spec,
        full=False,
        backend=models.backend,
    )
    return DeviceRunner.create(
        program=program,
        limits=limits,
        params=models.params,
        mesh=mesh,
        kv_dtype=dtype,
        progress=progress,
        store=store,
    )


def _open_store(named: str | None) -> ProgramStore | None:
    """The directory of compiled programs, for jax's cache and ours; None for "" (keep none).

    Raises ConfigError for a named directory that cannot be one. Without a usable home nothing is
    kept, and a warning says so.
    """
    if named == "":
        return None
    try:
        directory = Path(named) if named else Path.home() / ".cache" / "jspec" / "programs"
        enable_persistent_cache(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        if named:
            raise ConfigError(
                f"compilation_cache_dir is {named!r}; expected a directory to write to ({error})"
            ) from error
        log.warning("compiled programs are not kept: %s", error)
        return None
    return ProgramStore.open(directory / "steps")
