"""Ahead-of-time compilation of an engine's programs, so that a dispatch never compiles."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jspec.config.limits import ServeLimits
from jspec.device import hosts
from jspec.device.fp8 import FP8Weight
from jspec.device.parallel import Parallel, shardings
from jspec.device.state import state_specs
from jspec.engine import interrupts
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.steps.step_def import BY_RANK, ProgramKey, ProgramShape
from jspec.engine.steps.table import STEPS
from jspec.engine.transfer import shape_of
from jspec.layers.linear import sharing, with_peers
from jspec.models import placement
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.step import StepProgram

# (programs done, total, program name, "compiled" or "loaded" from the ProgramStore)
Progress = Callable[[int, int, str, str], None]
POLL_SECONDS = 0.2


def enable_persistent_cache(directory: Path) -> None:
    """Keep compiled programs on disk, so that the next start only loads them. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # jax opens a directory once and would stay with the first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def lower(
    shape: ProgramShape,
    program: StepProgram,
    *,
    mesh: Mesh,
    params: Any,
    state: Any,
) -> jax.stages.Lowered:
    """Lower one program for the shapes and shardings of `params` and `state` (may be abstract)."""
    params, state = _abstract(params), _abstract(state)
    jitted = _jitted(shape, program, mesh=mesh, params=params, state=state)
    return jitted.lower(params, state, *_arrays(shape, program, mesh, params, state))


def _arrays(
    shape: ProgramShape, program: StepProgram, mesh: Mesh, params: Any, state: Any
) -> list[Any]:
    arrays: list[Any] = [
        jax.ShapeDtypeStruct((Parallel.of(mesh).data, shape.packed.size), np.int32)
    ]
    for giver in shape.takes:
        jitted = _jitted(giver, program, mesh=mesh, params=params, state=state)
        taken = _arrays(giver, program, mesh, params, state)
        arrays.append(jax.eval_shape(jitted, params, state, *taken)[1])
    return arrays


def _jitted(
    shape: ProgramShape, program: StepProgram, *, mesh: Mesh, params: Any, state: Any
) -> Any:
    step, tables = STEPS[shape.kind], program.tables
    in_specs = (
        placement.param_specs(tables, params),
        state_specs(state, program.target.cache_groups, program.drafter.cache_groups),
        BY_RANK,
        *(STEPS[kind].gives for kind in step.takes),
    )
    mapped = jax.shard_map(
        of_rank(partial(_entry, program, shape)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(in_specs[1], step.gives),
        check_vma=False,
    )
    to_shardings = partial(shardings, mesh)
    return jax.jit(
        mapped,
        in_shardings=(
            placement.param_places(mesh, tables, params, column_major=program.ops.column_major),
            *(to_shardings(specs) for specs in in_specs[1:]),
        ),
        out_shardings=(to_shardings(in_specs[1]), to_shardings(step.gives)),
        donate_argnums=(1,),
    )


def _entry(
    program: StepProgram, shape: ProgramShape, params: Any, state: Any, flat: jax.Array, *taken: Any
) -> Any:
    step = STEPS[shape.kind]
    params, program = with_peers(params, state.peers), sharing(program, state.peers)
    rounds = {"num_rounds": shape.num_rounds} if step.has_rounds else {}
    batch = step.batch(shape.packed.unpack(flat))
    return step.step(program, params, state, batch, *taken, **rounds)


def of_rank(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Run an entry in a shard_map, on its data rank's part of the arrays after params and state."""
    # Arrays without elements are returned as new arrays, since jaxlib 0.11.2 crashes while it
    # compiles a program over several devices that returns such an array unchanged.

    def run(params: Any, state: Any, *arrays: Any) -> Any:
        own = jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), arrays)
        state, output = entry(params, state, *own)
        state = jax.tree.map(lambda x: x if x.size else jnp.zeros_like(x), state)
        return state, jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), output)

    return run


def compiler_options(
    key: ProgramKey,
    limits: ServeLimits,
    *,
    platform: str,
    ops: Ops,
    has_fp8: bool = False,  # some weights are in fp8
) -> dict[str, Any]:
    """Return XLA options that differ from the defaults, including those of the kernels.

    On a GPU these passes are disabled, each because of a measurement:

    rematerialization: it counts a donated pool twice and computes whole products a second time
    dot-strength-reduction, in decoding: a product of one row and fewer than ten million weights
        becomes a multiplication that writes one value per weight and a sum that reads them again
        (`out` of Qwen3-30B-A3B, 4096 x 2048)
    dot-merger, in decoding: it joins products of one array by copying their weights side by side
        in every step (of a delta net's three 101 MB, 53 us of 270; of a DFlash draft of five
        layers, whose K and V are products of the same features, 1 to 2% of a step)
    """
    if platform == "cpu":
        return {}
    is_decode = STEPS[key.kind].is_decode
    draft_shape = key.shape or limits.draft_shape
    tokens = key.bucket * draft_shape.num_draft_tokens if is_decode else None
    prompt_tokens = key.bucket if has_fp8 and not is_decode else 0
    options = ops.compiler_options(decode_tokens=tokens, fp8_prompt_tokens=prompt_tokens)
    if platform != "gpu":
        return options
    passes = ["rematerialization"]
    if is_decode:
        passes += ["dot-strength-reduction", "dot-merger"]
    return {"xla_disable_hlo_passes": ",".join(passes), **options}


def compile_with(lowered: jax.stages.Lowered, options: dict[str, Any]) -> Any:
    """Compile with those `options` that this compiler knows; all affect only speed."""
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None or unknown[1] not in options:
            raise
    kept = {name: value for name, value in options.items() if name != unknown[1]}
    return compile_with(lowered, kept)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All inputs of an engine's programs, with weights and state as shapes. It can be pickled, and
    gives the same ProgramStore names in every process with the same environment."""

    program: StepProgram
    limits: ServeLimits
    params: Any  # a tree of jax.ShapeDtypeStruct
    state: Any

    @classmethod
    def of(cls, program: StepProgram, limits: ServeLimits, *, params: Any, state: Any) -> Recipe:
        """Make a recipe. params, state: arrays, of which none is kept, or abstract ones."""
        return cls(program=program, limits=limits, params=_abstract(params), state=_abstract(state))

    def parts(self, key: ProgramKey, *, mesh: Mesh) -> tuple[ProgramShape, Any, dict[str, Any]]:
        platform = mesh.devices.flat[0].platform
        weights = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, FP8Weight))
        has_fp8 = any(isinstance(x, FP8Weight) and len(x.shape) == 2 for x in weights)
        how: dict[str, Any] = {
            "ops": self.program.ops,
            "has_fp8": has_fp8,
        }
        options = compiler_options(key, self.limits, platform=platform, **how)
        if platform == "gpu" and not hosts.is_one_process(mesh):
            options["xla_gpu_shard_autotuning"] = False  # another host may have it in its store
        draft_shape = key.shape or self.program.draft_shape
        variant = dataclasses.replace(self.program, options=key.options, draft_shape=draft_shape)
        return shape_of(key, self.limits), variant, options

    def paths(
        self, keys: Iterable[ProgramKey], *, mesh: Mesh, store: ProgramStore | None
    ) -> dict[ProgramKey, Path]:
        if store is None:
            return {}
        makings = {key: self.parts(key, mesh=mesh) for key in keys}
        return store.paths(makings, mesh=mesh, arrays=(self.params, self.state))

    def load(self, key: ProgramKey, path: Path, *, mesh: Mesh) -> Any | None:
        step = STEPS[key.kind]
        taken = (STEPS[kind].gives for kind in step.takes)
        inputs, outputs = (self.params, self.state, 0, *taken), (self.state, step.gives)
        return ProgramStore.load(path, mesh=mesh, inputs=inputs, outputs=outputs)


def compile_all(
    program: StepProgram,
    limits: ServeLimits,
    *,
    mesh: Mesh,
    params: Any,
    state: Any,
    progress: Progress | None = None,
    keys: tuple[ProgramKey, ...] | None = None,
    first: tuple[ProgramKey, ...] | None = None,
    store: ProgramStore | None = None,
) -> dict[ProgramKey, Any]:
    """Return the executables of `keys` (None: all that an engine wants).

    Programs in `store` are loaded; the others are compiled, several at once (with `first`, only
    those in it). They are lowered one at a time, in order: a Pallas kernel's text contains how many
    came before it, so in another order jax's cache would not recognize it.
    """
    # An error of this start must not keep weights alive.
    recipe = Recipe.of(program, limits, params=params, state=state)
    params = state = None
    keys = program_keys(limits) if keys is None else keys
    paths = recipe.paths(dict.fromkeys((*keys, *(first or ()))), mesh=mesh, store=store)
    if first is not None and not hosts.is_one_process(mesh):
        keys = first  # the other programs in the stores may differ between hosts
    elif first is not None:
        stored = (key for key in keys if key in paths and paths[key].exists())
        keys = tuple(dict.fromkeys((*first, *stored)))
    making = _Making(recipe, keys, paths, mesh=mesh, store=store, progress=progress)
    workers = min(len(keys), os.cpu_count() or 1)
    with without_jax_cache(is_off=bool(paths)), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            _wait([pool.submit(making.load, key) for key in keys if key in paths])
            running = []
            for key in keys:
                interrupts.check()
                if key not in making.made:
                    running.append(pool.submit(making.build, key, *making.lower(key)))
            _wait(running)
            return {key: making.made[key] for key in keys}
        except BaseException:
            pool.shutdown(cancel_futures=True)  # do not wait for the others after a failure
            making.made.clear()  # a kept error must not keep programs alive
            raise


class _Making:
    def __init__(
        self,
        recipe: Recipe,
        keys: tuple[ProgramKey, ...],
        paths: dict[ProgramKey, Path],
        *,
        mesh: Mesh,
        store: ProgramStore | None,
        progress: Progress | None,
    ) -> None:
        self.made: dict[ProgramKey, Any] = {}
        self._recipe = recipe
        self._num_wanted = len(keys)
        self._paths = paths
        self._mesh = mesh
        self._store = store
        self._progress = progress
        self._done = itertools.count(1)

    def load(self, key: ProgramKey) -> None:
        if self._store is not None:
            self._store.fetch(self._paths[key])
        found = self._recipe.load(key, self._paths[key], mesh=self._mesh)
        if found is not None:
            self._keep(key, found, "loaded")

    def lower(self, key: ProgramKey) -> tuple[jax.stages.Lowered, dict[str, Any]]:
        recipe, mesh = self._recipe, self._mesh
        shape, variant, options = recipe.parts(key, mesh=mesh)
        return lower(shape, variant, mesh=mesh, params=recipe.params, state=recipe.state), options

    def build(self, key: ProgramKey, lowered: jax.stages.Lowered, options: dict[str, Any]) -> None:
        executable = compile_with(lowered, options)
        if self._store is not None and key in self._paths:
            self._store.save(self._paths[key], executable)
        self._keep(key, executable, "compiled")

    def _keep(self, key: ProgramKey, executable: Any, how: str) -> None:
        self.made[key] = executable
        if self._progress is not None:
            self._progress(next(self._done), self._num_wanted, str(key), how)


def _wait(futures: list[Future[None]]) -> None:
    """Wait for all and raise the first error. Polls, to notice an interrupt that was lost."""
    for future in futures:
        while not future.done():
            wait((future,), timeout=POLL_SECONDS)
            interrupts.check()
        future.result()


# jax has one switch per process, so engines that turn it off compile one after another.
_SWITCH = threading.Lock()


@contextmanager
def without_jax_cache(*, is_off: bool) -> Iterator[None]:
    """Turn off jax's cache if `is_off`: its executables cannot always be serialized again."""
    if not is_off:
        yield
        return
    with _SWITCH:
        settings: Any = jax.config
        was_on = settings.jax_enable_compilation_cache
        _use_jax_cache(False)
        try:
            yield
        finally:
            _use_jax_cache(was_on)


def _use_jax_cache(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    compilation_cache.reset_cache()  # jax decides once whether it has a cache
