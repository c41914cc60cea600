"""Rows with top-k, top-p, min-p and none of them in one batch write one shard's text on several.

The logits are so flat that the token at a filter's edge is often chosen, and in a row without
filters now and then the least likely one. Temperatures are such that dividing by them and
multiplying with their inverse round differently (1.0 and 2.0 would hide that). No shard's columns
are a whole number of vectors. Every drafter under mixed filters is test_engine_laws.py's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import SAMPLING, StepOptions
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from tests.speculative.engines import PLAIN, TARGET, Compiled, build, corpus_params, serve, spec_of
from tests.speculative.every_drafter import lookup, sharded

TEMPERATURES = (1.5, 1.3, 0.7)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 2},
    {},
    {"min_p": 0.5},
    {},
    {"top_p": 0.1},
    {"top_k": 1},
    {"min_p": 1.0, "top_p": 0.9},
)
NUM_REQUESTS, NUM_TOKENS = 48, 40
TREE = spec_of(2, 2, 5, Algorithm.NGRAM)
VOCAB = 84  # 21 columns a shard


FLAT = dataclasses.replace(TARGET, vocab_size=VOCAB, eos_token_ids=(), bos_token_id=None)


@functools.cache
def weights() -> Params:
    """Draw random weights, with logits from -1.5 to 1.5."""
    params = init_params(table_of(FLAT), seed=0)
    kernel = params["lm_head"]["kernel"]
    return {**params, "lm_head": {**params["lm_head"], "kernel": kernel * 0.5}}


@functools.cache
def engine(shards: int, draft_shape: SpeculativeConfig) -> Compiled:
    params = sharded(table_of(FLAT), weights(), shards)
    return build(
        draft_shape,
        page_size=16,
        shards=shards,
        params=(params, {} if draft_shape == PLAIN else corpus_params([(0,)])),
        variants=(StepOptions(), SAMPLING) if shards == 1 else (SAMPLING,),
        make=None if draft_shape == PLAIN else functools.partial(lookup, draft_shape),
        target_spec=FLAT,
    )


@functools.cache
def requests() -> list[Request]:
    rng = np.random.default_rng(VOCAB)
    return [
        Request(
            request_id=f"r{i}",
            prompt_ids=tuple(rng.integers(0, VOCAB, 3 + i % 5).tolist()),
            sampling=SamplingParams(
                temperature=TEMPERATURES[i % len(TEMPERATURES)],
                max_new_tokens=NUM_TOKENS - i % 7,
                ignore_eos=True,
                **FILTERS[i % len(FILTERS)],
            ),
            seed=int(rng.integers(0, 2**63)),
        )
        for i in range(NUM_REQUESTS)
    ]


@functools.cache
def texts(shards: int, draft_shape: SpeculativeConfig) -> tuple[tuple[int, ...], ...]:
    return serve(engine(shards, draft_shape), requests()).ids


@pytest.mark.slow
def test_several_shards_write_the_text_of_one() -> None:
    assert texts(4, TREE) == texts(1, PLAIN)


@pytest.mark.slow
def test_a_row_without_filters_writes_the_same_alone() -> None:
    """It then runs in a step that filters nothing."""
    mixed = [each.sampling.options for each in requests()]
    plain = [request for request, needed in zip(requests(), mixed, strict=True) if not needed]
    served = serve(engine(1, PLAIN), plain)
    assert all(step.options == StepOptions() for step, _ in served.steps)
    expected = zip(texts(1, PLAIN), mixed, strict=True)
    assert list(served.ids) == [ids for ids, needed in expected if not needed]
