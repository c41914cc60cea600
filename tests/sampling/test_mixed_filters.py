"""Rows with different filters in one batch, on one to four vocabulary shards.

Whether a program filters depends on all rows of its batch, and each shard compares its own logits
with one threshold, which often is one of them to the bit. So a row without filters must be chosen
as by a program that filters nothing, and a filtered row must have the token of the definition, at
temperatures by which a division and a product with the inverse round differently. The logits come
from arithmetic inside the program, as penalties are, which a compiler may repeat where it reads
them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jspec.device.state import SamplingBatch, Seen, empty_sampling
from jspec.layers.linear import Shard
from jspec.messages.request import SamplingParams
from jspec.pallas_kernels.bundles import OPS
from jspec.sampling.choose import choose
from jspec.sampling.margin import margin
from jspec.sampling.penalties import penalize

# 36 or 18 ids a shard: neither a whole number of vectors nor what one vector holds.
V = 72
TEMPERATURES = (0.0, 0.7, 1.3, 1.5, 3.0)
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 2},
    {"min_p": 0.3},
    {"top_p": 0.05},
    {"top_k": 1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.3},
    {"top_k": V - 1},
)
FILTERED = tuple(
    SamplingParams(temperature=temperature, **filters)
    for temperature in TEMPERATURES
    for filters in FILTERS * 2
)
# So many that the least logit, the only one that a threshold could miss, is the choice of some.
UNFILTERED = tuple(SamplingParams(temperature=each) for each in TEMPERATURES) * 800
Settings = tuple[SamplingParams, ...]


@dataclass(frozen=True)
class Batch:
    """Sampling rows, flat logits so that every token may win, and emitted tokens."""

    rows: SamplingBatch
    logits: jax.Array
    seen: Seen
    seeds: np.ndarray  # u64[B]
    positions: np.ndarray  # i32[B]


def batch_of(settings: Settings, *, penalized: bool) -> Batch:
    rng, count = np.random.default_rng(0), len(settings)
    seeds = rng.integers(0, 2**64, count, np.uint64)
    words = np.stack((seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)), axis=1)
    rows = dataclasses.replace(
        empty_sampling(count, vocab_size=V),
        seed=jnp.asarray(words.astype(np.uint32)),
        temperature=jnp.asarray([each.temperature for each in settings], jnp.float32),
        top_k=jnp.asarray([V if each.top_k < 0 else each.top_k for each in settings], jnp.int32),
        top_p=jnp.asarray([each.top_p for each in settings], jnp.float32),
        min_p=jnp.asarray([each.min_p for each in settings], jnp.float32),
    )
    if penalized:
        biases = np.full(rows.logit_bias.shape, V)
        biases[:, :5, 0] = rng.permuted(np.tile(np.arange(V), (count, 1)), axis=1)[:, :5]
        biases[:, :5, 1] = rng.normal(0, 0.2, (count, 5)).astype(np.float32).view(np.int32)
        rows = dataclasses.replace(
            rows,
            frequency_penalty=jnp.asarray(rng.uniform(0, 0.1, count), jnp.float32),
            presence_penalty=jnp.asarray(rng.uniform(0, 0.1, count), jnp.float32),
            repetition_penalty=jnp.asarray(rng.uniform(1, 1.3, count), jnp.float32),
            min_new_tokens=jnp.asarray(rng.integers(0, 9, count), jnp.int32),
            stop_ids=jnp.asarray(rng.integers(0, V + 1, rows.stop_ids.shape), jnp.int32),
            logit_bias=jnp.asarray(biases, jnp.int32),
        )
    flat = rng.normal(0, 0.3, (count, 1, V))
    ties = rng.random((count, 1, 1)) < 0.3
    return Batch(
        rows=rows,
        logits=jnp.asarray(np.where(ties, flat.round(1), flat), jnp.float32),
        seen=Seen(
            output_counts=jnp.asarray(rng.integers(0, 3, (count, V)), jnp.int32),
            prompt_marks=jnp.asarray(rng.integers(0, 2, (count, V)), jnp.int8),
        ),
        seeds=seeds,
        positions=np.arange(count, dtype=np.int32) % 50,
    )


def penalties(logits: jax.Array, ids: jax.Array, seen: Seen, rows: SamplingBatch) -> jax.Array:
    count = logits.shape[0]
    return penalize(
        logits,
        rows,
        token_ids=ids,
        seen=seen,
        tokens_on_path=jnp.zeros((count, 1, 0), jnp.int32),
        num_output=jnp.ones((count, 1), jnp.int32),
    )


@functools.cache
def chosen_by(
    settings: Settings, shards: int, ops: str = "xla", *, filtered: bool, penalized: bool
) -> np.ndarray:
    """Return i32[shards, B]: the choice on each shard."""
    batch = batch_of(settings, penalized=penalized)

    def on_shard(logits: jax.Array, ids: jax.Array, seen: Seen, rows: SamplingBatch) -> jax.Array:
        if penalized:
            logits = penalties(logits, ids, seen, rows)
        return choose(
            logits,
            rows,
            positions=jnp.asarray(batch.positions)[:, None],
            token_ids=ids,
            filtered=filtered,
            shard=Shard(shards, "tensor"),
            ops=OPS[ops],
        )[None]

    split = PartitionSpec(None, "tensor")
    run = jax.jit(
        jax.shard_map(
            on_shard,
            mesh=Mesh(np.array(jax.devices("cpu")[:shards]), ("tensor",)),
            in_specs=(
                PartitionSpec(None, None, "tensor"),
                PartitionSpec("tensor"),
                split,
                PartitionSpec(),
            ),
            out_specs=PartitionSpec("tensor"),
            check_vma=False,
        )
    )
    ids = jnp.arange(V, dtype=jnp.int32)
    return np.asarray(run(batch.logits, ids, batch.seen, batch.rows))[..., 0]


@pytest.mark.parametrize(("shards", "penalized"), [(1, True), (2, False), (4, True)])
def test_a_row_without_filters_is_chosen_as_where_no_row_has_any(
    shards: int, penalized: bool
) -> None:
    found = chosen_by(UNFILTERED, shards, filtered=True, penalized=penalized)
    expected = chosen_by(UNFILTERED, 1, filtered=False, penalized=penalized)
    np.testing.assert_array_equal(found, np.repeat(expected, shards, axis=0))
    logits = np.asarray(batch_of(UNFILTERED, penalized=False).logits)[:, 0]
    if not penalized:
        assert (expected[0] == logits.argmin(axis=-1)).sum() > 20


@pytest.mark.parametrize("penalized", [False, True])
def test_a_filtered_row_has_the_token_of_the_definition(penalized: bool) -> None:
    (chosen,) = chosen_by(FILTERED, 1, filtered=True, penalized=penalized)
    batch = batch_of(FILTERED, penalized=penalized)
    logits = batch.logits
    if penalized:
        logits = penalties(logits, jnp.arange(V, dtype=jnp.int32), batch.seen, batch.rows)
    for i, row in enumerate(np.maximum(np.asarray(logits)[:, 0], -1e9)):  # stops are -inf
        seed, position = int(batch.seeds[i]), int(batch.positions[i])
        sampling = FILTERED[i]
        off = margin(row, int(chosen[i]), sampling=sampling, seed=seed, position=position)
        assert off < 1e-5, (i, sampling)


@pytest.mark.parametrize(
    ("shards", "ops", "penalized"),
    [
        (2, "xla", True),
        (4, "xla", False),
        pytest.param(2, "gpu_interpret", True, marks=pytest.mark.slow),
    ],
)
def test_every_shard_takes_the_token_of_one_device(shards: int, ops: str, penalized: bool) -> None:
    found = chosen_by(FILTERED, shards, ops, filtered=True, penalized=penalized)
    expected = chosen_by(FILTERED, 1, filtered=True, penalized=penalized)
    np.testing.assert_array_equal(found, np.repeat(expected, shards, axis=0))
