"""Counts of where two sets of texts diverge, and their table."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.heldout import bootstrap_interval

Row = dict[str, Any]


def first_divergence(ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the index of the first difference, or None: (5, 6, 9), (5, 6, 7) -> 2."""
    pairs = itertools.zip_longest(ids, reference)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def compare(texts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> Row:
    """Return what diverged, by prompt; a prompt counts up to and with the first differing token.

    In:  texts (1, 2, 3, 4), (1, 9, 9, 9); references (1, 2, 3, 4), (1, 2, 3, 4)
    Out: 1 of 2 diverged, at 1, in 4 + 2 tokens: 166.7 per 1,000
    """
    first = [first_divergence(a, b) for a, b in zip(texts, references, strict=True)]
    found = sorted(at for at in first if at is not None)
    counted = [
        len(ids) if at is None else at + 1 for at, ids in zip(first, references, strict=True)
    ]
    num_tokens = sum(counted)
    if found:
        pairs = [(float(at is not None), float(n)) for at, n in zip(first, counted, strict=True)]
        rate, low, high = bootstrap_interval(pairs)
    else:
        rate, low, high = 0.0, 0.0, 3.0 / num_tokens  # 0 in n: with 95%, fewer than 3 / n
    return {
        "num_prompts": len(first),
        "num_diverged": len(found),
        "tokens_compared": num_tokens,
        "per_1000_tokens": round(1e3 * rate, 3),
        "interval_95": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "first_positions": found,
        "median_first_position": statistics.median(found) if found else None,
    }


def table(rows: Sequence[Row]) -> str:
    """Return Markdown; positions count from 0, tokens up to each prompt's first divergence."""
    lines = [
        "| dtype | backend | what | against | T | prompts diverged | tokens | first at "
        "(median) | per 1,000 tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['dtype']} | {row['backend']} | {row['what']} | {row['against']} "
        head += f"| {row['temperature']:g} "
        if "not_compared" in row:
            lines.append(f"{head}| {row['not_compared']} | | | |")
            continue
        low, high = row["interval_95"]
        first = row["median_first_position"]
        lines.append(
            f"{head}| {row['num_diverged']} of {row['num_prompts']} | {row['tokens_compared']} "
            f"| {'' if first is None else f'{first:g}'} "
            f"| {row['per_1000_tokens']:.2f} [{low:.2f}, {high:.2f}] |"
        )
    return "\n".join(lines)
