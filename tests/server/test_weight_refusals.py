"""Updates of weights that are refused: they change nothing, and the error lists all faults."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError, ConfigError, RequestError, shown_json
from jspec.serving.engine import Engine
from tests.support.tiny_models import TinyPair, write_tiny_pair

from .test_weights import GREEDY, PROMPT, K, Q, ids_of, read


def bad_target(pair: TinyPair, path: Path, **changes: Any) -> dict[str, Any]:
    shutil.copytree(pair.target_path, path)
    file = path / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    return {"model_path": str(path)}


def test_a_bad_update_changes_nothing_and_says_all_that_is_wrong(
    served: Engine, other_pair: TinyPair, tmp_path: Path
) -> None:
    before = ids_of(served, PROMPT, GREEDY)
    weights = {name: read(served, name) for name in (Q, K, "lm_head.weight")}
    spoilt = bad_target(
        other_pair,
        tmp_path / "shapes",
        **{Q: None, K: np.zeros((3, 3), np.float32), "lm_head.weight": np.zeros((2, 2), np.int16)},
    )
    draft = tmp_path / "draft"
    shutil.copytree(other_pair.draft_path, draft)
    (draft / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError) as caught:
        served.update_weights_from_disk(**spoilt, speculative_draft_model_path=str(draft))
    for part in (
        f"no tensor {Q}; expected shape",
        f"{K} has shape (3, 3); expected",
        "lm_head.weight has dtype I16; expected",
        "draft/model.safetensors: cannot be read",
    ):
        assert part in str(caught.value)
    nan = np.full((16, 32), np.nan, np.float32)
    norm = np.full(32, np.inf, np.float32)
    spoilt = bad_target(other_pair, tmp_path / "nan", **{K: nan, "model.norm.weight": norm})
    with pytest.raises(CheckpointError, match="not finite") as caught:
        served.update_weights_from_disk(**spoilt)
    assert "model.norm.weight has values that are not finite" in str(caught.value)
    assert "model.layers.1.self_attn.q_proj.weight or " in str(caught.value)
    smaller = write_tiny_pair(tmp_path / "smaller", num_layers=4)
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: layers has 4 entries; expected 2(.|\n)*unknown tensor",
    ):
        served.update_weights_from_disk(str(smaller.target_path))
    for given, message in (
        ({"x": nan}, r"unknown tensor x of shape \(16, 32\)"),
        ({K: nan.T, Q: np.zeros((32, 32), np.int32)}, r"2 tensors do not fit(.|\n)*has dtype I32"),
        ({K: nan}, "not finite"),
        ({"d2t": np.zeros(160, np.int64)}, "which ids are drafted"),
        ({}, "there are none"),
    ):
        with pytest.raises(CheckpointError, match=message):
            served.update_weights_from_tensor(given)
    for name, value in weights.items():
        np.testing.assert_array_equal(read(served, name), value)
    assert ids_of(served, PROMPT, GREEDY) == before
    assert served.weight_version == "default"


@pytest.mark.parametrize("path", [5, "", None, b"x", ["x"]])
def test_a_path_that_is_none_is_named(served: Engine, path: Any) -> None:
    expected = f"is {re.escape(shown_json(path))}; expected a directory with a checkpoint"
    with pytest.raises(RequestError, match=f"^model_path {expected}"):
        served.update_weights_from_disk(path)
    if path is not None:
        with pytest.raises(RequestError, match=f"^speculative_draft_model_path {expected}"):
            served.update_weights_from_disk("x", speculative_draft_model_path=path)


def test_paths_may_be_pathlibs_and_versions_are_text(served: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a directory without config\.json"):
        served.update_weights_from_disk(tmp_path)
    with pytest.raises(ConfigError, match="weight_version is 5; expected a name"):
        served.update_weights_from_disk("x", weight_version=5)


def test_an_update_that_is_asked_for_wrongly(client: httpx.Client, tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    for body, message in (
        ({}, "has no model_path"),
        (
            {"model_path": str(tmp_path), "selector": "target"},
            f"model_path is '{tmp_path}', a directory without config.json; expected one with a "
            "checkpoint in Hugging Face's layout",
        ),
        ({"model_path": str(tmp_path / "none")}, "expected a directory with a checkpoint"),
        ({"model_path": "x", "load_format": "dummy"}, "load_format is 'dummy'; expected auto"),
        ({"model_path": "x", "manifest": {}}, "manifest is {}, which is not implemented"),
        ({"model_path": "x", "weight_version": ""}, "weight_version is ''; expected a name"),
        (
            {"model_path": "x", "abort_all_requests": True, "wait_for_requests": True},
            "expected one of them",
        ),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert message in answer.json()["message"]
