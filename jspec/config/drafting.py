"""Draft algorithms: one record each, by name. Host data; the names are SGLang's.

The scheduler reserves pages by these numbers and knows no drafter. A record's device half, which
reads a checkpoint and builds the drafter, is in `speculative/drafters/registry.py` under the same
name. A drafter carries its record, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jspec.errors import ConfigError
from jspec.spec import indexing

DEFAULT_STEPS = 3
LEAST_SHARED_NODES = 8  # minimum N of a draft model with a lookup, if N is not given
OfTree = Callable[[int, int], int]  # of S and K


def _nothing(num_steps: int, topk: int) -> int:
    del num_steps, topk
    return 0


def emitted(num_steps: int, topk: int) -> int:
    """Return M slots: one per token that a verification can emit."""
    del topk
    return indexing.max_emitted(num_steps)


def beams(num_steps: int, topk: int) -> int:
    """Return K slots per draft forward, with one forward per level after the first."""
    return topk * max(num_steps - 1, 0)


def _emitted_and_root(num_steps: int, topk: int) -> int:
    """Return M + 1 slots: the next root's slot, which the next propose reads, is written too."""
    return emitted(num_steps, topk) + 1


def _root_and_beams(num_steps: int, topk: int) -> int:
    return 1 + beams(num_steps, topk)


def expanded(num_steps: int, topk: int) -> int:
    """Return K candidates at level 1, and at each later level K for each of the K best before
    it."""
    return topk + max(num_steps - 1, 0) * topk * topk


def _lag(num_steps: int, topk: int) -> int:
    """Return the lag of the last layer: layer s lags by s, and level i + 1 comes from layer i."""
    del topk
    return max(num_steps - 1, 0)


def _branches(num_steps: int, topk: int) -> int:
    return num_steps * topk


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Algorithm:
    """A draft algorithm as the host knows it.

    L is the committed length before the verification whose tokens `advance` is given.
    """

    name: str  # SGLang's `speculative_algorithm`
    # The cache of the drafter's first layer at position i depends on tokens up to i + lookahead.
    lookahead: int = 0
    propose_slots: OfTree = _nothing  # cache slots that propose writes past L
    advance_slots: OfTree = _nothing  # cache slots that advance writes past L
    num_candidates: OfTree = _nothing  # nodes that its tree can be chosen from
    candidates: str = "none"  # num_candidates in words
    keeps_ids: bool = False  # its state derives from the row's ids, even those of a cached prefix
    has_model: bool = False  # a draft model's checkpoint is needed
    # Slots by which its last layer lags; propose writes them too, and the next advance again.
    lag: OfTree = _nothing
    in_target: bool = False  # the target's checkpoint may have the draft model
    default_steps: int = DEFAULT_STEPS  # S if none is requested
    is_block: bool = False  # one forward drafts all levels
    bundled_draft: str | None = None  # folder of the bundled target's draft

    NONE: ClassVar[Algorithm]
    EAGLE: ClassVar[Algorithm]
    EAGLE3: ClassVar[Algorithm]
    DFLASH: ClassVar[Algorithm]
    NGRAM: ClassVar[Algorithm]
    STANDALONE: ClassVar[Algorithm]
    NEXTN: ClassVar[Algorithm]
    MULTI_LAYER_EAGLE: ClassVar[Algorithm]
    FROZEN_KV_MTP: ClassVar[Algorithm]

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        """Return the name, since it is part of the keys of stored programs."""
        return self.name

    def tokens_ahead(self, num_steps: int, topk: int) -> int:
        """Return n such that the cache of any layer at position i depends on tokens up to i + n."""
        return self.lookahead + self.lag(num_steps, topk)

    def filled_in(
        self, steps: int | None, topk: int | None, nodes: int | None, *, lookup: bool = False
    ) -> tuple[int, int, int]:
        """Return S/K/N with defaults for None: K = 1, and as many nodes as suit S and K.

        lookup: the nodes are shared with a lookup.
        """
        topk = 1 if topk is None else topk
        if steps is None:
            steps = self.default_steps
            of_nodes = self.is_block or not self.has_model
            if of_nodes and topk == 1 and nodes is not None:
                steps = max(nodes - 1, 1)  # SGLang's flags of these algorithms give only N
        if nodes is None:
            pool = self.num_candidates(steps, topk)
            nodes = steps + 1 if topk == 1 else min(1 + pool, max(topk * 4, steps + 1))
            nodes = max(nodes, LEAST_SHARED_NODES) if lookup else nodes
        return steps, topk, nodes


ALGORITHMS: dict[str, Algorithm] = {}
# Other flag values for an algorithm, whose variant the checkpoint determines.
ALIASES = {"DSPARK": "DFLASH"}


def register(algorithm: Algorithm) -> Algorithm:
    """Let `speculative_algorithm` name an algorithm. Raises ConfigError for a name in use."""
    if algorithm.name in ALGORITHMS:
        raise ConfigError(f"algorithm {algorithm.name} is registered; expected a new name")
    ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def _expanding(
    name: str, *, advance_slots: OfTree = emitted, propose_slots: OfTree = beams, **more: Any
) -> Algorithm:
    """Register an algorithm with a draft model that expands the K best of each level."""
    return register(
        Algorithm(
            name=name,
            propose_slots=propose_slots,
            advance_slots=advance_slots,
            num_candidates=expanded,
            candidates="K + (S-1)*K*K",
            has_model=True,
            **more,
        )
    )


Algorithm.NONE = register(Algorithm(name="NONE"))
Algorithm.EAGLE = _expanding("EAGLE", lookahead=1, bundled_draft="draft_eagle1")
Algorithm.EAGLE3 = _expanding("EAGLE3", lookahead=1, bundled_draft="draft")
Algorithm.NGRAM = register(
    Algorithm(name="NGRAM", num_candidates=_branches, candidates="S*K", keeps_ids=True)
)
Algorithm.STANDALONE = _expanding(
    "STANDALONE",
    propose_slots=_root_and_beams,
    advance_slots=_emitted_and_root,
    bundled_draft="draft_lm",
)
# The target's own layer for multi-token prediction, run at every level.
Algorithm.NEXTN = _expanding("NEXTN", lookahead=1, in_target=True, bundled_draft="draft_mtp")
# Its layers, one per level. Not a flag value: the checkpoint decides what NEXTN, or EAGLE with
# enable_multi_layer_eagle, means.
Algorithm.MULTI_LAYER_EAGLE = _expanding(
    "MULTI_LAYER_EAGLE", lookahead=1, lag=_lag, in_target=True, bundled_draft="draft_mtp"
)
# A block in one forward, in S + 1 scratch slots. A token's cache entry is made of its feature.
Algorithm.DFLASH = _expanding("DFLASH", propose_slots=emitted, default_steps=7, is_block=True)
# A model that reads the target's caches and has none. NEXTN and EAGLE with its files mean it too.
Algorithm.FROZEN_KV_MTP = _expanding(
    "FROZEN_KV_MTP", propose_slots=_nothing, advance_slots=_nothing
)
