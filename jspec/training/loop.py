"""The training loop of targets and draft heads: AdamW, schedule, EMA, checkpoints, progress lines.

The schedule runs on the larger of step / num_steps and time used / budget. Without a budget the
state after n steps is a function of (initial state, seed, n) alone, also of a resumed run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.errors import TrainingError
from jspec.files.output_files import write_text, writing
from jspec.models.layer import Params
from jspec.training.data.token_stream import BatchAt
from jspec.training.data_parallel import Placement
from jspec.training.progress import Clock, duration, note, show, speed
from jspec.training.train_state import Progress, Resumed
from jspec.training.train_state import TrainState as TrainState

if TYPE_CHECKING:
    from jspec.training.checkpoints import Checkpoints

Metrics = dict[str, jax.Array]
Loss = Callable[[Params, Any, Any, jax.Array], tuple[jax.Array, Metrics]]
Evaluate = Callable[[Params], dict[str, Any]]  # must contain "loss"; lists are by depth


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Settings of a run. Times are in seconds; without `budget_seconds`, num_steps alone ends it.
    The learning rate rises linearly over `warmup_steps`, then falls as a cosine to 0."""

    num_steps: int
    peak_learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    beta2: float = 0.95
    ema_decay: float = 0.998
    budget_seconds: float | None = None
    log_every: int = 20
    eval_every: int = 500
    checkpoint_every: int = 2000
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The parameters (EMA) of the best evaluation, and its step."""

    params: Params
    metrics: dict[str, Any]
    step: int
    num_steps: int
    seconds: float
    curve: tuple[dict[str, Any], ...] = ()  # per evaluation: step, seconds, metrics


def optimizer(config: LoopConfig) -> optax.GradientTransformation:
    """Return AdamW without the learning rate, which every step receives; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(b1=0.9, b2=config.beta2, eps=1e-8),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)
        ),
    )


def init_state(params: Params, config: LoopConfig) -> TrainState:
    """Return step 0's state as a copy: steps donate it, and a target may share the buffers."""
    wide = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(
        params=wide,
        ema=jax.tree.map(jnp.copy, wide),
        opt_state=optimizer(config).init(wide),
        step=jnp.zeros((), jnp.int32),
    )


def learning_rate(config: LoopConfig, *, step: int, progress: float) -> float:
    warmup = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return config.peak_learning_rate * warmup * cosine


def make_step(
    loss: Loss, config: LoopConfig
) -> Callable[[TrainState, Any, Any, jax.Array], tuple[TrainState, Metrics]]:
    """Return the jitted step: (state, frozen, batch, learning rate) -> (new state, metrics). The
    state is donated; the loss's key is a function of (seed, step)."""
    transform = optimizer(config)

    def step_fn(
        state: TrainState, frozen: Any, batch: Any, rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        grad_fn = jax.value_and_grad(loss, has_aux=True)
        (value, metrics), grads = grad_fn(state.params, frozen, batch, key)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        count = state.step.astype(jnp.float32)
        decay = jnp.minimum(config.ema_decay, (1.0 + count) / (10.0 + count))
        ema = jax.tree.map(lambda e, p: e + (1.0 - decay) * (p - e), state.ema, params)
        next_state = TrainState(params=params, ema=ema, opt_state=opt_state, step=state.step + 1)
        return next_state, {"loss": value, **metrics}

    return jax.jit(step_fn, donate_argnums=0)


def mean_metrics(
    measure: Callable[[Any], tuple[jax.Array, Metrics]], table: Any, *, batch_size: int
) -> dict[str, Any]:
    """Return means over whole batches of a table of arrays [R, ...]; a remainder is ignored."""
    num_rows = len(jax.tree.leaves(table)[0])
    size = min(batch_size, num_rows)
    sums: list[dict[str, Any]] = []
    for start in range(0, num_rows - size + 1, size):
        part = slice(start, start + size)
        value, metrics = measure(jax.tree.map(lambda rows, part=part: rows[part], table))
        sums.append({"loss": value, **metrics})
    means = jax.tree.map(lambda *values: np.mean([np.asarray(v) for v in values], axis=0), *sums)
    return {key: value.tolist() for key, value in means.items()}


def check_finite(loss: Any, *, step: int) -> None:
    """Raise TrainingError for a loss that is not finite, since later steps cannot recover."""
    value = float(loss)
    if not math.isfinite(value):
        raise TrainingError(
            f"the loss is {value} at step {step}; expected a number: a lower learning_rate, or "
            "more warmup_steps, in a new run"
        )


class _Run:
    def __init__(
        self, name: str, config: LoopConfig, state: TrainState, checkpoints: Checkpoints | None
    ) -> None:
        self.name, self.config, self.checkpoints = name, config, checkpoints
        fresh: Resumed = (state, jax.tree.map(jnp.copy, state.ema), Progress())
        restored = checkpoints.restore(state) if checkpoints else None
        self.state, self.best, self.progress = restored or fresh
        self.saved_step = int(self.state.step)
        self.metrics: dict[str, Any] = {}
        self.has_evaluated = False
        self.clock = Clock(config, used=self.progress.seconds, step=self.saved_step)

    def evaluate(self, evaluate: Evaluate, *, step: int) -> None:
        start = time.monotonic()
        if not self.has_evaluated:
            note(f"{self.name}: compiling the evaluation")
        metrics, self.has_evaluated = evaluate(self.state.ema), True
        self.clock.leave_out(time.monotonic() - start)
        share = self.clock.progress(step)
        seen = {"step": step, "seconds": round(self.clock.seconds(), 1), **metrics}
        self.progress = replace(self.progress, curve=(*self.progress.curve, seen))
        held_out = {f"held_out_{key}": value for key, value in metrics.items()}
        show(
            self.name, step=step, num_steps=self.config.num_steps, progress=share, metrics=held_out
        )
        check_finite(metrics["loss"], step=step)
        if metrics["loss"] < self.progress.best_loss:
            self.best = jax.tree.map(jnp.copy, self.state.ema)
            self.metrics = metrics
            self.progress = replace(self.progress, best_loss=metrics["loss"], best_step=step)

    def save(self, *, step: int) -> None:
        if self.checkpoints and step > self.saved_step:
            self.saved_step = step
            progress = replace(self.progress, seconds=self.clock.seconds())
            self.checkpoints.save(self.state, self.best, progress)


def train(
    name: str,
    *,
    config: LoopConfig,
    loss: Loss,
    initial: Params,
    frozen: Any,
    batch_at: BatchAt,
    evaluate: Evaluate,
    checkpoint_dir: Path | None = None,
    placement: Placement | None = None,
    tokens_a_step: int = 0,
) -> Result:
    """Train to the end of the schedule and return the best parameters by held-out loss.

    frozen: a pytree passed to the loss (a draft head's target), already placed
    placement: the devices that share every batch; None: the first device alone
    tokens_a_step: for the displayed speed

    Resumes from `checkpoint_dir`. Raises TrainingError for a loss that is not finite.
    """
    placement = placement or Placement.single()
    checkpoints = _opened(checkpoint_dir) if checkpoint_dir else None
    run = _Run(name, config, placement.whole(init_state(initial, config)), checkpoints)
    step_fn = make_step(loss, config)
    first = step = int(run.state.step)
    share = run.clock.progress(step)
    while step < config.num_steps and share < 1.0:
        rate = learning_rate(config, step=step, progress=share)
        batch = placement.batch(batch_at(step))
        run.state, metrics = step_fn(run.state, frozen, batch, jnp.float32(rate))
        step += 1
        if step == first + 1:
            jax.block_until_ready(metrics)
            run.clock.first_step_done(step=step)
            note(f"{name}: the first step is compiled, after {duration(run.clock.compiling)}")
        if step % config.log_every == 0:
            values = {key: np.asarray(value) for key, value in metrics.items()}
            timing = speed(run.clock, step=step, tokens_a_step=tokens_a_step)
            shown = {**values, "lr": rate, "seconds": run.clock.seconds(), **timing}
            show(name, step=step, num_steps=config.num_steps, progress=share, metrics=shown)
            check_finite(values["loss"], step=step)
        if step % config.eval_every == 0:
            run.evaluate(evaluate, step=step)
        if step % config.checkpoint_every == 0:
            check_finite(metrics["loss"], step=step)
            run.save(step=step)
        share = run.clock.progress(step)
    if step > first and step % config.eval_every:
        run.evaluate(evaluate, step=step)
    run.save(step=step)
    if checkpoints:
        checkpoints.close()
    return Result(
        params=run.best,
        metrics=run.metrics or evaluate(run.best),
        step=run.progress.best_step,
        num_steps=step,
        seconds=run.clock.seconds(),
        curve=run.progress.curve,
    )


def _opened(folder: Path) -> Checkpoints:
    from jspec.training.checkpoints import Checkpoints  # imports orbax, which takes seconds

    return Checkpoints(folder)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Merge `report` into the JSON file at `path`. Raises OutputError."""
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**known, **report}, indent=1) + "\n")
