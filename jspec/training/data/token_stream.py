"""Token streams and batches. Batches are functions of (seed, step), so no state is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jspec.errors import ConfigError

BatchAt = Callable[[int], Any]  # step -> arrays [B, ...], alone or in a dict


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Documents packed end to end, each after an end-of-text token."""

    ids: np.ndarray  # u16 or i32 [num_tokens]
    starts: np.ndarray  # of each document


def pack(tokenizer: Tokenizer, texts: Sequence[str], *, separator_id: int) -> TokenStream:
    order = np.random.default_rng(0).permutation(len(texts))
    encodings = tokenizer.encode_batch_fast([texts[i] for i in order])
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32
    parts = [np.asarray([separator_id, *encoding.ids], dtype) for encoding in encodings]
    lens = np.asarray([len(part) for part in parts])
    return TokenStream(ids=np.concatenate(parts), starts=np.cumsum(lens) - lens)


def crop_starts(num_tokens: int, *, length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the starts of the epoch's crops: pieces of `length`, shifted and shuffled. With 10
    tokens, length 3 and shift 1 (drawn from 0, 1, 2) they are 1, 4, 7 in some order."""
    if num_tokens < 2 * length:
        raise ConfigError(
            f"the text has {num_tokens} tokens; expected at least {2 * length}, twice the "
            f"sequence length {length}"
        )
    random = np.random.default_rng((seed, epoch))
    shift = int(random.integers(length))
    return random.permutation(np.arange(shift, num_tokens - length + 1, length))


def crops(stream: TokenStream, *, batch_size: int, length: int, seed: int) -> BatchAt:
    """Return step -> i32[batch_size, length] random crops, epoch after epoch."""
    num_tokens = len(stream.ids)
    num_crops = (num_tokens - length + 1) // length
    window = np.arange(length)
    cached: dict[int, np.ndarray] = {}

    def starts_of(epoch: int) -> np.ndarray:
        if epoch not in cached:
            cached.clear()
            cached[epoch] = crop_starts(num_tokens, length=length, seed=seed, epoch=epoch)
        return cached[epoch]

    def batch_at(step: int) -> np.ndarray:
        rows = range(step * batch_size, (step + 1) * batch_size)
        starts = [starts_of(row // num_crops)[row % num_crops] for row in rows]
        return np.asarray(stream.ids[np.asarray(starts)[:, None] + window], np.int32)

    return batch_at


def picks(num_rows: int, *, batch_size: int, seed: int) -> Callable[[int], np.ndarray]:
    """Return step -> i64[batch_size] row indices, reshuffled in every epoch."""
    cached: dict[int, np.ndarray] = {}

    def order_of(epoch: int) -> np.ndarray:
        if epoch not in cached:
            cached.clear()
            cached[epoch] = np.random.default_rng((seed, epoch)).permutation(num_rows)
        return cached[epoch]

    def rows_of(step: int) -> np.ndarray:
        drawn = range(step * batch_size, (step + 1) * batch_size)
        return np.asarray([order_of(row // num_rows)[row % num_rows] for row in drawn])

    return rows_of


def rows(table: np.ndarray, *, batch_size: int, seed: int) -> BatchAt:
    rows_of = picks(len(table), batch_size=batch_size, seed=seed)
    return lambda step: np.asarray(table[rows_of(step)], np.int32)


def joined(parts: Sequence[BatchAt]) -> BatchAt:
    return lambda step: np.concatenate([part(step) for part in parts])


def fixed_crops(stream: TokenStream, *, count: int, length: int) -> np.ndarray:
    """Return i32[count, length]: crops evenly spread over the stream, for held-out losses."""
    last = len(stream.ids) - length
    if last < 0:
        raise ConfigError(
            f"the held-out text has {len(stream.ids)} tokens; expected at least {length}"
        )
    starts = np.linspace(0, last, count).astype(np.int64)
    return np.asarray(stream.ids[starts[:, None] + np.arange(length)], np.int32)
