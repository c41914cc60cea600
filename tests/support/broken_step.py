"""Engines with broken steps, for the tests of what must detect them.

`CorruptingEngine` overwrites a committed KV slot of the target after decode steps, so every later
token of the row attends to wrong keys. `FailingEngine` loses its state in a step, as in a device
error.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config.resolved_config import ResolvedConfig
from jspec.device.state import EngineState
from jspec.engine.programs.compilation import Progress
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.plan import StepKind, StepPlan
from jspec.serving.engine import Engine


class CorruptingRunner:
    """Corrupts the last committed KV slot of a step's first row, every `every` decode steps."""

    def __init__(self, inner: DeviceRunner, *, every: int) -> None:
        self._inner, self._every, self._count = inner, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        handle = self._inner.dispatch(plan)
        if plan.kind is StepKind.DECODE:
            self._count += 1
            if self._count % self._every == 0:
                slot = plan.rows[0].slot
                self._inner.replace_state(_corrupted(self._inner.state, slot))
        return handle


class FailingRunner:
    """Loses its state at dispatch number `at`, counted from 1."""

    def __init__(self, inner: DeviceRunner, *, at: int) -> None:
        self._inner, self._at, self._count = inner, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        self._count += 1
        if self._count == self._at:
            jax.tree.map(lambda array: array.delete(), self._inner.state)
        return self._inner.dispatch(plan)


@partial(jax.jit, donate_argnums=(0,))
def _corrupted(state: EngineState, slot: int) -> EngineState:
    """Return the state with K and V of token L - 1 flipped and scaled, in every layer."""
    rows = state.rows
    last = rows.seq_lens[slot] - 1
    kv = []
    for pages in state.kv:
        page_size = pages.shape[1]
        at = (rows.page_table[slot, last // page_size], last % page_size)
        kv.append(pages.at[at].set(-2 * jnp.flip(pages[at], axis=0), mode="drop"))
    return dataclasses.replace(state, kv=tuple(kv))


class CorruptingEngine(Engine):
    every = 4

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        runner, config, weights = super()._build_runner(progress)
        broken: Any = CorruptingRunner(runner, every=self.every)
        return broken, config, weights


class FailingEngine(Engine):
    at = 12

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        runner, config, weights = super()._build_runner(progress)
        broken: Any = FailingRunner(runner, at=self.at)
        return broken, config, weights
