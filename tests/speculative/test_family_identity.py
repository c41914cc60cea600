"""Speculative decoding equals plain decoding for every family's kind of layer.

Tiny float32 targets beside the shared head: windows shorter than the prompts, sinks, norms of q and
k, YaRN, gated heads, narrow values, MoEs. Prompts come in several chunks, and the head's
drafts are accepted in every count.
"""

from __future__ import annotations

import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.decoder import Params
from jspec.models.registry import FAMILIES
from jspec.spec.model_spec import ModelSpec
from tests.speculative.engines import (
    PLAIN,
    Compiled,
    build,
    corpus_params,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.family_targets import ALIKE, LAYERS, drawn, target_of

NEW_TOKENS, CHUNK = 60, 8
# Their chains are tests of their own, the second one of the fast suite.
MOST, FAST = "gpt_oss", "step3p5"

# A chain, a tree, a lookup's tree.
DRAFTS = (
    ((3, 1, 4), Algorithm.EAGLE3),
    ((3, 4, 16), Algorithm.EAGLE3),
    ((3, 3, 8), Algorithm.NGRAM),
)


def requests_of(temperature: float) -> list[Request]:
    """Prompts of several chunks and windows, and one shorter than both."""
    return [
        make_request(
            i,
            prompt_len=length,
            seed=i + 90,
            temperature=temperature,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        for i, length in enumerate((29, 5, 18))
    ]


def engine_of(draft_shape: SpeculativeConfig, target: ModelSpec, params: Params) -> Compiled:
    return build(
        draft_shape,
        page_size=4,
        variants=(StepOptions(),),
        params=(params, tiny_params()[1]),
        target_spec=target,
    )


def check(family: str, drafts: tuple[tuple[tuple[int, int, int], Algorithm], ...]) -> None:
    target = target_of(family)
    params = drawn(target)
    plain = engine_of(PLAIN, target, params)
    cases = []
    for temperature in (0.0, 1.0):
        requests = requests_of(temperature)
        expected = [serve(plain, [request], overlap_depth=0).ids[0] for request in requests]
        assert [len(ids) for ids in expected] == [NEW_TOKENS] * 3
        assert len({*expected}) == 3
        cases.append((requests, expected))
    for shape, algorithm in drafts:
        compiled = engine_of(spec_of(*shape, algorithm), target, params)
        histogram = np.zeros(shape[0] + 1, int)
        for requests, expected in cases:
            said = [r.prompt_ids + ids for r, ids in zip(requests, expected, strict=True)]
            is_lookup = algorithm is Algorithm.NGRAM
            served = serve(
                compiled,
                requests,
                chunk_size=CHUNK,
                dial=None if is_lookup else dial_for(requests, expected),
                draft=corpus_params(said) if is_lookup else None,
            )
            assert list(served.ids) == expected, (shape, algorithm)
            assert served.num_leaked_pages == 0
            histogram += np.asarray(served.counters.accept_histogram)
        # A lookup finds nothing or much.
        assert histogram[-1] if algorithm is Algorithm.NGRAM else histogram.all(), histogram


def test_every_family_has_layers_of_its_own() -> None:
    """So that none is tested as another one under its label."""
    names = [family.name for family in FAMILIES]
    assert sorted(LAYERS) == sorted(names)
    layers = {name: target_of(name).layers for name in names}
    assert all(layers[name] == layers[other] for name, other in ALIKE.items())
    assert len(set(layers.values())) == len(names) - len(ALIKE)


@pytest.mark.slow
def test_a_chain_equals_plain() -> None:
    check(MOST, DRAFTS[:1])


@pytest.mark.slow
def test_a_chain_over_layers_of_unequal_heads() -> None:
    check(FAST, DRAFTS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("family", [MOST, FAST])
def test_speculative_equals_plain(family: str) -> None:
    check(family, DRAFTS[1:])


# Llama is test_identity.py's.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family", [f.name for f in FAMILIES if f.name not in (MOST, FAST, "llama")]
)
def test_speculative_equals_plain_for_the_other_families(family: str) -> None:
    check(family, DRAFTS)
