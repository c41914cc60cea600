"""The host's data about draft algorithms: one constant per drafter.

The scheduler reserves pages by these numbers and knows no drafter. A drafter's device half uses the
same constant, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jspec.spec import indexing

OfTree = Callable[[int, int], int]  # of S and K


def _nothing(num_steps: int, topk: int) -> int:
    del num_steps, topk
    return 0


def _emitted(num_steps: int, topk: int) -> int:
    """M rows: one per token that a verification can emit."""
    del topk
    return indexing.max_emitted(num_steps)


def _beams(num_steps: int, topk: int) -> int:
    """K rows per draft forward, one forward per level after the first."""
    return topk * max(num_steps - 1, 0)


def _emitted_and_root(num_steps: int, topk: int) -> int:
    """M + 1 rows: the next root's row is written too, which the next propose builds on."""
    return _emitted(num_steps, topk) + 1


def _root_and_beams(num_steps: int, topk: int) -> int:
    """The beams follow the root's row."""
    return 1 + _beams(num_steps, topk)


def _expanded(num_steps: int, topk: int) -> int:
    """K candidates at level 1; at each later level K for each of the K best before it."""
    return topk + max(num_steps - 1, 0) * topk * topk


def _lag(num_steps: int, topk: int) -> int:
    """Layer s lags by s; level i + 1 comes from layer i."""
    del topk
    return max(num_steps - 1, 0)


def _branches(num_steps: int, topk: int) -> int:
    return num_steps * topk


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """lookahead: what a drafter caches at position i depends on tokens up to i + lookahead, and on
        as many more as its last layer lags behind (`tokens_ahead`).
    lag: rows by which its last layer lags behind, by S and K: rows before L that propose writes,
        too, and that the next advance writes again.

    propose_rows, advance_rows: cache rows written past L, by S and K; L is the committed length
        before the verification whose tokens `advance` is given.
    num_candidates: nodes that its tree can be chosen from, by S and K; `candidates` in words.
    keeps_ids: its state derives from the ids of its row alone; a row that begins after a cached
        prefix must be told of the ids in it.
    has_model: a draft model's checkpoint is needed. in_target: the target's may be it.
    """

    lookahead: int
    propose_rows: OfTree = _nothing
    advance_rows: OfTree = _nothing
    num_candidates: OfTree = _nothing
    candidates: str = "none"
    keeps_ids: bool = False
    has_model: bool = False
    lag: OfTree = _nothing
    in_target: bool = False

    def tokens_ahead(self, num_steps: int, topk: int) -> int:
        """Return n such that the cache of any layer at position i depends on tokens up to i + n."""
        return self.lookahead + self.lag(num_steps, topk)


NO_DRAFTING = Drafting(lookahead=0)
EAGLE = Drafting(
    lookahead=1,
    propose_rows=_beams,
    advance_rows=_emitted,
    num_candidates=_expanded,
    candidates="K + (S-1)*K*K",
    has_model=True,
)
NEXTN = replace(EAGLE, in_target=True)
STANDALONE = Drafting(
    lookahead=0,
    propose_rows=_root_and_beams,
    advance_rows=_emitted_and_root,
    num_candidates=_expanded,
    candidates="K + (S-1)*K*K",
    has_model=True,
)
NGRAM = Drafting(lookahead=0, num_candidates=_branches, candidates="S*K", keeps_ids=True)
MULTI_LAYER = Drafting(
    lookahead=1,
    lag=_lag,
    propose_rows=_beams,
    advance_rows=_emitted,
    num_candidates=_expanded,
    candidates="K + (S-1)*K*K",
    has_model=True,
    in_target=True,
)
