"""The registry of drafters: how the drafter of each algorithm is built."""

from __future__ import annotations

from dataclasses import replace

from jspec.config import drafting
from jspec.config.drafting import Algorithm
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Drafter, LevelDrafter, NoDrafter
from jspec.speculative.drafters.composite import CompositeDrafter
from jspec.speculative.drafters.frozen_kv import assistant_source
from jspec.speculative.drafters.head_sources import (
    block_source,
    eagle1_source,
    eagle3_source,
    mtp_source,
)
from jspec.speculative.drafters.ngram import ngram_source
from jspec.speculative.drafters.source import DraftRequest, DraftSource, ReadSource, made
from jspec.speculative.drafters.standalone import standalone_source


def plain_source(request: DraftRequest) -> DraftSource:
    del request
    return DraftSource(make=made(NoDrafter()))


DRAFTERS: dict[str, ReadSource] = {
    "NONE": plain_source,
    "EAGLE": eagle1_source,
    "EAGLE3": eagle3_source,
    "NGRAM": ngram_source,
    "STANDALONE": standalone_source,
    "NEXTN": mtp_source,
    "MULTI_LAYER_EAGLE": mtp_source,
    "DFLASH": block_source,
    "FROZEN_KV_MTP": assistant_source,
}


def source_of(request: DraftRequest, read: ReadSource) -> DraftSource:
    """Return the plan of `read`, with a lookup added to the draft model if it is requested."""
    source, args = read(request), request.args
    if not args.speculative.lookup:
        return source

    def make(ops: Ops, shard: Shard) -> Drafter:
        model = source.make(ops, shard)
        if not isinstance(model, LevelDrafter):
            raise ConfigError(
                f"speculative_lookup is set, but the drafter is a {type(model).__name__}; "
                f"expected a LevelDrafter"
            )
        return CompositeDrafter.of(
            model,
            min_match=args.speculative_ngram_min_match_window_size,
            max_match=args.speculative_ngram_max_match_window_size,
        )

    return replace(source, make=make)


def register(algorithm: Algorithm, read: ReadSource) -> None:
    """Register a drafter and its plan under a new name. Raises ConfigError if it is taken."""
    drafting.register(algorithm)
    DRAFTERS[algorithm.name] = read
