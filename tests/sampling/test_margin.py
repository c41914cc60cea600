"""The margin of a token, against the choice that it explains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.messages.request import SamplingParams
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from jspec.sampling.margin import margin

V = 24


def row(**given: float) -> SamplingParams:
    return SamplingParams.from_mapping({"temperature": 1.0, **given})


def choice_of(logits: np.ndarray, sampling: SamplingParams, *, seed: int, position: int) -> int:
    """Choose as the device does."""
    rows = empty_sampling(1, vocab_size=V)
    changed = {
        "temperature": jnp.asarray([sampling.temperature], jnp.float32),
        "top_k": jnp.asarray([sampling.top_k if sampling.top_k > 0 else V], jnp.int32),
        "top_p": jnp.asarray([sampling.top_p], jnp.float32),
        "min_p": jnp.asarray([sampling.min_p], jnp.float32),
        "seed": jnp.asarray([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32),
    }
    rows = dataclasses.replace(rows, **changed)
    return int(_choose(jnp.asarray(logits), rows, jnp.asarray(position, jnp.int32)))


@jax.jit
def _choose(logits: jax.Array, rows: SamplingBatch, position: jax.Array) -> jax.Array:
    ids = choose(
        logits[None, None],
        rows,
        positions=position[None, None],
        token_ids=jnp.arange(V, dtype=jnp.int32),
        filtered=True,
        shard=Shard(),
        ops=Ops(),
    )
    return ids[0, 0]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**64 - 1),
    filters=st.sampled_from(
        [
            {},
            {"top_k": 3},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
        ]
    ),
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_the_choice_alone_has_no_margin(
    seed: int, filters: dict[str, float], temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, V).astype(np.float32)
    sampling = row(temperature=temperature, **filters)
    chosen = choice_of(logits, sampling, seed=seed, position=7)
    margins = [margin(logits, i, sampling=sampling, seed=seed, position=7) for i in range(V)]
    assert margins[chosen] == pytest.approx(0, abs=1e-5)
    assert min(value for i, value in enumerate(margins) if i != chosen) > 0


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_a_change_of_the_margin_s_size_makes_it_the_choice(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, V).astype(np.float32)
    sampling, token = row(), seed % V
    size = margin(logits, token, sampling=sampling, seed=seed, position=3)
    assume(size == 0 or size > 2e-3)
    for more, is_chosen in ((1e-3, True), (-1e-3, False))[: 2 if size else 1]:
        raised = logits.copy()
        raised[token] += size + more
        assert (choice_of(raised, sampling, seed=seed, position=3) == token) is is_chosen
