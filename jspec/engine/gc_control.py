"""Settings of Python's garbage collector.

jax, its programs and a model's bookkeeping are a quarter of a million objects. A full collection
walks all of them while holding the interpreter's lock, so that no step is planned and no token is
sent meanwhile; young collections run every few steps of a full batch.
"""

from __future__ import annotations

import gc

# Container allocations, minus frees, that start a youngest-generation collection; Python's default
# is 700. Objects of a step are freed by reference count; only cycles (a request's tasks) need this.
YOUNGEST = 20_000
COLLECTIONS_BETWEEN = (20, 10)  # youngest collections per middle one; middle per full one


def collect_seldom() -> None:
    """Collect rarely, from process start: most objects of tracing stay. Saves 2 s of a start."""
    gc.set_threshold(YOUNGEST, *COLLECTIONS_BETWEEN)


def freeze_heap() -> None:
    """Freeze all objects of this process and make collections rare, once it only serves.

    Takes as long as one full collection. Frozen cycles are not freed any more.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
