"""int8 in config.json: compressed-tensors' dynamic W8A8 is read, other forms are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import ConfigError
from jspec.files.json_files import read_fields
from jspec.models.files.w8a8 import check_quantization, declared_forms
from jspec.spec.weight_format import INT8
from tests.models.fp8_checkpoints import INT8_CONFIG

WEIGHTS, INPUTS = "weights", "input_activations"


def written(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (WEIGHTS, {"symmetric": False}, "symmetric of weights is False; expected True"),
        (WEIGHTS, {"num_bits": 4}, "num_bits of weights is 4; expected 8"),
        (WEIGHTS, {"strategy": "group", "group_size": 128}, "strategy of weights is 'group'; exp"),
        (INPUTS, {"symmetric": False}, "symmetric of input_activations is False; expected True"),
        (INPUTS, {"dynamic": False}, "dynamic of input_activations is False; expected True"),
        (INPUTS, {"dynamic": None}, "dynamic of input_activations is False; expected True"),
        (INPUTS, {"strategy": "tensor"}, "strategy of input_activations is 'tensor'; .* 'token'"),
        (INPUTS, None, "input_activations is null; expected 8 bits of type 'int'"),
        (None, {"format": "pack-quantized"}, "format is 'pack-quantized'; expected 'int-quantized"),
    ],
)
def test_other_forms_are_refused(
    part: str | None, change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    config = copy.deepcopy(INT8_CONFIG)
    group = config["config_groups"]["group_0"]
    if part is None:
        config |= change or {}
    else:
        group[part] = None if change is None else group[part] | change
    path = written(tmp_path / "config.json", config)
    with pytest.raises(ConfigError, match=message) as caught:
        check_quantization(read_fields(path))
    assert str(path) in str(caught.value)


def test_the_forms_of_weights_follow_from_the_config(tmp_path: Path) -> None:
    written(tmp_path / "config.json", INT8_CONFIG)
    form_of = declared_forms(tmp_path)
    assert form_of("model.layers.0.self_attn.q_proj.weight") == INT8()
    assert form_of("lm_head.weight") is None
