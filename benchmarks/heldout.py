"""Prompts from the standard library's held-out files, on which the bundled pair was not trained."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

from jspec.text.tokenizer.tokenizer import Tokenizer
from jspec.training.data.corpus import Document, Split, of_split, standard_library


def heldout_prompts(
    tokenizer: Tokenizer,
    *,
    count: int,
    length: int,
    seed: int = 0,
    corpus: list[Document] | None = None,
) -> list[tuple[int, ...]]:
    """Return `count` stretches of `length` tokens, evenly over the held-out files of this Python.

    corpus: another Python's (`read_corpus`), so that machines measure on the same files; the names
    of modules decide which are held out, in every version. Raises ValueError if the installation
    has too little held-out source (a stripped Python).
    """
    documents = of_split(standard_library() if corpus is None else corpus, Split.HELD_OUT)
    streams = [tokenizer.encode(d.text, add_special_tokens=False) for d in documents]
    streams = [ids for ids in streams if len(ids) > length]
    if not streams:
        version = platform.python_version()
        raise ValueError(f"Python {version} has no held-out file of {length} tokens; expected one")
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        ids = streams[i % len(streams)]
        start = int(rng.integers(0, len(ids) - length))
        prompts.append(tuple(ids[start : start + length]))
    return prompts


def repeated_share(ids: list[int], *, size: int = 8) -> float:
    """Return the share of the output's n-grams that occurred before: how much it loops."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    total = max(len(ids) - size + 1, 1)
    for start in range(len(ids) - size + 1):
        gram = tuple(ids[start : start + size])
        repeated += gram in seen
        seen.add(gram)
    return repeated / total


def bootstrap_interval(
    values: list[tuple[float, float]], *, rounds: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return (ratio, low, high): 95% interval of sum(a) / sum(b) over resampled prompts."""
    pairs = np.array(values, float)
    rng = np.random.default_rng(seed)
    drawn = pairs[rng.integers(0, len(pairs), (rounds, len(pairs)))].sum(axis=1)
    ratios = drawn[:, 0] / drawn[:, 1]
    low, high = np.percentile(ratios, (2.5, 97.5))
    mean = pairs[:, 0].sum() / pairs[:, 1].sum()
    return float(mean), float(low), float(high)


def results_path(name: str) -> Path:
    return Path(__file__).parent / "results" / f"{name}.json"
