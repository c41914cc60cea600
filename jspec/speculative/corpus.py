"""Reading the ids that lookup drafting may search beside a row's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jspec.core.errors import ConfigError


def read_corpus(path: Path, *, vocab_size: int, max_tokens: int) -> np.ndarray:
    """i32[n], 2 <= n <= max_tokens: the first ids of a .npy array, or of text with ids between
    white space.

    Raises ConfigError for a file that is not there or holds anything else, and for an id outside
    the vocabulary.
    """
    name = f"speculative_ngram_external_corpus_path is {str(path)!r}"
    try:
        found = np.load(path) if path.suffix == ".npy" else _ids_of_text(path)
    except (OSError, EOFError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name}; expected a .npy array of token ids, or text of them ({error})"
        ) from error
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer) or found.size < 2:
        raise ConfigError(
            f"{name}, which holds {found.dtype}{list(found.shape)}; expected integers in one "
            f"dimension, at least two"
        )
    ids = found[:max_tokens]
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ConfigError(f"{name}, which holds id {outside[0]}; expected ids below {vocab_size}")
    return ids.astype(np.int32)


def _ids_of_text(path: Path) -> np.ndarray:
    return np.array([int(word) for word in path.read_text(encoding="utf-8").split()], np.int64)
