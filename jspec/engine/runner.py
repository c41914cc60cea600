"""The owner of device state: `dispatch` enqueues compiled steps of plans, `collect` returns results
in order. Each step consumes the state (donated) and its output replaces it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jspec.config.limits import ServeLimits
from jspec.device import hosts
from jspec.device.parallel import Parallel, shardings
from jspec.device.peers import Exchange
from jspec.device.state import EngineState, empty_caches, empty_rows, state_specs
from jspec.engine.expert_record import NOT_RECORDED, ExpertTotals
from jspec.engine.plan_runner import PlanRunner, ReadyPrograms
from jspec.engine.programs.compilation import Progress, compile_all
from jspec.engine.programs.program_growth import Maker, ProgramGrowth
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.steps.step_def import BY_RANK, ProgramKey
from jspec.engine.steps.table import STEPS
from jspec.engine.transfer import layout_of
from jspec.errors import EngineClosedError, InvariantError, RequestError
from jspec.messages.step_options import PLAIN, SAMPLING
from jspec.models.params import padded
from jspec.spec.cache_entry import CacheLayout, Unit
from jspec.spec.cache_groups import CacheGroup, snapshot_groups
from jspec.speculative.drafters.pending import empty_pending
from jspec.speculative.step import StepProgram

# Timings of a measured program, each of two runs as at overlap depth 1. The minimum is used, since
# other work of the host only adds time.
TIMED_PAIRS = 3
LOGGER = logging.getLogger("jspec.engine")


class DeviceRunner(PlanRunner):
    """Implements `messages.protocols.Runner` on jax devices."""

    def __init__(
        self,
        *,
        limits: ServeLimits,
        params: Any,  # {"target": ..., "draft": ...}, placed by `loading.place`
        state: EngineState,
        executables: dict[ProgramKey, Any],  # which can run every plan; others may be added
        mesh: Mesh,
        vocab_size: int,
        make_state: Callable[[], EngineState] | None = None,  # an empty one, for `restart`
    ) -> None:
        super().__init__(limits=limits, vocab_size=vocab_size, programs=executables)
        self._params = params
        self._state: EngineState | None = state
        self._make_state = make_state
        self._owning = threading.RLock()  # acquired to run or replace programs and state
        self._growth: ProgramGrowth | None = None
        self._maker_of: Callable[[tuple[ProgramKey, ...]], Maker] | None = None
        self._ensuring = threading.Lock()
        self._by_rank = NamedSharding(mesh, BY_RANK)
        # A CPU executable takes host arrays without device_put, which costs 0.2 ms. A GPU's does
        # too, but slower: a prefill of 128 tokens took 11% longer.
        self._is_cpu = mesh.devices.flat[0].platform == "cpu"
        self._num_programs = len(executables)
        self._expert_totals = ExpertTotals() if limits.programs.counted_experts else None

    @classmethod
    def create(
        cls,
        *,
        program: StepProgram,
        limits: ServeLimits,
        params: Any,
        mesh: Mesh,
        kv_dtype: Any,
        progress: Progress | None = None,
        first: tuple[ProgramKey, ...] | None = None,
        store: ProgramStore | None = None,
        exchange: Exchange | None = None,
    ) -> DeviceRunner:
        """Allocate the state; load stored programs and compile the others, or only `first`."""
        how: Any = {"mesh": mesh, "kv_dtype": kv_dtype, "exchange": exchange}
        make_state = partial(new_state, program, limits, **how)
        state = make_state()
        executables = compile_all(
            program,
            limits,
            mesh=mesh,
            params=params,
            state=state,
            progress=progress,
            first=first,
            store=store,
        )
        runner = cls(
            limits=limits,
            params=params,
            state=state,
            executables={},
            mesh=mesh,
            vocab_size=program.target.vocab_size,
            make_state=make_state,
        )
        for key, executable in executables.items():
            runner.add(key, executable)
        return runner

    def expert_counts(self) -> np.ndarray:
        if self._expert_totals is None:
            raise RequestError(NOT_RECORDED)
        with self._owning:  # the next step takes the array
            return self._expert_totals.add(np.array(self.state.expert_counts))

    @property
    def device_kind(self) -> str:
        return str(self._by_rank.mesh.devices.flat[0].device_kind)

    @property
    def executables(self) -> Mapping[ProgramKey, Any]:
        return self._programs.executables

    @property
    def num_programs(self) -> int:
        return self._num_programs

    @property
    def num_programs_wanted(self) -> int:
        return self._num_programs if self._growth is None else self._growth.num_wanted

    def add(self, key: ProgramKey, executable: Any) -> None:
        """Make a program ready. Thread-safe; after close() the program is dropped. If shapes are
        adaptive, a decode is timed first, while steps wait."""
        with self._owning:
            if self._state is not None:
                seconds = self._step_seconds(key, executable)
                self._programs = self._programs.with_program(key, executable, seconds)
                self._num_programs = len(self._programs.executables)

    def _step_seconds(self, key: ProgramKey, executable: Any) -> float | None:
        """Return the seconds of a step of dummy rows; None if no chooser needs it or it fails."""
        is_chosen = STEPS[key.kind].is_timed and key.options in (PLAIN, SAMPLING)
        if not (is_chosen and self._limits.other_shapes):
            return None
        num_ranks = self._limits.pool.num_ranks
        batch = np.zeros((num_ranks, layout_of(key, self._limits).size), np.int32)
        found = []
        try:
            for _ in range(1 + TIMED_PAIRS):  # the first pair is slower and is ignored
                started = time.perf_counter()
                outputs = [self._run(executable, (batch,)) for _ in range(2)]
                outputs[-1].block_until_ready()
                found.append((time.perf_counter() - started) / 2)
        except Exception as error:
            LOGGER.warning("%s could not be timed: %r", key, error)
            return None
        return min(found[1:])

    def grow(self, growth: ProgramGrowth) -> None:
        """Add all programs that `growth` makes, until close() ends it."""
        self._growth = growth
        weakref.finalize(self, growth.cancel)  # covers a dropped runner and the process's exit
        growth.start(weakref.WeakMethod(self.add))

    def stop_growing(self) -> None:
        """End the growth and omit unfinished programs; the ready ones serve every plan."""
        if self._growth is not None:
            self._growth.stop()

    def make_on_demand(self, maker_of: Callable[[tuple[ProgramKey, ...]], Maker]) -> None:
        self._maker_of = maker_of

    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        with self._ensuring:
            missing = tuple(key for key in keys if key not in self._programs.executables)
            if not missing or self._maker_of is None:
                return
            for key, executable in self._maker_of(missing):
                self.add(key, executable)

    @property
    def state(self) -> EngineState:
        """The state after the last step. Raises EngineClosedError after close()."""
        if self._state is None:
            raise EngineClosedError("the runner is closed; it holds no state and no programs")
        return self._state

    @property
    def params(self) -> Any:
        if self._params is None:
            raise EngineClosedError("the runner is closed; it holds no weights")
        return self._params

    def exclusively(self) -> AbstractContextManager[object]:
        return self._owning

    def replace_params(self, params: Any) -> None:
        """Replace the weights between steps; shapes and shardings must be the same."""
        with self._owning:
            self._params = params

    def replace_state(self, state: EngineState) -> None:
        """Replace the state between steps; shapes must be the same."""
        with self._owning:
            self._state = state

    def enqueue(self, key: ProgramKey, operands: tuple[Any, ...], *, is_read: bool) -> Any:
        """Start one program, and the copy of its output to the host if it will be read there.
        operands: host arrays [data, ...], and outputs of earlier programs."""
        with self._owning:
            output = self._run(self._programs.executables[key], operands)
        if is_read:
            output.copy_to_host_async()
        return output

    def _run(self, executable: Any, operands: tuple[Any, ...]) -> Any:
        if not self._is_cpu:
            operands = tuple(
                hosts.put(each, self._by_rank) if isinstance(each, np.ndarray) else each
                for each in operands
            )
        self._state, output = executable(self._params, self.state, *operands)
        return output

    def _enqueue(
        self,
        key: ProgramKey,
        *operands: Any,
        is_read: bool,
        is_kept: bool,
        drops: tuple[Any, ...],
    ) -> Any:
        del is_kept, drops  # Python references keep an output alive
        return self.enqueue(key, operands, is_read=is_read)

    def read(self, output: jax.Array) -> np.ndarray:
        return np.asarray(output)

    def _read(self, output: jax.Array) -> np.ndarray:
        return self.read(output)

    def _check_open(self) -> None:
        _ = self.state

    def restart(self) -> None:
        """Zero the state; weights and programs stay. Steps in flight are lost. Raises device
        errors, and EngineClosedError for a runner that was not built by `create`."""
        if self._make_state is None:
            raise EngineClosedError("this runner cannot be restarted")
        with self._owning:
            self._state = None  # free it before the next one is allocated
            self._state = self._make_state()
            if self._expert_totals is not None:
                self._expert_totals.restarted()

    def give_up(self) -> None:
        """Do nothing, since a restart only zeroes the pools."""

    def close(self) -> None:
        """Release programs, state and params, and end background builds. Idempotent."""
        self.stop_growing()
        with self._owning:
            self._programs = ReadyPrograms({})
            self._params = self._state = self._make_state = None


def init_state(
    program: StepProgram,
    limits: ServeLimits,
    *,
    shards: int,
    kv_dtype: Any,
    mesh: Mesh | None = None,  # None: everything is on one device
) -> EngineState:
    """Return zeroed state for all slots and pages of all data ranks, dummies included."""
    target, drafter = program.target, program.drafter
    num_slots = limits.pool.all_slots
    layout = CacheLayout(
        page_size=limits.pool.page_size,
        dtype=jnp.dtype(kv_dtype).name,
        shards=shards,
        lanes=program.ops.lanes,
        num_nodes=limits.draft_shape.num_draft_tokens,
        num_path=limits.draft_shape.max_emitted,
    )

    of_states = snapshot_groups(target.cache_groups)
    num_snapshots = 0 if limits.pool.snapshots is None else limits.pool.snapshots.count + 1
    if limits.scheduling.prefix_cache and of_states and not num_snapshots:
        raise InvariantError("a recurrent target has a prefix cache; expected snapshots of states")

    def num_units(group: CacheGroup) -> int:
        if group.entry.unit is Unit.PAGE:
            return limits.pool.num_ranks * (limits.pool.pages_of(group.window) + 1)
        if group.entry.unit is Unit.SLOT:
            return num_slots
        return limits.pool.num_ranks * num_snapshots

    caches = partial(empty_caches, layout=layout, num_units=num_units, mesh=mesh)
    return EngineState(
        kv=caches(target.cache_groups),
        snapshots=caches(of_states) if num_snapshots else (),
        draft_kv=caches(drafter.cache_groups),
        draft=drafter.init_state(
            num_slots, context_length=limits.pool.context_length, dtype=kv_dtype
        ),
        pending=empty_pending(
            num_slots,
            limits.max_pending,
            needs=drafter.needs,
            hidden_size=target.hidden_size,
            dtype=kv_dtype,
        ),
        rows=empty_rows(
            num_slots,
            pages_per_row=limits.pages_per_row,
            vocab_size=target.vocab_size,
            num_columns=padded(target.vocab_size, shards),
            windows=tuple(space.window for space in limits.pool.windows),
            has_loras=limits.programs.has_loras,
        ),
        expert_counts=_no_counts(limits),
    )


def _no_counts(limits: ServeLimits) -> jax.Array | None:
    counted = limits.programs.counted_experts
    return None if counted is None else jnp.zeros((limits.pool.num_ranks, *counted), jnp.uint32)


def exchange_of(program: StepProgram, mesh: Mesh) -> Exchange | None:
    """Return the buffers for sums over the tensor axis; None if collectives add."""
    if not program.ops.writes_peers:
        return None
    return Exchange.of(mesh, width=program.target.hidden_size)


def new_state(
    program: StepProgram,
    limits: ServeLimits,
    *,
    mesh: Mesh,
    kv_dtype: Any,
    exchange: Exchange | None,
) -> EngineState:
    """Return zeroed state on the mesh, and renew the exchange whose addresses it contains."""
    shards, is_here = Parallel.of(mesh).model, hosts.is_one_process(mesh)
    how: Any = {"shards": shards, "kv_dtype": kv_dtype, "mesh": mesh if is_here else None}
    make = partial(init_state, program, limits, **how)
    if not is_here:
        found: EngineState = hosts.made(make, partial(state_places, program=program, mesh=mesh))
        return found
    peers = None if exchange is None else exchange.renew()
    return place_state(dataclasses.replace(make(), peers=peers), program, mesh)


def place_state(state: EngineState, program: StepProgram, mesh: Mesh) -> EngineState:
    return jax.device_put(state, state_places(state, program, mesh))


def state_places(state: EngineState, program: StepProgram, mesh: Mesh) -> Any:
    specs = state_specs(state, program.target.cache_groups, program.drafter.cache_groups)
    return shardings(mesh, specs)
