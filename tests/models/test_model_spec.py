"""Llama's config.json in its layouts, and fields that all families share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import load_model_spec, load_sampling_defaults, warn_of_ends
from jspec.models.registry import family_named
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.spec.rope import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}
SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope": RopeConfig(theta=500000.0),
    "max_position": 131072,
    "eos_token_ids": (128001,),
    "bos_token_id": 128000,
}
TARGET = uniform_decoder(**SIZES)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def decoder(**changes: Any) -> ModelSpec:
    return uniform_decoder(**(SIZES | changes))


def write(path: Path, values: Any, *, name: str = "config.json") -> Path:
    (path / name).write_text(json.dumps(values))
    return path


def test_a_transformers_4_config(tmp_path: Path) -> None:
    assert load_model_spec(write(tmp_path, LLAMA)) == TARGET


def test_absent_keys_take_llama_s_defaults(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    optional = (*absent, "bos_token_id", "eos_token_id", "tie_word_embeddings", "hidden_act")
    values = {key: value for key, value in LLAMA.items() if key not in optional}
    assert load_model_spec(write(tmp_path, values)) == decoder(
        num_kv_heads=32,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position=2048,
        bos_token_id=None,
        eos_token_ids=(),
    )


PLAIN_ROPE = RopeConfig(theta=7.0)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": LLAMA3_SCALING}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3_SCALING}}, LLAMA3_ROPE),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_SCALING}, "rope_theta": 1e4},
            LLAMA3_ROPE,
        ),
        ({"rope_theta": 7.0, "rope_scaling": None}, PLAIN_ROPE),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "default"}}, PLAIN_ROPE),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, PLAIN_ROPE),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, PLAIN_ROPE),
    ],
)
def test_rope_of_transformers_4_and_5(
    rope: dict[str, Any], expected: RopeConfig, tmp_path: Path
) -> None:
    absent = {"rope_theta": None} if "rope_parameters" in rope else {}
    spec = load_model_spec(write(tmp_path, LLAMA | absent | rope))
    assert spec.one_layer.attention.rope == expected


@pytest.mark.parametrize(
    ("main", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_generation_config_overrides_end_of_sequence(
    main: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": main})
    if generation is not None:
        write(tmp_path, generation, name="generation_config.json")
    assert load_model_spec(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": None}, {}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        ({"temperature": 0.6, "do_sample": False, "top_k": 5}, {"temperature": 0.0}),
        ({"temperature": 0, "top_p": 0.9}, {"temperature": 0.0}),
        ({"top_k": 20, "top_p": 0.8, "min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}),
        ({"top_k": 0, "max_length": 9}, {}),
    ],
)
def test_sampling_defaults_are_the_checkpoints(
    generation: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    if generation is not None:
        write(tmp_path, generation, name="generation_config.json")
    assert load_sampling_defaults(tmp_path) == expected


def test_a_sampling_default_that_no_request_could_have_is_an_error(tmp_path: Path) -> None:
    for name, value in (("temperature", "hot"), ("top_k", 1.5), ("top_p", 3)):
        write(tmp_path, {name: value}, name="generation_config.json")
        with pytest.raises(CheckpointError, match=f"{name} is '?{value}"):
            load_sampling_defaults(tmp_path)


def test_the_nearest_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'Qwen3ForCausalML'.*\(the nearest is Qwen3ForCausalLM\)"
    ):
        load_model_spec(write(tmp_path, LLAMA | {"architectures": ["Qwen3ForCausalML"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture is 'GPT2LMHeadModel'; expected one of LlamaForCausalLM, "
            "MistralForCausalLM, .*Qwen2ForCausalLM, .*GptOssForCausalLM",
        ),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "not built: compressed sparse attention"),
        ({"architectures": ["KimiK3ForConditionalGeneration"]}, "not built: delta attention"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "not built: delta attention"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "not built: attention within chu"),
        ({"architectures": ["NemotronHForCausalLM"]}, "not built: Mamba-2 layers"),
        ({"architectures": ["Glm5NextForConditionalGeneration"]}, "not built: delta attention"),
        (
            {"architectures": ["MuseSparkForConditionalGeneration"]},
            "architecture is 'MuseSparkForConditionalGeneration', which is known and not built",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"layer_types": ["full_attention", "chunked_attention"] * 16},
            r"layer_types has \['chunked_attention'\]; expected 'full_attention' or 'sliding",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope type is 'longrope'; expected 'default' or 'linear' or 'dynamic' or 'llama3' or",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 0.5}}, "factor is 0.5; expected at least 1"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32; expected a multiple"),
    ],
)
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model_spec(write(tmp_path, LLAMA | changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None; expected a positive integer"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; expected an object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
        ({"architectures": None}, "architectures is None; expected a list of names"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected an integer or a list"),
        ({"hidden_size": 4100}, "hidden_size is 4100; expected head_dim as well"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries; .* 32"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 16},
            "layer_types has 'sliding_attention', but there is no sliding_window",
        ),
    ],
)
def test_malformed_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model_spec(write(tmp_path, LLAMA | changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_an_end_that_no_text_can_have_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_ends(tmp_path, load_model_spec(write(tmp_path, LLAMA)))
    assert not caplog.records
    ids = [LLAMA["vocab_size"], LLAMA["vocab_size"] - 1]
    spec = load_model_spec(write(tmp_path, LLAMA | {"eos_token_id": ids}))
    assert spec.eos_token_ids == tuple(ids)
    warn_of_ends(tmp_path, spec)
    (record,) = caplog.records
    message = f"eos_token_id {ids[0]} is beyond vocab_size {ids[0]}: no text will end by it"
    assert record.getMessage() == f"{tmp_path}: {message}"


@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    rope=st.sampled_from([RopeConfig(), RopeConfig(theta=5e5), LLAMA3_ROPE]),
    tied=st.booleans(),
    bias=st.booleans(),
    mlp_bias=st.booleans(),
    eos=st.lists(st.integers(0, 99), max_size=3),
    bos=st.none() | st.integers(0, 99),
    eps=st.sampled_from([1e-5, 1e-6]),
)
def test_written_configs_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    group: int,
    kv_heads: int,
    rope: RopeConfig,
    tied: bool,
    bias: bool,
    mlp_bias: bool,
    eos: list[int],
    bos: int | None,
    eps: float,
) -> None:
    config = decoder(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=24,
        rope=rope,
        tie_word_embeddings=tied,
        attention_bias=bias,
        eos_token_ids=tuple(eos),
        bos_token_id=bos,
        rms_norm_eps=eps,
    )
    layer = replace(config.one_layer, ffn=DenseSpec(inner=14336, bias=mlp_bias))
    config = replace(config, layers=(layer,) * config.num_layers)
    path = write(tmp_path_factory.mktemp("config"), family_named("llama").to_json(config))
    assert load_model_spec(path) == config
