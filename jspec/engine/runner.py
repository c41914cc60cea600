"""The one owner of device state: takes plans, runs compiled steps, hands results back in order.

`dispatch` only enqueues; `collect` waits for the oldest step. The state itself never leaves: each
step consumes it (donated) and the next one is put in its place.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.core import sharding
from jspec.core.config import ServeLimits
from jspec.core.plan import StepPlan, StepResult
from jspec.core.state import EngineState, empty_rows
from jspec.engine.compilation import Progress, compile_all
from jspec.engine.program_store import ProgramStore
from jspec.engine.transfer import pack, program_key, unpack_result
from jspec.models.paged import empty_pool
from jspec.pallas_kernels.paged_attention import Backend
from jspec.speculative.draft import Drafter, EagleDrafter
from jspec.speculative.step import StepProgram


class DeviceRunner:
    """Implements `core.protocols.Runner` on jax devices.

    params: {"target": ..., "draft": ...} as placed by `loading.place`; all programs are compiled
    by the constructor's caller and passed in, so that building one has no hidden cost.
    """

    def __init__(
        self,
        *,
        limits: ServeLimits,
        params: Any,
        state: EngineState,
        executables: dict[Any, Any],
        mesh: Mesh,
        vocab_size: int,
        backend: Backend = "xla",
    ) -> None:
        self._limits = limits
        self._params = params
        self._state = state
        self._executables = executables
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._vocab_size = vocab_size
        self._backend = backend
        self._in_flight: deque[tuple[StepPlan, jax.Array]] = deque()

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
        store: ProgramStore | None = None,
    ) -> DeviceRunner:
        """Allocates the state and compiles everything."""
        state = place_state(init_state(program, limits, shards=mesh.size, kv_dtype=kv_dtype), mesh)
        programs = {
            full: StepProgram(
                target=program.target,
                drafter=program.drafter,
                spec=program.spec,
                full=full,
                backend=program.backend,
            )
            for full in (False, True)
        }
        executables = compile_all(
            programs,
            limits,
            mesh=mesh,
            params=params,
            state=state,
            progress=progress,
            store=store,
        )
        return cls(
            limits=limits,
            params=params,
            state=state,
            executables=executables,
            mesh=mesh,
            vocab_size=program.target.config.vocab_size,
            backend=program.backend,
        )

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def backend(self) -> Backend:
        """What runs attention in its programs."""
        return self._backend

    @property
    def num_programs(self) -> int:
        return len(self._executables)

    @property
    def state(self) -> EngineState:
        """The state after the last dispatched step; reading it waits for the device."""
        return self._state

    def replace_state(self, state: EngineState) -> None:
        """Puts another state in place, between steps; it must have the same shapes."""
        self._state = state

    def dispatch(self, plan: StepPlan) -> None:
        """Enqueues one step; never waits for the device."""
        key = program_key(plan, self._limits)
        flat = pack(plan, key, self._limits, vocab_size=self._vocab_size)
        batch = jax.device_put(flat, self._replicated)
        self._state, output = self._executables[key](self._params, self._state, batch)
        output.copy_to_host_async()
        self._in_flight.append((plan, output))

    def collect(self) -> StepResult:
        """Waits for the oldest dispatched step. Raises IndexError if none is in flight."""
        plan, output = self._in_flight.popleft()
        return unpack_result(plan, np.asarray(output), self._limits)


def init_state(
    program: StepProgram, limits: ServeLimits, *, shards: int, kv_dtype: Any
) -> EngineState:
    """Zeroed state for all slots and pages, the dummies included."""
    target = program.target.config
    drafter: Drafter = program.drafter
    num_slots, num_pages = limits.num_slots + 1, limits.num_pages + 1
    draft_kv: tuple[jax.Array, ...] = ()
    if isinstance(drafter, EagleDrafter):
        draft_kv = empty_pool(
            drafter.head.config.layer,
            num_layers=1,
            num_pages=num_pages,
            page_size=limits.page_size,
            shards=shards,
            dtype=kv_dtype,
            backend=program.backend,
        )
    return EngineState(
        kv=empty_pool(
            target,
            num_layers=target.num_layers,
            num_pages=num_pages,
            page_size=limits.page_size,
            shards=shards,
            dtype=kv_dtype,
            backend=program.backend,
        ),
        draft_kv=draft_kv,
        draft=drafter.init_state(num_slots, dtype=kv_dtype),
        rows=empty_rows(
            num_slots, pages_per_row=limits.pages_per_row, vocab_size=target.vocab_size
        ),
    )


def place_state(state: EngineState, mesh: Mesh) -> EngineState:
    """Puts each array where its rule says."""
    return jax.device_put(state, sharding.shardings(mesh, sharding.state_specs(state)))
