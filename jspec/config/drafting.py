"""Draft algorithms: one record each, by name. Host data; the names are SGLang's.

The scheduler reserves pages by these numbers and knows no drafter. The record's device half, which
reads a checkpoint and builds the drafter, is in `speculative/drafters/registry.py` under the same
name; a drafter carries its record, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jspec.errors import ConfigError
from jspec.spec import indexing

DEFAULT_STEPS = 3
LEAST_SHARED_NODES = 8  # of a draft model and a lookup, if N is not given
OfTree = Callable[[int, int], int]  # of S and K


def _nothing(num_steps: int, topk: int) -> int:
    del num_steps, topk
    return 0


def emitted(num_steps: int, topk: int) -> int:
    """M slots: one per token that a verification can emit."""
    del topk
    return indexing.max_emitted(num_steps)


def beams(num_steps: int, topk: int) -> int:
    """K slots per draft forward, one forward per level after the first."""
    return topk * max(num_steps - 1, 0)


def _emitted_and_root(num_steps: int, topk: int) -> int:
    """M + 1 slots: the next root's slot is written too, which the next propose builds on."""
    return emitted(num_steps, topk) + 1


def _root_and_beams(num_steps: int, topk: int) -> int:
    """The beams follow the root's slot."""
    return 1 + beams(num_steps, topk)


def expanded(num_steps: int, topk: int) -> int:
    """K candidates at level 1; at each later level K for each of the K best before it."""
    return topk + max(num_steps - 1, 0) * topk * topk


def _lag(num_steps: int, topk: int) -> int:
    """Layer s lags by s; level i + 1 comes from layer i."""
    del topk
    return max(num_steps - 1, 0)


def _branches(num_steps: int, topk: int) -> int:
    return num_steps * topk


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Algorithm:
    """How drafts are made, as the host knows it.

    name: SGLang's `speculative_algorithm`. bundled_draft: folder of the bundled target's draft.
    lookahead: what a drafter caches at position i depends on tokens up to i + lookahead, and on
        as many more as its last layer lags behind (`tokens_ahead`).
    lag: slots by which its last layer lags behind, by S and K: slots before L that propose writes,
        too, and that the next advance writes again.

    propose_slots, advance_slots: cache slots written past L, by S and K; L is the committed length
        before the verification whose tokens `advance` is given.
    num_candidates: nodes that its tree can be chosen from, by S and K; `candidates` in words.
    keeps_ids: its state derives from the ids of its row alone; a row that begins after a cached
        prefix must be given the ids in it.
    has_model: a draft model's checkpoint is needed. in_target: the target's may be it.
    default_steps: S if none is requested. is_block: one forward drafts all levels.
    """

    name: str
    lookahead: int = 0
    propose_slots: OfTree = _nothing
    advance_slots: OfTree = _nothing
    num_candidates: OfTree = _nothing
    candidates: str = "none"
    keeps_ids: bool = False
    has_model: bool = False
    lag: OfTree = _nothing
    in_target: bool = False
    default_steps: int = DEFAULT_STEPS
    is_block: bool = False
    bundled_draft: str | None = None

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
        """The name: part of the keys of stored programs, so it holds no address."""
        return self.name

    def tokens_ahead(self, num_steps: int, topk: int) -> int:
        """Return n such that the cache of any layer at position i depends on tokens up to i + n."""
        return self.lookahead + self.lag(num_steps, topk)

    def filled_in(
        self, steps: int | None, topk: int | None, nodes: int | None, *, lookup: bool = False
    ) -> tuple[int, int, int]:
        """Return S/K/N with defaults for None: K = 1, and as many nodes as suit S and K.

        lookup: the nodes are shared with one.
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
# Other names of an algorithm, as a flag's value: the checkpoint decides what it drafts with.
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
# A block in one forward, in S + 1 scratch slots. What is cached of a token is made of its feature.
Algorithm.DFLASH = _expanding("DFLASH", propose_slots=emitted, default_steps=7, is_block=True)
# A model that reads the target's caches and has none; NEXTN and EAGLE with its files mean it, too.
Algorithm.FROZEN_KV_MTP = _expanding(
    "FROZEN_KV_MTP", propose_slots=_nothing, advance_slots=_nothing
)
