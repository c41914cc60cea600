"""Build a ready runner from arguments: compilation cache, devices, weights, sizes, programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.device import hosts
from jspec.device.parallel import Parallel, devices_of_rank
from jspec.engine import interrupts
from jspec.engine.memory.device_memory import least_memory
from jspec.engine.memory.memory_report import check_scratch_fits, held_bytes, scratch_bytes
from jspec.engine.memory.pool_sizes import sharing_limits, size_pool
from jspec.engine.programs.compilation import Progress, Recipe, enable_persistent_cache
from jspec.engine.programs.program_bucket import GS, ProgramBucket
from jspec.engine.programs.program_growth import ProgramGrowth, maker_of
from jspec.engine.programs.program_keys import later_programs, program_keys, programs_at_start
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.programs.trusted_files import distrust
from jspec.engine.runner import DeviceRunner, exchange_of
from jspec.engine.weights.loading import LoadedModels, ModelPaths, load_models, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import ConfigError, clear_frames
from jspec.spec.expert_shards import most_experts
from jspec.spec.hidden_rows import HiddenRows
from jspec.speculative.step import StepProgram

log = logging.getLogger(__name__)


class Load(Protocol):
    def __call__(self, args: EngineArgs, paths: ModelPaths, /, *, mesh: Mesh) -> LoadedModels: ...


def build_runner(
    args: EngineArgs, *, progress: Progress | None, load: Load = load_models
) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
    """Return a runner with its resolved config and its weights.

    Loads weights, sizes the pools and compiles the programs needed at the start. load: replaces
    `load_models` for drafters without a registry entry. Raises ConfigError and CheckpointError with
    cleared frames: a kept error must not keep weights, state or programs alive.
    """
    try:
        return _build_runner(args, progress=progress, load=load)
    except BaseException as error:
        clear_frames(error)
        raise


def _build_runner(
    args: EngineArgs, *, progress: Progress | None, load: Load
) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
    started = time.monotonic()
    store = _open_store(args.compilation_cache_dir)
    args = replace(args, compilation_cache_dir=_kept_in(store))
    expert = args.ep_size // args.expert_ranks
    parallel = Parallel(data=args.dp_size, expert=expert, tensor=args.rank_size // expert)
    mesh = parallel.mesh(_devices(args))
    devices = devices_of_rank(mesh)  # memory use is the same on each rank
    interrupts.check()
    hosts.check_served(mesh)
    models = load(args, resolve_paths(args), mesh=mesh)
    interrupts.check()
    limits = _limits_of(models, devices)
    config = replace(models.config, max_total_tokens=limits.max_total_tokens)
    program = StepProgram(
        target=models.target, drafter=models.drafter, draft_shape=limits.draft_shape
    )
    runner = DeviceRunner.create(
        program=program,
        limits=limits,
        params=models.params,
        mesh=mesh,
        kv_dtype=jnp.dtype(config.dtype),
        progress=progress,
        first=programs_at_start(limits, config.compile_at_start),
        store=store,
        exchange=None if args.disable_custom_all_reduce else exchange_of(program, mesh),
    )
    if least_memory(mesh.local_devices) is not None:
        check_scratch_fits(
            mesh.local_devices,
            scratch_bytes(runner.executables),
            held=held_bytes(runner.params, runner.state, shares=models.source.shares),
            fraction=config.mem_fraction_static,
        )
    later = later_programs(limits, runner.ready_programs)
    recipe = Recipe.of(program, limits, params=models.params, state=runner.state)
    if later and hosts.is_one_process(mesh):  # several hosts build together (`ensure`)
        maker = maker_of(recipe, later, mesh=mesh, store=store)
        wanted = len(program_keys(limits))
        runner.grow(ProgramGrowth(maker, num_wanted=wanted, num_later=len(later), started=started))
    runner.make_on_demand(partial(maker_of, recipe, mesh=mesh, store=store))
    weights = ServedWeights(replace(models, params={}), runner, mesh=mesh)
    return runner, config, weights


def _limits_of(models: LoadedModels, devices: Sequence[jax.Device]) -> ServeLimits:
    target_bytes, draft_bytes = held_bytes(models.params, shares=models.source.shares).values()
    limits = size_pool(
        models.config,
        models.target.cache_groups + models.drafter.cache_groups,
        devices=hosts.memories(devices),
        ops=models.target.ops,
        weights={"target_bytes": target_bytes, "draft_bytes": draft_bytes},
    )
    programs = replace(
        limits.programs,
        vocab_size=models.target.vocab_size,
        hidden=HiddenRows.of(models.target.spec.hidden_size, models.config.dtype),
        sharing=sharing_limits(models.config, models.target.spec, models.target.ops),
        has_loras=models.target.lora is not None,
        counted_experts=_counted_experts(models),
    )
    return replace(limits, programs=programs)


def _counted_experts(models: LoadedModels) -> tuple[int, int] | None:
    spec = models.target.spec
    if models.config.expert_distribution_recorder_mode is None:
        return None
    return spec.num_layers, most_experts(spec)


def _devices(args: EngineArgs) -> list[jax.Device]:
    available = jax.devices()
    needed = args.dp_size * args.rank_size
    if (num_hosts := jax.process_count()) > 1:
        own, share = jax.local_device_count(), needed // num_hosts
        if share > own:
            raise ConfigError(
                f"tp_size is {args.tp_size} over {num_hosts} hosts; expected at most "
                f"{own * num_hosts}: "
                f"host {jax.process_index()} has {own} {available[0].platform} devices"
            )
        each = [[x for x in available if x.process_index == i] for i in range(num_hosts)]
        return [device for found in each for device in found[:share]]
    if needed > len(available):
        multiplied = args.dp_size > 1 and not args.enable_dp_attention
        found = f"tp_size is {args.tp_size}"
        if multiplied:
            found = f"dp_size {args.dp_size} times tp_size {args.tp_size} is {needed}"
        raise ConfigError(
            f"{found}; expected at most {len(available)}, the number of "
            f"{available[0].platform} devices"
        )
    return available[:needed]


def _open_store(named: str | None) -> ProgramStore | None:
    """Open the directory of compiled programs, for jax's cache and ours; None for "".

    Raises ConfigError for an unusable named directory; an unusable or shared default is ignored
    with a warning.
    """
    if named == "":
        return None
    bucket = ProgramBucket.named(named) if named and named.startswith(GS) else None
    try:
        directory = Path(named) if named else Path.home() / ".cache" / "jspec" / "programs"
        directory = directory if bucket is None else bucket.directory
        steps = directory / "steps"
        for folder in (directory, steps):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if why := distrust(folder.stat()):
                log.warning(
                    "compiled programs are neither read nor kept: %s %s; expected a folder of this "
                    "user or root that no other user may write",
                    *(folder, why),
                )
                return None
        enable_persistent_cache(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: home is unknown
        if named:
            raise ConfigError(
                f"compilation_cache_dir is {named!r}; expected a directory to write to ({error})"
            ) from error
        log.warning("compiled programs are not kept: %s", error)
        return None
    return ProgramStore.open(steps, bucket)


def _kept_in(store: ProgramStore | None) -> str:
    if store is None:
        return ""
    return str(store.directory.parent) if store.bucket is None else store.bucket.url
