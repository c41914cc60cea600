"""The benchmark of chosen shapes, on tiny models: its target counts and its dial is obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.adaptive_card import (
    CountingEngine,
    expected_length,
    measured,
    parsed,
    seconds_of,
    shape_named,
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
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEngine]:
    found = start(TINY, tmp_path_factory.mktemp("configs"), "chain", batches=[2])
    yield found
    found.shutdown()


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
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_the_dial_says_what_is_accepted(engine: CountingEngine, acceptance: float) -> None:
    """`seconds_of` itself checks every text."""
    spec = engine.limits.spec
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


def dial(acceptance: float, *, topk: int = 4, after: jax.Array | None = None) -> np.ndarray:
    """Eight rows of the dial, as ids less those that are right."""
    seeds = [seed_of(first=1009 * row, acceptance=acceptance) for row in range(8)]
    words = np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32)
    ids, scores = dialled(jnp.asarray(words), POSITIONS, topk=topk, vocab_size=VOCAB, after=after)
    right = true_tokens(jnp.asarray(words), POSITIONS, vocab_size=VOCAB)
    return np.stack((np.asarray(ids) - np.asarray(right)[..., None], np.asarray(scores)))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_a_first_candidate_is_right_as_often_as_the_dial_says(acceptance: float) -> None:
    """Whatever K is; the others take some of what it leaves, the better ones more."""
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


def test_scores_say_how_often_a_candidate_is_right() -> None:
    """And not more: sure ones are wrong at times."""
    offsets, scores = dial(0.6)
    right, share = offsets[..., 0] == 0, np.exp(scores[..., 0])
    for low in (0.25, 0.45, 0.65):
        of_these = right[(share >= low) & (share < low + 0.2)]
        assert of_these.mean() == pytest.approx(low + 0.1, abs=0.05)
    assert (np.diff(scores, axis=-1) < 0).all()


def test_after_a_wrong_token_all_are_wrong_and_no_two_are_alike() -> None:
    offsets, scores = dial(0.6, after=POSITIONS % 7)
    assert (offsets % VOCAB != 0).all()
    assert all(len(set(ids)) == 4 for ids in offsets.reshape(-1, 4).tolist())
    assert np.exp(scores[..., 0]).mean() == pytest.approx(0.6, abs=0.02)
    assert not np.array_equal(scores, dial(0.6, after=POSITIONS % 5)[1])


def test_shapes_are_named_by_their_numbers() -> None:
    assert shape_named("0/1/1", TREE).is_plain
    assert shape_named("3/1/4", TREE) == replace(TREE, topk=1, num_draft_tokens=4)
    with pytest.raises(ValueError, match="from 2 to 37"):
        shape_named("3/4/99", TREE)


def test_each_mode_has_a_result_of_its_own() -> None:
    chain, tree = parsed([]), parsed(["--mode", "tree", "--acceptances", "0.5"])
    assert (chain.out.name, chain.shapes) == ("adaptive_card.json", None)
    assert (tree.out.name, tree.acceptances) == ("adaptive_card_tree.json", [0.5])
    assert tree.shapes == ("0/1/1", "3/1/4")
