"""The training loop: resuming, schedule, budget, best evaluation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import TrainingError
from jspec.training import loop
from jspec.training.checkpoints import Checkpoints
from jspec.training.loop import LoopConfig
from tests.support.interruption import interruption

CONFIG = LoopConfig(
    num_steps=8,
    peak_learning_rate=0.05,
    warmup_steps=2,
    log_every=3,
    eval_every=4,
    checkpoint_every=3,
)


class PowerCutError(Exception):
    """Stands for any interruption."""


def quadratic(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
    """Noisy distance of w from `frozen`; integer keys, like a model's layers."""
    noise = jax.random.normal(key, (3,)) * 0.1
    residual = params["layers"][0]["w"] @ params["layers"][1]["w"] - frozen + noise
    loss = jnp.mean(residual**2) + 0.01 * jnp.mean(batch * params["layers"][1]["w"])
    return loss, {"size": jnp.sum(jnp.abs(residual))}


def start() -> Any:
    return {"layers": {0: {"w": jnp.eye(3)}, 1: {"w": jnp.ones((3,))}}}


def run(folder: Path | None, *, cut_at: int | None = None, config: LoopConfig = CONFIG) -> Any:
    def batch_at(step: int) -> np.ndarray:
        if step == cut_at:
            raise PowerCutError
        return np.random.default_rng(step).normal(size=3).astype(np.float32)

    return loop.train(
        "test",
        config=config,
        loss=quadratic,
        initial=start(),
        frozen=jnp.asarray([3.0, -1.0, 2.0]),
        batch_at=batch_at,
        evaluate=lambda params: {"loss": float(jnp.mean(params["layers"][1]["w"] ** 2))},
        checkpoint_dir=folder,
    )


@pytest.mark.slow_cases("4]")
@pytest.mark.parametrize("cut_at", [4, 7])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(tmp_path: Path, cut_at: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(PowerCutError):
        run(tmp_path / "cut", cut_at=cut_at)
    resumed = run(tmp_path / "cut")
    assert resumed.step == whole.step
    assert resumed.num_steps == whole.num_steps == 8
    assert [seen["step"] for seen in resumed.curve] == [4, 8]
    assert [seen["loss"] for seen in resumed.curve] == [seen["loss"] for seen in whole.curve]
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    template = loop.init_state(start(), CONFIG)
    last = [Checkpoints(tmp_path / name).restore(template) for name in ("whole", "cut")]
    states = [found[0] for found in last if found is not None]
    assert len(states) == 2
    for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_interrupt_leaves_whole_checkpoints(tmp_path: Path) -> None:
    large = np.random.default_rng(0).random(2**22, np.float32)  # takes longer than the interrupt
    state = loop.init_state({"w": jnp.asarray(large)}, CONFIG)
    checkpoints = Checkpoints(tmp_path)
    with interruption(lambda: None):
        checkpoints.save(state, state.ema, loop.Progress())
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    found = checkpoints.restore(state)
    assert found is not None
    np.testing.assert_array_equal(found[1]["w"], large)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path, cut_at=0)
    assert again.num_steps == first.num_steps
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("seldom", "step"), [("log_every", 4), ("log_every eval_every", 6), ("checkpoint_every", 3)]
)
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, seldom: str, step: int) -> None:
    """Whichever event looks at the loss first; no checkpoint of it is left."""
    config = replace(CONFIG, peak_learning_rate=1e30, warmup_steps=0, checkpoint_every=6)
    config = replace(config, **dict.fromkeys(seldom.split(), 100))
    with pytest.raises(TrainingError, match=f"the loss is (nan|inf) at step {step}; expected"):
        run(tmp_path, config=config)
    assert Checkpoints(tmp_path).restore(loop.init_state(start(), CONFIG)) is None


def test_the_best_evaluation_is_kept() -> None:
    losses = itertools.chain([1.0, 5.0], itertools.repeat(7.0))
    result = loop.train(
        "test",
        config=CONFIG,
        loss=quadratic,
        initial=start(),
        frozen=jnp.zeros(3),
        batch_at=lambda step: np.full(3, step, np.float32),
        evaluate=lambda _: {"loss": next(losses)},
    )
    assert (result.step, result.metrics) == (4, {"loss": 1.0})


@given(st.integers(0, 100), st.floats(0, 1))
def test_the_learning_rate_stays_under_its_peak(step: int, progress: float) -> None:
    rate = loop.learning_rate(CONFIG, step=step, progress=progress)
    assert 0.0 <= rate <= CONFIG.peak_learning_rate
    later = loop.learning_rate(CONFIG, step=max(step, 2), progress=1.0)
    assert later == pytest.approx(0.0, abs=1e-12)


def test_a_budget_that_is_used_up_ends_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    config = LoopConfig(num_steps=10**6, peak_learning_rate=0.1, budget_seconds=0.2, log_every=50)
    result = run(None, config=config)
    assert 1 <= result.num_steps < 10**6
    assert result.seconds >= 0.2
    said = capsys.readouterr().out
    assert "held_out_loss" in said
    assert said.index("the first step is compiled, after ") < said.index("compiling the evaluation")


def test_vectors_do_not_decay() -> None:
    config = LoopConfig(num_steps=1, peak_learning_rate=1.0, weight_decay=0.5)
    transform = loop.optimizer(config)
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones((2,))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(zeros, transform.init(params), params)
    np.testing.assert_allclose(updates["matrix"], 0.5)
    np.testing.assert_allclose(updates["scale"], 0.0)


def test_reports_merge(tmp_path: Path) -> None:
    loop.write_report(tmp_path / "report.json", {"target": 1})
    loop.write_report(tmp_path / "report.json", {"head": [2]})
    assert (tmp_path / "report.json").read_text() == '{\n "target": 1,\n "head": [\n  2\n ]\n}\n'
