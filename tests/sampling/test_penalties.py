"""Penalties at a node, by brute force on trees."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.device.batch import DraftTree
from jspec.device.state import SamplingBatch, Seen, empty_sampling
from jspec.messages.request import MAX_BIASES
from jspec.sampling.penalties import count_emitted, path_tokens, penalize
from tests.sampling.trees import shallow_parents, tree_of

B, N, V, LEVELS = 2, 7, 5, 4
PADDING = V


def path_of(parents: list[int], node: int) -> list[int]:
    """Return the nodes from `node` up to, but without, the root."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path


def seen_of(counts: jax.Array) -> Seen:
    """Put every other id in the prompt."""
    marks = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int8) % 2, (B, V))
    return Seen(output_counts=counts, prompt_marks=marks)


@jax.jit
def _penalized(
    logits: jax.Array, rows: SamplingBatch, tree: DraftTree, seen: Seen, num: jax.Array
) -> jax.Array:
    return penalize(
        logits,
        rows,
        token_ids=jnp.arange(V, dtype=jnp.int32),
        seen=seen,
        tokens_on_path=path_tokens(tree, num_levels=LEVELS),
        num_output=num,
    )


ids = st.integers(0, V - 1)
penalty = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 2.0])
rows_of_trees = st.lists(
    st.tuples(
        shallow_parents(nodes=N, levels=LEVELS),
        st.lists(ids, min_size=N, max_size=N),  # tokens, the root's included
        st.lists(ids, max_size=6),  # emitted before the root
        penalty,
        penalty,
        st.lists(ids, max_size=2),  # stop ids
        st.integers(0, 10),  # min_new_tokens
        st.sampled_from([0.5, 1.0, 1.7]),  # repetition
        st.lists(ids, max_size=2),  # the prompt
        st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 3.0]), max_size=3),
    ),
    min_size=B,
    max_size=B,
)


@settings(max_examples=60)
@given(rows_of_trees)
def test_every_node_sees_its_own_path(cases: list[tuple]) -> None:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, N, V)).astype(np.float32)
    columns = zip(*cases, strict=True)
    parents, tokens, emitted, frequency, presence, stops, least, repetition, prompts, biases = (
        columns
    )
    tree = tree_of(list(tokens), list(parents))
    counts = np.zeros((B, V), np.int32)
    stop_ids = np.full((B, 16), PADDING, np.int32)
    marks = np.zeros((B, V), np.int8)
    bias_pairs = np.full((B, MAX_BIASES, 2), PADDING, np.int32)
    expected = logits.astype(np.float64)
    num_output = np.zeros((B, N), np.int32)
    for b in range(B):
        output = [*emitted[b], tokens[b][0]]  # the root was emitted, and is counted once
        np.add.at(counts[b], output, 1)
        stop_ids[b, : len(stops[b])] = stops[b]
        marks[b, prompts[b]] = 1
        for i, (token_id, bias) in enumerate(biases[b].items()):
            bias_pairs[b, i] = token_id, np.float32(bias).view(np.int32)
        for n in range(N):
            before = output + [tokens[b][i] for i in path_of(parents[b], n)]
            num_output[b, n] = len(before)
            for v in range(V):
                occurrences = before.count(v)
                if occurrences or v in prompts[b]:
                    is_positive = expected[b, n, v] > 0
                    expected[b, n, v] *= 1 / repetition[b] if is_positive else repetition[b]
                expected[b, n, v] -= frequency[b] * occurrences + presence[b] * (occurrences > 0)
                expected[b, n, v] += biases[b].get(v, 0.0)
                if v in stops[b] and len(before) < least[b]:
                    expected[b, n, v] = -np.inf
    rows = SamplingBatch(
        **{
            **vars(empty_sampling(B, vocab_size=V)),
            "frequency_penalty": jnp.asarray(frequency, jnp.float32),
            "presence_penalty": jnp.asarray(presence, jnp.float32),
            "min_new_tokens": jnp.asarray(least, jnp.int32),
            "stop_ids": jnp.asarray(stop_ids),
            "repetition_penalty": jnp.asarray(repetition, jnp.float32),
            "logit_bias": jnp.asarray(bias_pairs),
        }
    )
    result = _penalized(
        jnp.asarray(logits),
        rows,
        tree,
        Seen(output_counts=jnp.asarray(counts), prompt_marks=jnp.asarray(marks)),
        jnp.asarray(num_output),
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_no_penalty_leaves_every_bit_alone() -> None:
    """Padding stop ids (V) stop nothing, even below the minimum length."""
    logits = np.random.default_rng(3).normal(size=(B, N, V)).astype(np.float32)
    logits[0, 0, 0], logits[0, 0, 1] = -0.0, -np.inf
    rows = empty_sampling(B, vocab_size=V)
    rows = SamplingBatch(**{**vars(rows), "min_new_tokens": jnp.full(B, 100, jnp.int32)})
    tree = tree_of([[1] * N] * B, [[-1, *range(4), 0, 0]] * B)
    seen = seen_of(jnp.full((B, V), 1000, jnp.int32))
    result = _penalized(jnp.asarray(logits), rows, tree, seen, jnp.zeros((B, N), jnp.int32))
    np.testing.assert_array_equal(result, logits)


_count_from_id_1 = jax.jit(partial(count_emitted, first_id=1))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(-1, V + 1), st.booleans()), min_size=8, max_size=8
    )
)
def test_count_emitted_adds_what_is_valid_and_its_own(entries: list[tuple[int, int, bool]]) -> None:
    """The shard holds ids 1..V-2; ids in front of it, after it, and -1 change nothing."""
    slots, emitted, valid = zip(*entries, strict=True)
    before = np.arange(3 * (V - 2), dtype=np.int32).reshape(3, V - 2)
    expected = before.copy()
    for slot, token, is_valid in entries:
        if is_valid and 1 <= token <= V - 2:
            expected[slot, token - 1] += 1
    after = _count_from_id_1(
        jnp.asarray(before),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(emitted, jnp.int32),
        jnp.asarray(valid),
    )
    np.testing.assert_array_equal(after, expected)
