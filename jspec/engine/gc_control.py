"""Python's garbage collector, told what stays.

jax, its programs and a model's bookkeeping are a quarter of a million objects. A full collection
walks through all of them with the interpreter's lock held, so that no step is planned and no token
is sent meanwhile; small ones run every few steps of a full batch.
"""

from __future__ import annotations

import gc

# Containers made and not yet freed that begin a collection of the youngest; Python begins at 700.
# Those of a step are freed by their counts alone; only cycles, a request's tasks, wait for this.
YOUNGEST = 20_000
COLLECTIONS_BETWEEN = (20, 10)  # of the youngest before the next age's; of that before all


def collect_seldom() -> None:
    """For a process of ours, as it starts: what tracing makes mostly stays; 2 s of a start."""
    gc.set_threshold(YOUNGEST, *COLLECTIONS_BETWEEN)


def settle_heap() -> None:
    """Takes all objects of this process out of the collector's sight, and makes it run seldom.

    For a process that only serves from here on. Takes as long as one full collection. What is let
    go later is freed by its count as before; of what is here now, a cycle is not.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
