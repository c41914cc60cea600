"""Heads that draft blocks: an exported head drafts over pages what it learnt at every root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.dflash import load_block
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafters.block import BlockDrafter, ParallelDrafter
from jspec.training.data.roots import draw_roots
from jspec.training.dense import causal_attend, forward
from jspec.training.draft_loss import LossWeights, draft_loss, make_frozen
from jspec.training.heads.draft_head import Guess, TargetFeatures
from jspec.training.heads.head_block import trained_block
from jspec.training.heads.head_parallel import parallel_head
from tests.models.test_block_heads import Row, log_softmax
from tests.speculative.engines import spec_of
from tests.training.tiny_pair import U, V, random_rows, tiny_target

LENGTH, DEPTHS = 14, 3
ROOTS = (2, 7, 10)
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "intermediate_size": 24,
    "aux_layer_ids": (0, 1, 2),
    "mask_token_id": V - 1,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"markov_rank": 6},
    "dflash2": {"selector_rank": 6},
}


def made(name: str) -> tuple[Any, np.ndarray]:
    """Return a head and its draft vocabulary."""
    target = tiny_target()[0]
    if name == "peagle":
        ids = np.sort(np.random.default_rng(1).permutation(V)[:U]).astype(np.int32)
        return parallel_head(target, draft_vocab_size=U, **COMMON), ids
    head = trained_block(target, num_depths=DEPTHS, **COMMON, **BLOCKS[name])
    return head, np.arange(V, dtype=np.int32)


def served(name: str, path: Path) -> tuple[Any, Any]:
    """Read an exported head as the engine does. Return (drafter, params)."""
    target, target_params = tiny_target()
    how: dict[str, Any] = {"target_params": target_params, "dtype": np.float32}
    if name == "peagle":
        spec = load_eagle3_config(path, target=target)
        shape = spec_of(DEPTHS, U, 9)
        return ParallelDrafter(FeatureHead(spec, Ops()), shape), load_eagle3(path, spec, **how)
    block = load_block_config(path, target=target)
    topk = V if block.selector is None else block.selector.num_candidates
    drafter = BlockDrafter(BlockHead(block, Ops()), spec_of(DEPTHS, topk, 9, Algorithm.DFLASH))
    return drafter, load_block(path, block, **how)


def expected(guess: Guess, root: int) -> np.ndarray:
    """Return a depth's log-probabilities at ROOTS[root], of a selector's candidates alone."""
    if guess.roots is None:
        return log_softmax(np.asarray(guess.logits)[0, ROOTS[root] - 1])
    logits = np.asarray(guess.logits)[0, root]
    if guess.reranked is None:
        return log_softmax(logits)
    found = np.argsort(-logits)[: guess.num_candidates]
    scores = np.full(V, -np.inf)
    scores[found] = np.asarray(guess.reranked)[0, root][found]
    return log_softmax(scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BLOCKS, "peagle"])
def test_an_exported_head_drafts_what_it_learnt_at_every_root(name: str, tmp_path: Path) -> None:
    target, target_params = tiny_target()
    head, draft_ids = made(name)
    params = head.init(target_params, draft_ids, seed=3)
    # away from the values that change nothing
    shift = [0.2 * jax.random.normal(jax.random.key(9), x.shape) for x in jax.tree.leaves(params)]
    params = jax.tree.map(jnp.add, params, jax.tree.unflatten(jax.tree.structure(params), shift))
    whole = head.whole(params, target_params, jnp.asarray(draft_ids))
    rows = random_rows(1, LENGTH)
    hidden, aux = forward(
        target,
        target_params,
        rows,
        dtype=jnp.float32,
        attend=causal_attend("xla"),
        aux_layer_ids=head.aux_layer_ids,
    )
    with jax.default_matmul_precision("highest"):
        guesses = head.guesses(
            whole,
            rows,
            TargetFeatures(hidden=hidden, aux=aux),
            num_depths=DEPTHS,
            dtype=jnp.float32,
            roots=jnp.asarray([ROOTS]),
        )
    head.save(tmp_path, whole, draft_ids=draft_ids, dtype=np.float32, target=target)
    drafter, loaded = served(name, tmp_path)
    assert drafter.model.spec == head.spec
    text = {"token_ids": np.pad(rows[0], (0, 8)), "features": np.pad(aux[0], ((0, 8), (0, 0)))}
    row = Row(drafter, loaded, text)
    for i, root in enumerate(ROOTS):
        row.tell(root)
        wanted = np.stack([expected(guess, i) for guess in guesses])
        np.testing.assert_allclose(row.log_probs(), wanted, rtol=2e-5, atol=5e-5)


def test_roots_are_distinct_learnt_positions_and_the_rest_is_no_position() -> None:
    weights = np.zeros((3, 10), np.float32)
    weights[0], weights[1, [0, 4, 7]] = 1.0, 1.0
    found = draw_roots(weights, count=4, seed=(1, 2))
    assert len(set(found[0].tolist()) & set(range(1, 10))) == 4
    assert sorted(found[1].tolist()) == [4, 7, 10, 10]
    assert found[2].tolist() == [10] * 4
    np.testing.assert_array_equal(found, draw_roots(weights, count=4, seed=(1, 2)))


def test_the_loss_of_blocks_weighs_terms_depths_and_the_row_s_end() -> None:
    """In float64 by hand: cross entropy, shared mass, selector with the answer put in, confidence.

    Row 0 has a root two tokens before its end, and one that is no position.
    """
    draft_ids, rng = np.arange(V), np.random.default_rng(4)
    target = rng.standard_normal((1, 8, V))
    roots = np.asarray([[1, 6, 8]])
    guesses = [
        Guess(
            logits=jnp.asarray(rng.standard_normal((1, 3, V)), jnp.float32),
            roots=jnp.asarray(roots),
            reranked=jnp.asarray(rng.standard_normal((1, 3, V)), jnp.float32),
            confidence=jnp.asarray(rng.standard_normal((1, 3)), jnp.float32),
            num_candidates=4,
        )
        for _ in range(DEPTHS)
    ]
    features = TargetFeatures(hidden=jnp.zeros((1, 8, 0)), aux=jnp.zeros((1, 8, 0)))
    weights = LossWeights(
        cross=0.5, overlap=2.0, selector=3.0, confidence=4.0, decay=0.5, least=0.4
    )
    loss = draft_loss(lambda *_: (features, jnp.asarray(target, jnp.float32), guesses), weights)
    counts = np.ones((1, 8), np.float32)
    counts[0, 7] = 0.0
    batch = {"weights": jnp.asarray(counts)}
    frozen = make_frozen({}, draft_ids)
    total, metrics = loss({}, frozen, batch, jax.random.key(0))

    wanted = 0.0
    for depth, guess in enumerate(guesses):
        terms = []
        for i, root in enumerate(roots[0]):
            place = root + depth
            if place > 7 or not counts[0, place]:
                continue
            logits, other = np.asarray(guess.logits)[0, i], np.asarray(guess.reranked)[0, i]
            p, log_q = np.exp(log_softmax(target[0, place])), log_softmax(logits)
            shared = np.minimum(p, np.exp(log_q)).sum()
            found = np.argsort(-logits)[:4].tolist()
            answer = int(target[0, place].argmax())
            found = found if answer in found else [*found[:3], answer]
            ranked = log_softmax(other[found])[found.index(answer)]
            c = 1 / (1 + np.exp(-float(np.asarray(guess.confidence)[0, i])))
            missed = -shared * np.log(c) - (1 - shared) * np.log(1 - c)
            terms.append(
                -0.5 * (p * log_q).sum() + 2.0 * (1 - shared) - 3.0 * ranked + 4.0 * missed
            )
        wanted += (1.0, 0.5, 0.4)[depth] * np.mean(terms)
    assert float(total) == pytest.approx(wanted, rel=1e-4)
    assert metrics["selector"].shape == (DEPTHS,)
