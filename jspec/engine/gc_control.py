"""Settings of Python's garbage collector. A full collection visits a quarter of a million objects
while it holds the GIL, so that no step is planned and no token is sent."""

from __future__ import annotations

import gc

# Net container allocations that start a youngest-generation collection; Python's default is 700.
# Objects of a step are freed by reference count; only cycles (a request's tasks) need collection.
YOUNGEST = 20_000
COLLECTIONS_BETWEEN = (20, 10)  # youngest collections per middle one; middle per full one


def collect_seldom() -> None:
    """Collect rarely from process start, since most objects of tracing stay; saves 2 s."""
    gc.set_threshold(YOUNGEST, *COLLECTIONS_BETWEEN)


def freeze_heap() -> None:
    """Freeze all objects of a process that is about to serve, and make collections rare. Takes as
    long as one full collection."""
    gc.collect()
    gc.freeze()
    collect_seldom()
