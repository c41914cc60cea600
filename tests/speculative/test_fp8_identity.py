"""Speculative decoding equals plain decoding with weights in fp8 and int8: a token's codes depend
on it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec.config.limits import SpeculativeConfig
from jspec.device.weights import W8A8Weight
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.files.checkpoint import load_target
from jspec.models.registry import table_of
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from tests.models.fp8_checkpoints import write_fp8, write_plain
from tests.speculative.engines import (
    PLAIN,
    Compiled,
    build,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)

NEW_TOKENS, CHUNK = 50, 8
CHAIN, TREE = spec_of(2, 1, 3), spec_of(2, 2, 5)
# Every part has whole blocks on each of two shards; the head of the tests reads 32 numbers.
SPEC = uniform_decoder(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_position=256,
    eos_token_ids=(256,),
    bos_token_id=256,
)


def requests_of(temperature: float) -> list[Request]:
    return [
        make_request(
            i,
            prompt_len=length,
            seed=i + 40,
            temperature=temperature,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        for i, length in enumerate((29, 5, 18))
    ]


def engines_of(
    path: Path, spec: ModelSpec, shapes: list[SpeculativeConfig], *, shards: int
) -> list[Compiled]:
    """Return an engine for each shape, of the packed checkpoint over `shards`."""
    wanted = Wanted(bundle="xla", dtype="float32", shards=shards)
    formats = resident_formats(path, table_of(spec), wanted)
    how: Any = {"dtype": np.float32, "shards": shards, "formats": formats}
    params = load_target(path, spec, **how)
    layer = params["layers"][1]
    moe = layer.get("moe")
    kernel = layer["mlp"]["gate_up"]["kernel"] if moe is None else moe["experts"]["gate_up"]
    assert isinstance(kernel, W8A8Weight)
    return [
        build(
            shape,
            page_size=4,
            shards=shards,
            variants=(StepOptions(),),
            params=(params, tiny_params()[1]),
            target_spec=spec,
            formats=formats,
        )
        for shape in shapes
    ]


def with_experts() -> ModelSpec:
    """Return SPEC with four experts in its second layer, whose `down` has two blocks of inputs."""
    attention = replace(SPEC.one_layer.softmax_attention, qk_norm=True)
    ffn = MoESpec(num_experts=4, top_k=2, inner=256)
    first = replace(SPEC.layers[0], attention=attention)
    return replace(SPEC, layers=(first, replace(first, ffn=ffn)), family="qwen3_moe")


def texts(engine: Compiled, requests: list[Request]) -> list[tuple[int, ...]]:
    """Return the ids of each request served alone."""
    return [serve(engine, [each], overlap_depth=0).ids[0] for each in requests]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "spec", "shards", "shapes"),
    [
        pytest.param("fbgemm", SPEC, 1, [TREE], marks=pytest.mark.exhaustive),
        ("blocks", SPEC, 2, [CHAIN]),
        ("int8", SPEC, 2, [TREE]),
        ("blocks", with_experts(), 1, [CHAIN]),
    ],
    ids=["channels", "blocks on two shards", "int8 on two shards", "experts"],
)
def test_a_chain_s_and_a_tree_s_text_are_plain_decoding_s(
    layout: str,
    spec: ModelSpec,
    shards: int,
    shapes: list[SpeculativeConfig],
    tmp_path: Path,
) -> None:
    packed = tmp_path / "packed"
    write_fp8(write_plain(tmp_path / "plain", spec), packed, layout)
    plain, *drafting = engines_of(packed, spec, [PLAIN, *shapes], shards=shards)
    # Shards of an int8 product use the scales of whole rows, so their number changes no text.
    alone = engines_of(packed, spec, [PLAIN], shards=1) if layout == "int8" else []
    for temperature in (0.0, 1.0):
        requests = requests_of(temperature)
        expected = texts(plain, requests)
        assert [len(ids) for ids in expected] == [NEW_TOKENS] * 3
        assert len({*expected}) == 3
        assert all(texts(engine, requests) == expected for engine in alone)
        for engine in drafting:
            dial = dial_for(requests, expected)
            served = serve(engine, requests, chunk_size=CHUNK, dial=dial)
            assert list(served.ids) == expected
            assert all(served.counters.accept_histogram)
