"""RoPE in every spelling, alone and combined, as transformers 5 reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import load_model_spec
from jspec.spec.rope import RopeConfig, YarnConfig
from jspec.spec.rope_io import rope_json

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 777,
}
SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = {"original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", **SCALING, **LENGTH}
OLD_LLAMA3 = {"type": "llama3", **SCALING, **LENGTH}
EXPECTED = RopeConfig(theta=5e5, **SCALING, original_max_position=4096)


def load(path: Path, **rope: Any) -> RopeConfig:
    (path / "config.json").write_text(json.dumps(LLAMA | rope))
    return load_model_spec(path).one_layer.attention.rope


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": LLAMA3, "rope_parameters": {"type": "default"}, "rope_theta": 5e5},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3, "rope_theta": 5e5},
        {"rope_scaling": OLD_LLAMA3, "rope_parameters": LLAMA3, "rope_theta": 5e5},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e5},
        {"rope_scaling": {**OLD_LLAMA3, **LLAMA3}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_theta": 5e5, **LLAMA3}, "rope_theta": 1e4},
        {"rope_scaling": {"type": "llama3", **SCALING}, "rope_theta": 5e5, **LENGTH},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **OLD_LLAMA3}},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_a_scaling_counts_wherever_it_is_written(rope: dict[str, Any], tmp_path: Path) -> None:
    assert load(tmp_path, **rope) == EXPECTED


# (a file's keys, the theta that transformers 5.24 reads from them)
THETAS = [
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 1e4),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}}, 1e4),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 1e4),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}, "rope_theta": 3e5}, 3e5),
    ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5}, "rope_theta": 3e5}, 5e5),
    ({"rope_parameters": LLAMA3, "rope_theta": 3e5}, 3e5),
]


@pytest.mark.parametrize(("rope", "theta"), THETAS)
def test_theta_is_that_of_transformers(
    rope: dict[str, Any], theta: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path, **rope).theta == theta
    is_dropped = theta != 5e5 and "rope_theta" in rope["rope_parameters"]
    assert is_dropped == any("500000.0" in record.message for record in caplog.records)


def test_without_the_length_before_scaling_it_is_the_context(tmp_path: Path) -> None:
    assert load(tmp_path, rope_scaling={"rope_type": "llama3", **SCALING}) == RopeConfig(
        **SCALING, original_max_position=777
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 8.0}},
            r"factor is 8\.0 in rope_parameters and 32\.0 in rope_scaling",
        ),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3},
            "rope_type is 'llama3' in rope_parameters and 'default' in rope_scaling",
        ),
        (
            {"rope_scaling": {"rope_theta": 1.0}, "rope_parameters": {"rope_theta": 2.0}},
            r"rope_theta is 2\.0 in rope_parameters and 1\.0 in rope_scaling",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 2.0}},
            "rope_type is 'llama3' and type is 'linear' in rope_scaling",
        ),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8192},
            "original_max_position_embeddings is 4096 for RoPE and 8192 outside",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            r"low_freq_factor is 1\.0 and high_freq_factor is 1\.0",
        ),
    ],
)
def test_what_contradicts_itself_is_an_error_with_both_values(
    rope: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, **rope)


def test_linear_and_dynamic(tmp_path: Path) -> None:
    """Vicuna-16k and deepseek-coder have `linear`; `dynamic` changes nothing within the context."""
    linear = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    expected = RopeConfig(factor=4.0, is_linear=True)
    assert load(tmp_path, **linear) == load(tmp_path, **rope_json(expected)) == expected
    assert load_model_spec(tmp_path).max_position == 777
    load(tmp_path, **linear, max_sequence_length=3108)
    assert load_model_spec(tmp_path).max_position == 3108
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_sequence_length": 3108}
    assert load(tmp_path, **dynamic) == RopeConfig()
    assert load_model_spec(tmp_path).max_position == 777
    with pytest.raises(CheckpointError, match="factor is None; expected a positive number"):
        load(tmp_path, rope_scaling={"type": "dynamic"})


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            {"rope_scaling": YARN, "rope_theta": 1e6},
            RopeConfig(
                theta=1e6,
                factor=4.0,
                original_max_position=777,
                yarn=YarnConfig(attention_factor=0.1 * math.log(4.0) + 1),
            ),
        ),
        (
            {"rope_parameters": {**YARN, **LENGTH, "truncate": False, "attention_factor": 2.0}},
            RopeConfig(
                factor=4.0,
                original_max_position=4096,
                yarn=YarnConfig(attention_factor=2.0, truncate=False),
            ),
        ),
        (
            {"rope_scaling": {**YARN, "mscale": 0, "beta_fast": 8, "beta_slow": 2, "factor": 1}},
            RopeConfig(
                original_max_position=777,
                yarn=YarnConfig(attention_factor=1.0, beta_fast=8.0, beta_slow=2.0),
            ),
        ),
    ],
)
def test_yarn(rope: dict[str, Any], expected: RopeConfig, tmp_path: Path) -> None:
    assert load(tmp_path, **rope) == expected
    assert load(tmp_path, **rope_json(expected)) == expected


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"factor": 0.5}, ConfigError, r"rope factor is 0\.5; expected at least 1"),
        ({"factor": None}, CheckpointError, "factor is None; expected a positive number"),
        ({"beta_slow": 33}, CheckpointError, r"beta_fast is 32\.0 and beta_slow is 33\.0"),
        ({"truncate": 0}, CheckpointError, "truncate is 0; expected true or false"),
        ({"rope_theta": 1.0}, CheckpointError, r"rope_theta is 1\.0; expected above 1"),
        ({"attention_factor": -1}, CheckpointError, "attention_factor is -1; expected a positive"),
    ],
)
def test_a_malformed_yarn_is_named(
    rope: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load(tmp_path, rope_parameters={**YARN, **rope})


@pytest.mark.parametrize("kind", ["longrope", ["llama3"]])
@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
def test_another_kind_is_refused_by_name(kind: Any, table: str, tmp_path: Path) -> None:
    beside = {"rope_parameters": {"rope_type": "default"}, table: {"rope_type": kind, "factor": 2}}
    with pytest.raises(ConfigError, match=r"rope type is \[?'(long|llama3)"):
        load(tmp_path, **beside)
