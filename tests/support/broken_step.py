"""An engine that loses its state in a step, as in a device error."""

from __future__ import annotations

from typing import Any

import jax

from jspec.config.resolved_config import ResolvedConfig
from jspec.engine.programs.compilation import Progress
from jspec.engine.runner import DeviceRunner
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.plan import StepPlan
from jspec.serving.engine import Engine


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


class FailingEngine(Engine):
    at = 12

    def _build_runner(
        self, progress: Progress | None
    ) -> tuple[DeviceRunner, ResolvedConfig, ServedWeights]:
        runner, config, weights = super()._build_runner(progress)
        broken: Any = FailingRunner(runner, at=self.at)
        return broken, config, weights
