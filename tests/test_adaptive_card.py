"""The benchmark of adaptive shapes, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.adaptive_card import (
    CountingEngine,
    expected_length,
    measured,
    seconds_of,
    start,
    summary,
)
from benchmarks.workloads import WORKLOADS
from jspec.config.limits import Algorithm, SpeculativeConfig
from tests.support.counting_dial import dialled, seed_of, true_tokens

TINY = WORKLOADS["tiny"]
TREE = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
VOCAB = 320
POSITIONS = jnp.broadcast_to(jnp.arange(1000, dtype=jnp.int32), (8, 1000))


@pytest.fixture(scope="module")
def tree_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEngine]:
    folder, shapes = tmp_path_factory.mktemp("configs"), ("0/1/1", "3/1/4", "2/4/8")
    found = start(TINY, folder, "tree", batches=[2], shapes=shapes)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEngine]:
    found = start(TINY, tmp_path_factory.mktemp("configs"), "plain", batches=[2])
    yield found
    found.shutdown()


@pytest.mark.slow
@pytest.mark.exhaustive  # compiles nine decode programs
@pytest.mark.parametrize("acceptance", [0.0, 0.5])
def test_the_dial_says_what_is_accepted(tree_engine: CountingEngine, acceptance: float) -> None:
    """`seconds_of` checks every text."""
    engine = tree_engine
    (spec,) = (shape for shape in engine.limits.shapes if str(shape) == "3/1/4")
    engine.switched.use(spec)
    before = engine.stats.counters
    for _ in range(4):
        seconds_of(engine, TINY, 2, acceptance, TINY.long_run)
    after = engine.stats.counters
    emitted = after.full_num_emitted - before.full_num_emitted
    verified = after.full_verify_ct - before.full_verify_ct
    tolerance = 0.0 if acceptance in (0.0, 1.0) else 0.4
    wanted = expected_length(acceptance, spec.num_steps)
    assert emitted / verified == pytest.approx(wanted, abs=tolerance)


@pytest.mark.slow
@pytest.mark.exhaustive  # compiles nine decode programs
def test_trees_accept_more_than_chains_and_deeper_ones_more(
    tree_engine: CountingEngine, plain_engine: CountingEngine
) -> None:
    workload = replace(TINY, long_run=90)
    cells = [
        measured(tree_engine, plain_engine, workload, 2, acceptance, repeats=1, times=1)
        for acceptance in (0.55, 0.6, 0.65)
    ]
    names = [str(shape) for shape in tree_engine.limits.shapes]
    assert names == ["0/1/1", "3/1/4", "2/4/8", "3/4/16"]
    lengths = [np.mean([cell["tokens_a_step"][name] for cell in cells]) for name in names]
    assert lengths[0] == 1.0
    assert lengths[0] + 0.1 < lengths[2] < lengths[3] - 0.1 > lengths[1] > 1.1, lengths
    for cell in cells:
        assert cell["all"]["plain engine"] != cell["all"]["0/1/1"]
        assert sum(shape["steps"] for shape in cell["chosen"].values()) > 0
        assert set(cell["chosen"]) <= set(names)
        assert all(name in summary(cell, seconds=1.0) for name in names)
        assert set(cell["measured_ms"]) == set(names)
        assert min(cell["measured_ms"].values()) > 0


def dial(acceptance: float, *, topk: int = 4) -> np.ndarray:
    """Return eight rows of the dial: ids minus the right ids, and scores."""
    seeds = [seed_of(first=1009 * row, acceptance=acceptance) for row in range(8)]
    words = np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32)
    ids, scores = dialled(jnp.asarray(words), POSITIONS, topk=topk, vocab_size=VOCAB)
    right = true_tokens(jnp.asarray(words), POSITIONS, vocab_size=VOCAB)
    return np.stack((np.asarray(ids) - np.asarray(right)[..., None], np.asarray(scores)))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_a_first_candidate_is_right_as_often_as_the_dial_says(acceptance: float) -> None:
    offsets, scores = dial(acceptance)
    hits = (offsets == 0).mean(axis=(0, 1))
    tolerance = 0.02 if 0 < acceptance < 1 else 0.0
    assert hits[0] == pytest.approx(acceptance, abs=tolerance)
    if tolerance:
        assert hits[0] > hits[1] > hits[2] > hits[3] > 0
        assert 0.1 < hits[1:].sum() / (1 - acceptance) < 0.6
    else:
        assert not hits[1:].any()
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(dial(acceptance, topk=1)[0] == 0, offsets[..., :1] == 0)
