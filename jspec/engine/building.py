"""From arguments to a runner that is ready: cache, devices, weights, sizes, programs."""

from __future__ import annotations

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


def build_runner(args: EngineArgs, *, progress: Progress | None) -> DeviceRunner:
    """Loads, sizes and compiles. Raises ConfigError and CheckpointError for what cannot be."""
    cache = args.compilation_cache_dir
    if cache is None:
        cache = str(Path.home() / ".cache" / "jspec" / "programs")
    store = None
    if cache:
        enable_persistent_cache(Path(cache))
        store = ProgramStore(Path(cache) / "steps")
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
