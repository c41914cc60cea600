"""A target's config.json in the layouts of the wild, and TOML of engine arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.core.config import RopeConfig, TransformerConfig
from jspec.core.config_io import (
    load_default_temperature,
    load_engine_toml,
    load_transformer_config,
    transformer_config_json,
)
from jspec.core.errors import CheckpointError, ConfigError

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
TARGET = TransformerConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=500000.0),
    max_position=131072,
    eos_token_ids=(128001,),
    bos_token_id=128000,
)
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


def write(path: Path, values: Any, *, name: str = "config.json") -> Path:
    (path / name).write_text(json.dumps(values))
    return path


def test_a_transformers_4_config(tmp_path: Path) -> None:
    assert load_transformer_config(write(tmp_path, LLAMA)) == TARGET


def test_absent_keys_take_llama_s_defaults(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    optional = (*absent, "bos_token_id", "eos_token_id", "tie_word_embeddings", "hidden_act")
    values = {key: value for key, value in LLAMA.items() if key not in optional}
    assert load_transformer_config(write(tmp_path, values)) == replace(
        TARGET,
        num_kv_heads=32,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position=2048,
        bos_token_id=None,
        eos_token_ids=(),
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_SCALING}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_SCALING}, "rope_theta": 10000.0},
    ],
)
def test_llama3_scaling_of_transformers_4_and_5(rope: dict[str, Any], tmp_path: Path) -> None:
    assert load_transformer_config(write(tmp_path, LLAMA | rope)).rope == LLAMA3_ROPE


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 7.0, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7},
    ],
)
def test_unscaled_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    config = load_transformer_config(write(tmp_path, LLAMA | rope))
    assert config.rope == RopeConfig(theta=7.0)


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
    assert load_transformer_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, 1.0),
        ({}, 1.0),
        ({"temperature": None}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"temperature": 0.6, "do_sample": True}, 0.6),
        ({"temperature": 0.6, "do_sample": False}, 0.0),
        ({"temperature": 0}, 0.0),
    ],
)
def test_the_default_temperature_is_the_checkpoints(
    generation: Any, expected: float, tmp_path: Path
) -> None:
    if generation is not None:
        write(tmp_path, generation, name="generation_config.json")
    assert load_default_temperature(tmp_path) == expected


def test_a_default_temperature_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": "hot"}, name="generation_config.json")
    with pytest.raises(CheckpointError, match="temperature is 'hot'"):
        load_default_temperature(tmp_path)


def test_mistral_without_a_window(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert load_transformer_config(write(tmp_path, mistral)) == TARGET
    with pytest.raises(ConfigError, match="sliding_window is 4096"):
        load_transformer_config(write(tmp_path, mistral | {"sliding_window": 4096}))
    del mistral["sliding_window"]
    with pytest.raises(ConfigError, match=r"sliding_window is 'absent'.*means 4096"):
        load_transformer_config(write(tmp_path, mistral))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture is 'GPT2LMHeadModel'; expected one of LlamaForCausalLM, Mistral",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
        ({"mlp_bias": True}, "mlp_bias is True; expected False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*fp8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type is 'linear'; expected 'default' or 'llama3'",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 0.5}}, "factor is 0.5; expected at least 1"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32; expected a multiple"),
    ],
)
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_transformer_config(write(tmp_path, LLAMA | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None; expected a positive integer"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; expected an object"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
        ({"architectures": None}, "architectures is None; expected a list of one name"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected an integer or a list"),
        ({"hidden_size": 4100}, "hidden_size is 4100; expected head_dim beside it"),
    ],
)
def test_malformed_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_transformer_config(write(tmp_path, LLAMA | changes))


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_missing_or_broken_file_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_transformer_config(tmp_path)


@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    rope=st.sampled_from([RopeConfig(), RopeConfig(theta=5e5), LLAMA3_ROPE]),
    tied=st.booleans(),
    bias=st.booleans(),
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
    eos: list[int],
    bos: int | None,
    eps: float,
) -> None:
    config = replace(
        TARGET,
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
    path = write(
        tmp_path_factory.mktemp("config"), transformer_config_json(config, dtype="bfloat16")
    )
    assert load_transformer_config(path) == config


KNOWN = ("model_path", "speculative_num_steps", "context_length")


def test_engine_arguments_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('model_path = "m"\nspeculative_num_steps = 3\n')
    assert load_engine_toml(file, known=KNOWN) == {"model_path": "m", "speculative_num_steps": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "speculative_num_step = 3",
            "'speculative_num_step'; did you mean 'speculative_num_steps'",
        ),
        ("context-length = 3", "did you mean 'context_length'"),
        ("[model_path]\nx = 1", "model_path is a table; expected a flat"),
        ("model_path =", "cannot be read as TOML"),
    ],
)
def test_bad_engine_toml_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_engine_toml(file, known=KNOWN)


def test_a_missing_engine_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        load_engine_toml(tmp_path / "absent.toml", known=KNOWN)
