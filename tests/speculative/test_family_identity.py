"""Speculative decoding equals plain decoding for every family's kind of layer.

Tiny float32 targets beside the shared head: windows shorter than the prompts, sinks, norms of q and
k, YaRN, mixtures. Prompts come in several chunks, and drafts are accepted in every count.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.config import Algorithm, RopeConfig, SpeculativeConfig, YarnConfig
from jspec.core.features import StepFeatures
from jspec.core.model_spec import DenseSpec, FeedForward, Gate, ModelSpec, MoESpec, Routing
from jspec.core.request import Request
from jspec.models.decoder import Params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.models.registry import FAMILIES, table_of
from jspec.models.stored import value_at
from tests.speculative.engines import (
    PLAIN,
    TARGET,
    Compiled,
    build,
    corpus_params,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)

NEW_TOKENS, WINDOW, CHUNK = 60, 8, 8
FAST = "gpt_oss"  # of everything the most
ATTENTION = TARGET.one_layer.attention
MIXTURE = MoESpec(num_experts=4, top_k=2, inner=16)
YARN = RopeConfig(
    theta=150000.0,
    factor=32.0,
    original_max_position=16,
    yarn=YarnConfig(attention_factor=1.3, truncate=False),
)


# A chain, a tree, a lookup's tree.
DRAFTS = (
    ((3, 1, 4), Algorithm.EAGLE3),
    ((3, 4, 16), Algorithm.EAGLE3),
    ((3, 3, 8), Algorithm.NGRAM),
)


def target_of(family: str) -> ModelSpec:
    """A target as wide as TARGET, of two layers: compiling is what the test costs."""
    attention = ATTENTION
    windows: tuple[int | None, int | None] = (None, None)
    ffn: FeedForward = DenseSpec(inner=48)
    if family == "gpt_oss":
        attention = dataclasses.replace(
            attention, rope=YARN, sinks=True, qkv_bias=True, out_bias=True
        )
        windows = (WINDOW, None)
        ffn = dataclasses.replace(
            MIXTURE, routing=Routing.TOP_THEN_SOFTMAX, gate=Gate.CLAMPED, bias=True
        )
    elif family == "mistral":
        windows = (WINDOW, WINDOW)
    elif family == "qwen2":
        attention, windows = dataclasses.replace(attention, qkv_bias=True), (None, WINDOW)
    elif family in ("qwen3", "qwen3_moe"):
        attention = dataclasses.replace(attention, qk_norm=True)
        ffn = MIXTURE if family == "qwen3_moe" else ffn
    layer = dataclasses.replace(TARGET.one_layer, ffn=ffn)
    layers = (
        dataclasses.replace(layer, attention=dataclasses.replace(attention, window=window))
        for window in windows
    )
    return dataclasses.replace(TARGET, layers=tuple(layers), family=family)


def drawn(spec: ModelSpec) -> Params:
    """Random weights; biases and sinks away from 0."""
    table = table_of(spec)
    params = init_params(table, seed=3)
    values = {own.path: value_at(params, own.path) for own in table}
    for i, own in enumerate(table):
        if own.init is Init.ZEROS:
            values[own.path] = jax.random.normal(jax.random.key(i), own.shape, jnp.float32) / 2
    return nested(values.items())


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


def engine_of(spec: SpeculativeConfig, target: ModelSpec, params: Params) -> Compiled:
    return build(
        spec,
        page_size=4,
        variants=(StepFeatures(),),
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
        assert histogram[-1], f"accepted counts {histogram}; expected some whole paths"


def test_a_chain_equals_plain() -> None:
    check(FAST, DRAFTS[:1])


@pytest.mark.slow
def test_speculative_equals_plain() -> None:
    check(FAST, DRAFTS[1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [f.name for f in FAMILIES if f.name not in (FAST, "llama")])
def test_speculative_equals_plain_for_the_other_families(family: str) -> None:
    check(family, DRAFTS[1:])
