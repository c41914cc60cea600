"""The registry of drafters: how the drafter of each algorithm is built, by name."""

from __future__ import annotations

from jspec.config import drafting
from jspec.config.drafting import Algorithm
from jspec.speculative.drafter import NoDrafter
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


def register(algorithm: Algorithm, read: ReadSource) -> None:
    """Let `speculative_algorithm` name a drafter. read: checks and plans. Raises ConfigError."""
    drafting.register(algorithm)
    DRAFTERS[algorithm.name] = read
