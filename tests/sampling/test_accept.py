"""The walk down the tree, against a walk in plain Python, and its effect on the emitted text.

With shared noise the text of a request equals plain sampling's, token for token, whatever was
drafted; here with a model that is a table of logits by previous token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.device.batch import DraftTree
from jspec.device.state import SamplingBatch, Seen, empty_sampling
from jspec.layers.linear import Shard
from jspec.pallas_kernels.bonus_token.reference import gather_bonus, gather_path
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.accept import accept_tree
from jspec.sampling.choose import choose
from jspec.sampling.penalties import path_tokens, penalize
from jspec.spec import indexing
from tests.sampling.trees import shallow_parents, tree_of
from tests.support.goodness_of_fit import assert_fits

N, LEVELS, V = 9, 4, 3


_accept = jax.jit(accept_tree, static_argnames="num_levels")


def walk(tokens: list[int], parents: list[int], target_ids: list[int]) -> list[int]:
    """Return the accepted nodes, the root first."""
    path = [0]
    while True:
        wanted = target_ids[path[-1]]
        children = [i for i, parent in enumerate(parents) if parent == path[-1]]
        equal = [child for child in children if tokens[child] == wanted]
        if not equal:
            return path
        path.append(equal[0])


@st.composite
def random_tree(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Return (tokens, parents, target ids), at most LEVELS deep; siblings may share a token."""
    parents = draw(shallow_parents(nodes=N, levels=LEVELS))
    ids = st.lists(st.integers(0, V - 1), min_size=N, max_size=N)
    return draw(ids), parents, draw(ids)


@settings(max_examples=50)
@given(st.lists(random_tree(), min_size=3, max_size=3))
def test_the_walk_is_the_plain_one(cases: list[tuple[list[int], list[int], list[int]]]) -> None:
    tokens, parents, target_ids = (list(column) for column in zip(*cases, strict=True))
    node_path, num_accepted = _accept(
        tree_of(tokens, parents), jnp.asarray(target_ids, jnp.int32), num_levels=LEVELS
    )
    for b, case in enumerate(cases):
        path = walk(*case)
        assert int(num_accepted[b]) == len(path) - 1
        assert node_path[b].tolist() == path + [0] * (LEVELS + 1 - len(path))


def test_a_tree_of_one_node_accepts_nothing() -> None:
    node_path, num_accepted = _accept(
        tree_of([[5], [6]], [[-1], [-1]]), jnp.asarray([[5], [6]], jnp.int32), num_levels=0
    )
    assert node_path.tolist() == [[0], [0]]
    assert num_accepted.tolist() == [0, 0]


# ---- The emitted text: a model of VOCABULARY ids, whose logits depend on the previous token.

VOCABULARY, SEEDS, LENGTH = 5, 20_000, 3
START, ROOT = 20, 1  # L and the root's id: sampling begins at position L + 1
TABLE = np.random.default_rng(8).normal(0, 1.2, (VOCABULARY, VOCABULARY)).astype(np.float32)


@dataclass(frozen=True)
class Guess:
    """A drafter's guesses after the root, the same for all seeds: wrong for some, right for
    some."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


GUESSES = {
    "plain": Guess((ROOT,), (-1,)),
    "tree": Guess((ROOT, 0, 2, 3, 4, 0, 3), (-1, 0, 0, 1, 1, 2, 2)),
    "lopsided": Guess((ROOT, 4, 2, 2, 1), (-1, 0, 0, 2, 2)),
}
SETTINGS = {
    "free": {},
    "filtered": {"top_k": 4, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    "hot": {"temperature": 1.7},
}


def sampling(name: str) -> SamplingBatch:
    seeds = np.arange(SEEDS, dtype=np.uint32)
    rows = {
        **vars(empty_sampling(SEEDS, vocab_size=VOCABULARY)),
        "seed": jnp.asarray(np.stack((0 * seeds, seeds), axis=1)),
        "temperature": jnp.ones(SEEDS),
    }
    for key, value in SETTINGS[name].items():
        rows[key] = jnp.full(SEEDS, value, rows[key].dtype)
    return SamplingBatch(**rows)


def choose_after(
    tree: DraftTree, seq_lens: jax.Array, rows: SamplingBatch, counts: jax.Array, *, num_levels: int
) -> jax.Array:
    """Return the model's token after every node, chosen like a verification does."""
    ids = jnp.arange(VOCABULARY, dtype=jnp.int32)
    positions = indexing.chosen_position(seq_lens[:, None], tree.depths)
    logits = penalize(
        jnp.asarray(TABLE)[tree.tokens],
        rows,
        token_ids=ids,
        seen=Seen(output_counts=counts, prompt_marks=jnp.zeros_like(counts, jnp.int8)),
        tokens_on_path=path_tokens(tree, num_levels=num_levels),
        num_output=positions,
    )
    return choose(
        logits, rows, positions=positions, token_ids=ids, filtered=True, shard=Shard(), ops=Ops()
    )


@partial(jax.jit, static_argnames=("tokens", "parents"))
def generate(
    rows: SamplingBatch, *, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (ids[SEEDS, LENGTH], num_accepted and last node of each row's first step).

    It runs as many steps as plain decoding needs; each drafts the same guess after its own root.
    """
    num_nodes = len(tokens)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    num_levels = max(depths)

    def broadcast(x: list[int] | tuple[int, ...]) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (SEEDS, num_nodes))

    root = jnp.full(SEEDS, ROOT, jnp.int32)
    seq_lens = jnp.full(SEEDS, START, jnp.int32)
    width = LENGTH * (num_levels + 1)
    output = jnp.zeros((SEEDS, width), jnp.int32)
    counts = jax.nn.one_hot(root, VOCABULARY, dtype=jnp.int32)
    first: tuple[jax.Array, jax.Array] | None = None
    for _ in range(LENGTH):
        guess = broadcast(tokens).at[:, 0].set(root)
        tree = DraftTree(tokens=guess, parents=broadcast(parents), depths=broadcast(depths))
        target_ids = choose_after(tree, seq_lens, rows, counts, num_levels=num_levels)
        node_path, num_accepted = accept_tree(tree, target_ids, num_levels=num_levels)
        emitted = gather_path(target_ids, node_path, num_accepted)
        step = jnp.arange(num_levels + 1)
        is_emitted = step <= num_accepted[:, None]
        column = jnp.where(is_emitted, (seq_lens - START)[:, None] + step, width)
        output = output.at[jnp.arange(SEEDS)[:, None], column].set(emitted, mode="drop")
        taken = jax.nn.one_hot(emitted, VOCABULARY, dtype=jnp.int32)
        counts = counts + jnp.sum(taken * is_emitted[..., None], axis=1)
        if first is None:
            last = jnp.take_along_axis(node_path, num_accepted[:, None], axis=1)[:, 0]
            first = (num_accepted, last)
        root = gather_bonus(emitted, num_accepted)
        seq_lens = seq_lens + num_accepted + 1
    assert first is not None
    return output[:, :LENGTH], *first


@cache
def generated(guess: str, setting: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = GUESSES[guess]
    ids, num_accepted, last = generate(
        sampling(setting), tokens=shape.tokens, parents=shape.parents
    )
    return np.asarray(ids), np.asarray(num_accepted), np.asarray(last)


def true_distribution(setting: str) -> np.ndarray:
    """Return P of each sequence of LENGTH ids, f64[VOCABULARY ** LENGTH], by enumeration."""
    options = {"temperature": 1.0, "top_k": VOCABULARY, "top_p": 1.0, "min_p": 0.0}
    options |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, **SETTINGS[setting]}
    odds: Counter[tuple[int, ...]] = Counter({(): 1.0})
    for _ in range(LENGTH):
        longer: Counter[tuple[int, ...]] = Counter()
        for prefix, weight in odds.items():
            seen = np.bincount((ROOT, *prefix), minlength=VOCABULARY)
            x = TABLE[(ROOT, *prefix)[-1]].astype(np.float64)
            x = x - options["frequency_penalty"] * seen - options["presence_penalty"] * (seen > 0)
            p = np.exp(x / options["temperature"])
            p /= p.sum()
            kept = [
                (p > own).sum() < options["top_k"]
                and p[p > own].sum() < options["top_p"] + (options["top_p"] == 1.0)
                and own >= options["min_p"] * p.max()
                for own in p
            ]
            p = np.where(kept, p, 0)
            for token in range(VOCABULARY):
                longer[(*prefix, token)] = weight * p[token] / p.sum()
        odds = longer
    flat = np.zeros(VOCABULARY**LENGTH)
    for sequence, weight in odds.items():
        flat[code(np.array([sequence]))[0]] = weight
    return flat


def code(ids: np.ndarray) -> np.ndarray:
    """Encode each row of ids[n, LENGTH] as one number."""
    return ids @ VOCABULARY ** np.arange(LENGTH)


@pytest.mark.slow_cases("lopsided", "tree-filtered", "tree-penalized")
@pytest.mark.parametrize(
    ("guess", "setting"),
    [("tree", "free"), ("tree", "penalized"), ("tree", "filtered"), ("lopsided", "hot")],
)
def test_speculation_emits_what_plain_sampling_emits(guess: str, setting: str) -> None:
    """Texts are equal token for token, for each of the seeds."""
    plain, _, _ = generated("plain", setting)
    ids, num_accepted, last = generated(guess, setting)
    np.testing.assert_array_equal(ids, plain)
    # The guess proves something: right and wrong at every level and, without filters, at each node.
    assert set(num_accepted.tolist()) == {0, 1, 2}
    if setting in ("free", "hot"):
        assert set(last.tolist()) == set(range(len(GUESSES[guess].tokens)))


@pytest.mark.parametrize("setting", ["free", "filtered", "penalized", "hot"])
def test_plain_sampling_has_the_distribution_of_the_target(setting: str) -> None:
    """So does speculation, which emits the same tokens."""
    ids, _, _ = generated("plain", setting)
    counts = np.bincount(code(ids), minlength=VOCABULARY**LENGTH)
    assert_fits(counts, true_distribution(setting))
