"""The registry of drafters: how each algorithm's drafter is built."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jspec.config.limits import Algorithm
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.drafters.eagle import eagle_source
from jspec.speculative.drafters.eagle1 import eagle1_source
from jspec.speculative.drafters.mtp import mtp_source
from jspec.speculative.drafters.ngram import ngram_source
from jspec.speculative.drafters.source import DraftRequest, DraftSource, ReadSource, made
from jspec.speculative.drafters.standalone import standalone_source


def plain_source(request: DraftRequest) -> DraftSource:
    del request
    return DraftSource(make=made(NoDrafter()))


DRAFTERS: Mapping[Algorithm, ReadSource] = MappingProxyType(
    {
        Algorithm.NONE: plain_source,
        Algorithm.EAGLE: eagle1_source,
        Algorithm.EAGLE3: eagle_source,
        Algorithm.NGRAM: ngram_source,
        Algorithm.STANDALONE: standalone_source,
        Algorithm.NEXTN: mtp_source,
        Algorithm.MULTI_LAYER_EAGLE: mtp_source,
    }
)
