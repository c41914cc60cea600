"""Batches are functions of (seed, step); an epoch covers every token about once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import ConfigError
from jspec.training.data import token_stream
from jspec.training.data.token_stream import TokenStream


def stream_of(num_tokens: int) -> TokenStream:
    return TokenStream(ids=np.arange(num_tokens, dtype=np.int32), starts=np.asarray([0]))


@given(st.integers(1, 20), st.integers(2, 200), st.integers(0, 5), st.integers(0, 3))
def test_the_crops_of_an_epoch_do_not_overlap(
    length: int, pieces: int, seed: int, epoch: int
) -> None:
    num_tokens = length * pieces
    starts = token_stream.crop_starts(num_tokens, length=length, seed=seed, epoch=epoch)
    covered = (starts[:, None] + np.arange(length)).ravel()
    assert len(set(covered.tolist())) == len(covered)
    assert covered.min() >= 0
    assert covered.max() < num_tokens
    assert len(covered) > num_tokens - 2 * length


@given(st.integers(0, 50), st.integers(1, 5))
def test_a_batch_depends_on_its_step_alone(step: int, batch_size: int) -> None:
    first = token_stream.crops(stream_of(97), batch_size=batch_size, length=7, seed=3)
    second = token_stream.crops(stream_of(97), batch_size=batch_size, length=7, seed=3)
    for earlier in range(step):
        first(earlier)
    np.testing.assert_array_equal(first(step), second(step))
    np.testing.assert_array_equal(np.diff(first(step), axis=1), 1)


def test_rows_show_each_row_once_an_epoch() -> None:
    table = np.arange(12).reshape(6, 2)
    batch_at = token_stream.rows(table, batch_size=3, seed=0)
    for epoch in range(3):
        seen = np.concatenate((batch_at(2 * epoch), batch_at(2 * epoch + 1)))
        assert sorted(seen[:, 0].tolist()) == [0, 2, 4, 6, 8, 10]


def test_joined_batches_lie_under_each_other() -> None:
    parts = [
        token_stream.rows(np.full((4, 2), value), batch_size=value, seed=0) for value in (1, 2)
    ]
    np.testing.assert_array_equal(token_stream.joined(parts)(5), [[1, 1], [2, 2], [2, 2]])


def test_held_out_crops_reach_both_ends() -> None:
    table = token_stream.fixed_crops(stream_of(50), count=4, length=10)
    assert table[0, 0] == 0
    assert table[-1, -1] == 49


def test_text_shorter_than_two_crops_is_an_error() -> None:
    with pytest.raises(ConfigError, match="19 tokens"):
        token_stream.crop_starts(19, length=10, seed=0, epoch=0)
    with pytest.raises(ConfigError, match="9 tokens"):
        token_stream.fixed_crops(stream_of(9), count=1, length=10)
