"""Speculative decoding equals plain decoding for every family's kind of layer.

Tiny float32 targets beside the shared head: windows shorter than the prompts, sinks, norms of q and
k, YaRN, gated heads, narrow values, MoEs. Prompts come in several chunks, and the head's
drafts are accepted in every count. Trees run on two data ranks.
"""

from __future__ import annotations

import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.layer import Params
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
CHAIN, TREE = (3, 1, 4), (3, 4, 16)
LOOKUP = (3, 3, 8)
# CI's case: sinks with YaRN and experts, in a tree on two data ranks. Of the others only the
# forward differs, which is test_families.py's; in CI tests/models/test_greedy_text.py has more.
IN_CI = {"gpt_oss": TREE}


def requests_of(temperature: float) -> list[Request]:
    """Return prompts of several chunks and windows, and one shorter than both."""
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


def engine_of(
    draft_shape: SpeculativeConfig, target: ModelSpec, params: Params, *, ranks: int = 1
) -> Compiled:
    return build(
        draft_shape,
        page_size=4,
        variants=(StepOptions(),),
        params=(params, tiny_params()[1]),
        target_spec=target,
        ranks=ranks,
    )


def test_every_family_has_layers_of_its_own() -> None:
    """So that no family is tested as another one under its name."""
    names = [family.name for family in FAMILIES]
    assert sorted(LAYERS) == sorted(names)
    layers = {name: target_of(name).layers for name in names}
    assert all(layers[name] == layers[other] for name, other in ALIKE.items())
    assert len(set(layers.values())) == len(names) - len(ALIKE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(
            family,
            shape,
            id=f"{family}-{'-'.join(map(str, shape))}",
            marks=() if IN_CI.get(family) == shape else pytest.mark.exhaustive,
        )
        for family in LAYERS
        for shape in (CHAIN, TREE, LOOKUP)
    ],
)
def test_speculative_equals_plain(family: str, shape: tuple[int, int, int]) -> None:
    target, is_lookup = target_of(family), shape is LOOKUP
    params = drawn(target)
    plain = engine_of(PLAIN, target, params)
    algorithm = Algorithm.NGRAM if is_lookup else Algorithm.EAGLE3
    ranks = 2 if shape is TREE else 1
    compiled = engine_of(spec_of(*shape, algorithm), target, params, ranks=ranks)
    histogram = np.zeros(shape[0] + 1, int)
    for temperature in (0.0, 1.0):
        requests = requests_of(temperature)
        expected = [serve(plain, [request], overlap_depth=0).ids[0] for request in requests]
        assert [len(ids) for ids in expected] == [NEW_TOKENS] * 3
        assert len({*expected}) == 3
        said = [r.prompt_ids + ids for r, ids in zip(requests, expected, strict=True)]
        served = serve(
            compiled,
            requests,
            chunk_size=CHUNK,
            dial=None if is_lookup else dial_for(requests, expected),
            draft=corpus_params(said) if is_lookup else None,
        )
        assert list(served.ids) == expected
        assert served.num_leaked_pages == 0
        histogram += np.asarray(served.counters.accept_histogram)
    # A lookup finds no match or many.
    assert histogram[-1] if is_lookup else histogram.all(), histogram
