"""Compiling every program of an engine before it serves.

All shapes are known at the start, so all programs are compiled ahead of time, several at once, and
the runner holds executables: nothing can compile later, and a wrong shape is an error.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, PartitionSpec

from jspec.core import sharding
from jspec.core.batch import DecodeBatch, PrefillBatch
from jspec.core.config import ServeLimits
from jspec.core.layout import PackedLayout
from jspec.core.plan import StepKind
from jspec.engine.program_store import ProgramStore
from jspec.engine.transfer import ProgramKey, layout_of
from jspec.pallas_kernels.paged_attention import Backend
from jspec.speculative.step import StepProgram, prefill_step, speculative_rounds

Progress = Callable[[int, int, str], None]

# Tokens of a step, and what its products want, by whole steps of Llama-3.1-8B on an H200 (ms):
#   64    without Triton 6.95, by default 7.24      128   7.13 and 7.26
#   256   without XLA's split sums 10.74, by default 10.94
#   1, 8, 32, 1,024   the default is best, or no worse
WITHOUT_TRITON, WITHOUT_SPLITS = range(48, 129), range(129, 513)


def enable_persistent_cache(directory: Path) -> None:
    """Keeps compiled programs on disk, so that the next start only loads them. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # jax opens a directory once, and would keep to the first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def program_keys(limits: ServeLimits) -> tuple[ProgramKey, ...]:
    """Every program: decode in two variants a bucket, prefill in one."""
    decode = [
        (StepKind.DECODE, batch, full) for batch in limits.decode_buckets for full in (False, True)
    ]
    prefill = [(StepKind.PREFILL, tokens, True) for tokens in limits.prefill_buckets]
    return (*prefill, *decode)


def describe(key: ProgramKey) -> str:
    kind, bucket, full = key
    if kind is StepKind.PREFILL:
        return f"prefill T={bucket}"
    return f"decode B={bucket}{' full' if full else ''}"


def _decode_entry(
    program: StepProgram,
    packed: PackedLayout,
    params: Any,
    state: Any,
    flat: jax.Array,
    *,
    num_rounds: int,
) -> Any:
    batch = DecodeBatch(**packed.unpack(flat))
    return speculative_rounds(program, params, state, batch, num_rounds=num_rounds)


def _prefill_entry(
    program: StepProgram, packed: PackedLayout, params: Any, state: Any, flat: jax.Array
) -> Any:
    return prefill_step(program, params, state, PrefillBatch(**packed.unpack(flat)))


def lower(
    key: ProgramKey,
    program: StepProgram,
    limits: ServeLimits,
    *,
    mesh: Mesh,
    params: Any,
    state: Any,
) -> jax.stages.Lowered:
    """Lowers one program for the shapes and shardings of `params` and `state` (may be abstract)."""
    entry = _prefill_entry
    if key[0] is StepKind.DECODE:
        entry = partial(_decode_entry, num_rounds=limits.num_rounds)
    packed = layout_of(key, limits)
    in_specs = (sharding.param_specs(params), sharding.state_specs(state), PartitionSpec())
    step = jax.shard_map(
        partial(entry, program, packed),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(in_specs[1], PartitionSpec()),
        check_vma=False,
    )
    to_shardings = partial(sharding.shardings, mesh)
    jitted = jax.jit(
        step,
        in_shardings=(
            sharding.param_places(mesh, params, by_columns=program.target.by_columns),
            *(to_shardings(specs) for specs in in_specs[1:]),
        ),
        out_shardings=(to_shardings(in_specs[1]), to_shardings(PartitionSpec())),
        donate_argnums=(1,),
    )
    flat = jax.ShapeDtypeStruct((packed.size,), np.int32)
    return jitted.lower(_abstract(params), _abstract(state), flat)


def compiler_options(
    key: ProgramKey, limits: ServeLimits, *, platform: str, backend: Backend
) -> dict[str, Any]:
    """What XLA is told beside its defaults, where a measurement or a compiled program says so.

    On a GPU: no rematerialization (it counts a donated pool twice, finds no memory, and computes
    whole products a second time). Decoding with the Hopper kernels, for some widths other products:
    a product in splits is faster by itself, but not with the kernel that then adds them up.
    """
    if platform != "gpu":
        return {}
    options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    kind, bucket, _ = key
    tokens = bucket * limits.spec.num_draft_tokens
    if kind is not StepKind.DECODE or backend != "gpu":
        return options
    if tokens in WITHOUT_TRITON:
        options["xla_gpu_enable_triton_gemm"] = False
    if tokens in WITHOUT_SPLITS:
        options["xla_gpu_experimental_force_split_k"] = 1
    return options


def compile_with(lowered: jax.stages.Lowered, options: dict[str, Any]) -> Any:
    """Compiles with those of `options` that this compiler knows: they are for speed alone, and
    XLA may drop one of them with any release."""
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


def compile_all(
    programs: dict[bool, StepProgram],
    limits: ServeLimits,
    *,
    mesh: Mesh,
    params: Any,
    state: Any,
    progress: Progress | None = None,
    keys: tuple[ProgramKey, ...] | None = None,
    store: ProgramStore | None = None,
) -> dict[ProgramKey, Any]:
    """Executables by key; `programs` maps `full` to its static program.

    Those that `store` has are loaded, several at once. The others are lowered one after the other,
    in order, and compiled several at once: a Pallas kernel's text holds where it was first traced
    from and how many came before it, so in any other order jax's cache would not know it again.
    Lowering holds Python's lock anyway.
    keys: which programs, all by default; a plan for one that was left out is a KeyError.
    """
    keys = program_keys(limits) if keys is None else keys
    platform = mesh.devices.flat[0].platform
    options = {
        key: compiler_options(key, limits, platform=platform, backend=programs[key[2]].backend)
        for key in keys
    }
    makings = {key: (key, programs[key[2]], limits, options[key]) for key in keys}
    paths = {} if store is None else store.paths(makings, mesh=mesh, arrays=(params, state))
    done = itertools.count(1)

    def report(key: ProgramKey, executable: Any) -> Any:
        if progress is not None:
            progress(next(done), len(keys), describe(key))
        return executable

    def load(key: ProgramKey) -> Any | None:
        inputs, outputs = (params, state, 0), (state, 0)
        found = ProgramStore.load(paths[key], mesh=mesh, inputs=inputs, outputs=outputs)
        return None if found is None else report(key, found)

    def build(key: ProgramKey, lowered: jax.stages.Lowered) -> Any:
        executable = compile_with(lowered, options[key])
        if store is not None and key in paths:
            store.save(paths[key], executable)
        return report(key, executable)

    workers = min(len(keys), os.cpu_count() or 1)
    with without_jax_cache(is_off=bool(paths)), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            found = dict(zip(paths, pool.map(load, paths), strict=True))
            running = {}
            for key in keys:
                if found.get(key) is None:
                    program = programs[key[2]]
                    lowered = lower(key, program, limits, mesh=mesh, params=params, state=state)
                    running[key] = pool.submit(build, key, lowered)
            return {key: running[key].result() if key in running else found[key] for key in keys}
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what failed should not wait for what did not
            raise


# jax has one switch for the whole process: one engine after the other compiles with it off.
_SWITCH = threading.Lock()


@contextmanager
def without_jax_cache(*, is_off: bool) -> Iterator[None]:
    """While programs are compiled that are kept by a ProgramStore: what jax's cache hands out
    cannot always be written again, and nothing needs to be kept twice."""
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
    compilation_cache.reset_cache()  # jax decides once whether it has one
