"""The GPU kernels of chunks of prompts through delta nets, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.delta_rule import gpu_chunks, reference
from jspec.pallas_kernels.delta_rule.reference import Tokens
from jspec.pallas_kernels.delta_rule.tuning import ChunkTuning
from jspec.pallas_kernels.ops import Ops
from tests.layers.mixer_rows import Rows
from tests.layers.test_mixers import mixed_of

PADDING = 22  # tokens after the last row
pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*")


@dataclass(frozen=True, slots=True)
class ChunkOps(Ops):
    """XLA, but for the kernels under test."""

    name = "chunks"

    def delta_rule(self, *given: Any, queries_per_row: int | None) -> Any:
        if queries_per_row is not None:
            return Ops.delta_rule(self, *given, queries_per_row=queries_per_row)
        return reference.run_chunks(*given, run=partial(gpu_chunks.run_blocks, interpret=True))


def test_any_history_gives_the_definition() -> None:
    rows = Rows(mixed_of("delta_net"), seed=2, page_size=4, ops=ChunkOps())
    rows.chunk((6, 1, 9))
    rows.verify(7, topk=2)
    rows.restart(1)
    rows.chunk((0, 5, 3))
    rows.verify(7, topk=2, dead=[1])


def tokens_of(size: int, *, is_hard: bool, key_dim: int, value_dim: int) -> Tokens:
    """Return random tokens of two key heads and four value heads, the last of them NaN.

    is_hard: keys are nearly alike, and nothing fades, so that powers of the system are huge.
    """
    rng = np.random.default_rng(size)

    def drawn(*shape: int) -> Any:
        return rng.normal(size=(size, *shape)).astype(np.float32)

    def given(x: Any) -> jax.Array:
        x[-PADDING:] = np.nan
        return jnp.asarray(x)

    q, k = drawn(2, key_dim), drawn(2, key_dim) * (0.01 if is_hard else 1) + is_hard
    return Tokens(
        q=given(q / np.linalg.norm(q, axis=-1, keepdims=True)),
        k=given(k / np.linalg.norm(k, axis=-1, keepdims=True)),
        v=given(drawn(4, value_dim)),
        decay=given(-np.exp(drawn(4)) * np.float32(1e-3 if is_hard else 0.3)),
        beta=given(1 / (1 + np.exp(-drawn(4) - 6 * is_hard))),
    )


@pytest.mark.parametrize(("lens", "is_hard"), [((200, 0, 1, 64, 65), False), ((70, 130), True)])
def test_packed_rows_give_what_the_reference_gives(lens: tuple[int, ...], is_hard: bool) -> None:
    """Tokens after the last row are NaN and give zeros; a row without tokens keeps its state."""
    ends = np.append(0, np.cumsum(lens))
    size, key_dim, value_dim = int(ends[-1]) + PADDING, 6, 5
    tokens = tokens_of(size, is_hard=is_hard, key_dim=key_dim, value_dim=value_dim)
    states = np.random.default_rng(1).normal(size=(len(lens), 4, key_dim, value_dim))
    given = (jnp.asarray(states, jnp.float32), tokens, jnp.asarray(ends, jnp.int32))
    expected, after = reference.run_blocks(*given)
    tuning = ChunkTuning(strip=4, channels=4)
    with jax.default_matmul_precision("highest"):
        out, found = gpu_chunks.run_blocks(*given, tuning=tuning, interpret=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(found, after, atol=1e-5)
    assert not np.asarray(out[ends[-1] :]).any()
    np.testing.assert_array_equal(found[np.equal(lens, 0)], given[0][np.equal(lens, 0)])
