"""The one owner of device state: takes plans, runs compiled steps, hands results back in order.

`dispatch` only enqueues; `collect` waits for the oldest step. The state itself never leaves: each
step consumes it (donated) and the next one is put in its place.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.core import sharding
from jspec.core.cache_groups import CacheGroup
from jspec.core.config import ServeLimits, SpeculativeConfig
from jspec.core.errors import ConfigError, EngineClosedError
from jspec.core.features import PLAIN, StepFeatures
from jspec.core.plan import StepKind, StepPlan, StepResult
from jspec.core.state import EngineState, empty_rows
from jspec.engine.compilation import Progress, compile_all
from jspec.engine.program_growth import Maker, ProgramGrowth
from jspec.engine.program_store import ProgramStore
from jspec.engine.programs import (
    ProgramKey,
    nearest_program,
    needed_program,
    ready_shapes,
    recall_programs,
)
from jspec.engine.transfer import pack, pack_catch_up, pack_recalls, unpack_result
from jspec.layers.attention import kv_heads_per_shard
from jspec.layers.linear import Shard
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.deferred import empty_deferred
from jspec.speculative.step import StepProgram


@dataclass(frozen=True, slots=True)
class ReadyPrograms:
    """Executables by key, and which of them runs what: replaced as a whole by each addition, so
    that whoever dispatches sees both of one moment."""

    executables: Mapping[ProgramKey, Any]
    _nearest: dict[ProgramKey, ProgramKey] = field(default_factory=dict)
    _shapes: dict[tuple[int, StepFeatures], tuple[SpeculativeConfig, ...]] = field(
        default_factory=dict
    )

    def nearest(self, needed: ProgramKey) -> ProgramKey:
        """As nearest_program, searched for once a size and set of features."""
        found = self._nearest.get(needed)
        if found is None:
            found = self._nearest[needed] = nearest_program(needed, self.executables)
        return found

    def shapes(
        self, limits: ServeLimits, num_rows: int, features: StepFeatures
    ) -> tuple[SpeculativeConfig, ...]:
        """As ready_shapes, searched for once a number of rows and set of features."""
        asked = num_rows, features
        if asked not in self._shapes:
            self._shapes[asked] = ready_shapes(
                limits, self.executables, num_rows=num_rows, features=features
            )
        return self._shapes[asked]

    def with_program(self, key: ProgramKey, executable: Any) -> ReadyPrograms:
        return ReadyPrograms({**self.executables, key: executable})


class DeviceRunner:
    """Implements `core.protocols.Runner` on jax devices.

    params: {"target": ..., "draft": ...} as placed by `loading.place`; programs are compiled by
    the constructor's caller and passed in, so that building one has no hidden cost. They must
    serve every plan together; better fitting ones may be added at any time.
    """

    def __init__(
        self,
        *,
        limits: ServeLimits,
        params: Any,
        state: EngineState,
        executables: dict[ProgramKey, Any],
        mesh: Mesh,
        vocab_size: int,
    ) -> None:
        self._limits = limits
        self._params = params
        self._state: EngineState | None = state
        self._programs = ReadyPrograms(executables)  # never changed: the caller may share it
        self._adding = threading.Lock()
        self._growth: ProgramGrowth | None = None
        self._maker_of: Callable[[tuple[ProgramKey, ...]], Maker] | None = None
        self._ensuring = threading.Lock()
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._vocab_size = vocab_size
        self._num_programs = len(executables)
        self._in_flight: deque[tuple[StepPlan, ProgramKey, jax.Array]] = deque()

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
    ) -> DeviceRunner:
        """Allocates the state and compiles everything, or `first` beside what the store has."""
        state = place_state(init_state(program, limits, shards=mesh.size, kv_dtype=kv_dtype), mesh)
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
        return cls(
            limits=limits,
            params=params,
            state=state,
            executables=executables,
            mesh=mesh,
            vocab_size=program.target.vocab_size,
        )

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def ready_programs(self) -> tuple[ProgramKey, ...]:
        """What can be dispatched now; none after close()."""
        return tuple(self._programs.executables)

    def ready_shapes(self, num_rows: int, features: StepFeatures) -> tuple[SpeculativeConfig, ...]:
        """What a decode of so many rows can be now; from any thread."""
        return self._programs.shapes(self._limits, num_rows, features)

    @property
    def num_programs(self) -> int:
        """How many are there, or were before close()."""
        return self._num_programs

    @property
    def num_programs_wanted(self) -> int:
        """How many there will be if all that is still being built succeeds."""
        return self._num_programs if self._growth is None else self._growth.num_wanted

    def add(self, key: ProgramKey, executable: Any) -> None:
        """Puts a program among the ready ones, from any thread; the next dispatch sees it.

        After close() it is dropped.
        """
        with self._adding:
            if self._state is not None:
                self._programs = self._programs.with_program(key, executable)
                self._num_programs = len(self._programs.executables)

    def grow(self, growth: ProgramGrowth) -> None:
        """Takes all programs that `growth` makes, until close(), which ends it."""
        self._growth = growth
        weakref.finalize(self, growth.cancel)  # whoever drops the runner, or ends the process
        growth.start(weakref.WeakMethod(self.add))

    def make_on_demand(self, maker_of: Callable[[tuple[ProgramKey, ...]], Maker]) -> None:
        """Says who makes programs that few engines need, once one is needed."""
        self._maker_of = maker_of

    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        """Makes what is missing of `keys`, while others serve; from any thread but the engine's.

        Raises BuildError for what cannot be made.
        """
        with self._ensuring:
            missing = tuple(key for key in keys if key not in self._programs.executables)
            if not missing or self._maker_of is None:
                return
            for key, executable in self._maker_of(missing):
                self.add(key, executable)

    @property
    def state(self) -> EngineState:
        """The state after the last dispatched step; reading it waits for the device.

        Raises EngineClosedError after close().
        """
        if self._state is None:
            raise EngineClosedError("the runner is closed; it holds no state and no programs")
        return self._state

    @property
    def params(self) -> Any:
        """{"target": ..., "draft": ...}. Raises EngineClosedError after close()."""
        if self._params is None:
            raise EngineClosedError("the runner is closed; it holds no weights")
        return self._params

    def replace_params(self, params: Any) -> None:
        """Puts other weights in place, between steps; they must lie as the former did."""
        self._params = params

    def replace_state(self, state: EngineState) -> None:
        """Puts another state in place, between steps; it must have the same shapes."""
        self._state = state

    def dispatch(self, plan: StepPlan) -> None:
        """Enqueues one step; never waits for the device, but for the tree that a grammar is to see.

        Raises EngineClosedError after close().

        The program may be larger than the plan, or have more features. Raises InvariantError if
        none serves it.
        """
        state = self.state
        programs = self._programs
        if plan.admissions:
            state = self._recall(plan, state)
        if plan.owed:
            self._catch_up(plan)
        needed, tree = needed_program(plan), None
        if plan.constraints and plan.kind is StepKind.DECODE:
            tree = self._propose(plan)
            needed = needed._replace(kind=StepKind.VERIFY)
        key = programs.nearest(needed)
        output = self._enqueue(plan, key, tree)
        output.copy_to_host_async()
        self._in_flight.append((plan, key, output))

    def _enqueue(self, plan: StepPlan, key: ProgramKey, tree: np.ndarray | None) -> jax.Array:
        flat = pack(plan, key, self._limits, vocab_size=self._vocab_size, tree=tree)
        batch = jax.device_put(flat, self._replicated)
        output: jax.Array
        self._state, output = self._programs.executables[key](self._params, self.state, batch)
        return output

    def _propose(self, plan: StepPlan) -> np.ndarray:
        """The rows' trees, i32[B, 3 N], once the device has them. Rows without drafts get their
        pages by it all the same."""
        key = self._programs.nearest(ProgramKey(StepKind.PROPOSE, len(plan.rows), PLAIN))
        return np.asarray(self._enqueue(plan, key, None))

    def _catch_up(self, plan: StepPlan) -> None:
        """Tells the drafter what plain steps did not."""
        key = self._programs.nearest(ProgramKey(StepKind.CATCH_UP, len(plan.rows), PLAIN))
        flat = pack_catch_up(plan, key, self._limits)
        batch = jax.device_put(flat, self._replicated)
        self._state, _ = self._programs.executables[key](self._params, self.state, batch)

    def _recall(self, plan: StepPlan, state: EngineState) -> EngineState:
        """The state once rows with a cached prefix know its ids, as far as they use them."""
        for flat in pack_recalls(plan, self._limits):
            (key,) = recall_programs(self._limits)
            batch = jax.device_put(flat, self._replicated)
            state, _ = self._programs.executables[key](self._params, state, batch)
            self._state = state
        return state

    def collect(self) -> StepResult:
        """Waits for the oldest dispatched step. Raises IndexError if none is in flight."""
        plan, key, output = self._in_flight.popleft()
        return unpack_result(plan, np.asarray(output), self._limits, features=key.features)

    def close(self) -> None:
        """Lets go of programs, state and params; what is in flight is dropped. May come twice.

        Ends what still builds programs. Whoever still holds the runner, or an error with it in a
        traceback, holds no device memory.
        """
        if self._growth is not None:
            self._growth.stop()
        with self._adding:
            self._programs, self._in_flight = ReadyPrograms({}), deque()
            self._params = self._state = None


def init_state(
    program: StepProgram, limits: ServeLimits, *, shards: int, kv_dtype: Any
) -> EngineState:
    """Zeroed state for all slots and pages, the dummies included."""
    target, drafter = program.target, program.drafter
    num_slots = limits.num_slots + 1
    pools = partial(
        _pools_of_spaces,
        limits=limits,
        page_size=limits.page_size,
        shards=shards,
        dtype=kv_dtype,
        ops=program.ops,
    )
    return EngineState(
        kv=pools(target.cache_groups),
        draft_kv=pools(drafter.cache_groups),
        draft=drafter.init_state(num_slots, context_length=limits.context_length, dtype=kv_dtype),
        deferred=empty_deferred(
            num_slots,
            limits.deferred_tokens,
            needs=drafter.needs,
            hidden_size=target.hidden_size,
            dtype=kv_dtype,
        ),
        rows=empty_rows(
            num_slots,
            pages_per_row=limits.pages_per_row,
            vocab_size=target.vocab_size,
            windows=tuple(space.window for space in limits.windows),
        ),
    )


def _pools_of_spaces(
    groups: tuple[CacheGroup, ...], *, limits: ServeLimits, **settings: Any
) -> tuple[jax.Array, ...]:
    """`empty_pools`, each group with the pages of its space."""
    pools: tuple[jax.Array, ...] = ()
    for group in groups:
        pools += empty_pools((group,), num_pages=limits.pages_of(group.window) + 1, **settings)
    return pools


def empty_pools(
    groups: tuple[CacheGroup, ...],
    *,
    num_pages: int,
    page_size: int,
    shards: int,
    dtype: Any,
    ops: Ops,
) -> tuple[jax.Array, ...]:
    """One zeroed array a layer, group by group: [num_pages, page_size, 2G, D] with the heads of all
    shards. `num_pages` includes the dummy page 0.

    K and V lie in one array, as wide as K; a narrower V is padded. Raises ConfigError for a group
    whose V is the wider one.
    """
    pools: list[jax.Array] = []
    for group in groups:
        entry = group.entry
        if entry.qk_dim < entry.v_dim:
            raise ConfigError(
                f"cache group {group.name} has K of {entry.qk_dim} and V of {entry.v_dim} numbers; "
                f"expected V to be no wider"
            )
        heads = kv_heads_per_shard(entry.num_heads, Shard(shards)) * shards
        width = ops.pool_width(entry.qk_dim)
        shape = (num_pages, page_size, 2 * heads, width)
        pools += [jnp.zeros(shape, dtype) for _ in range(group.num_layers)]
    return tuple(pools)


def place_state(state: EngineState, mesh: Mesh) -> EngineState:
    """Puts each array where its rule says."""
    return jax.device_put(state, sharding.shardings(mesh, sharding.state_specs(state)))
