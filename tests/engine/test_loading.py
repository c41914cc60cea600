"""Checkpoints that do not fit their own configuration, refused before anything is built."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import BUNDLED, load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "llama" / "plain"
FAMILIES = GOLDEN.parents[1] / "families"


def copy_of(source: Path, path: Path, **changes: Any) -> str:
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def load(**arguments: Any) -> None:
    args = EngineArgs(**arguments)
    mesh = Parallel().mesh(jax.devices("cpu")[:1])
    load_models(args, resolve_paths(args), mesh=mesh)


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        (None, Parallel(expert=2), "ep_size is 2; expected 1: the model has no experts"),
        ("qwen3_moe", Parallel(expert=4), "ep_size is 4; expected a divisor of 6, the number of"),
        (
            "gpt_oss_odd",
            Parallel(expert=2, tensor=2),
            "tp_size / ep_size is 2; expected a divisor of moe_intermediate_size 33",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(
    family: str | None, parallel: Parallel, message: str, tmp_path: Path
) -> None:
    path = None if family is None else str(FAMILIES / family)
    if family == "gpt_oss_odd":
        path = copy_of(FAMILIES / "gpt_oss", tmp_path / family, intermediate_size=33)
    args = EngineArgs(model_path=path)
    mesh = parallel.mesh(jax.devices("cpu")[: parallel.data * parallel.model])
    with pytest.raises(ConfigError, match=message):
        load_models(args, resolve_paths(args), mesh=mesh)


def test_spares_make_experts_divisible_or_are_named() -> None:
    """Six experts over four groups: one spare does not help, and two do."""
    mesh = Parallel(expert=4).mesh(jax.devices("cpu")[:4])
    how: dict[str, Any] = {"model_path": str(FAMILIES / "qwen3_moe"), "tp_size": 4, "ep_size": 4}
    args = EngineArgs(**how, ep_num_redundant_experts=1)
    with pytest.raises(ConfigError, match="of 7, the number of experts, with ep_num_redundant_ex"):
        load_models(args, resolve_paths(args), mesh=mesh)
    args = EngineArgs(**how, ep_num_redundant_experts=2, skip_tokenizer_init=True)
    models = load_models(args, resolve_paths(args), mesh=mesh)
    assert models.config.expert_map == ((0, 1, 2, 3, 4, 5, 0, 1),) * 2


def test_experts_are_counted_only_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match="expected it unset: the model has no experts"):
        load(expert_distribution_recorder_mode="stat")


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ({}, "draft"),
        ({"speculative_algorithm": "EAGLE3"}, "draft"),
        ({"speculative_algorithm": "EAGLE"}, "draft_eagle1"),
        ({"speculative_algorithm": "NEXTN"}, "draft_mtp"),
        ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, "draft_mtp"),
        ({"speculative_algorithm": "STANDALONE"}, "draft_lm"),
        ({"speculative_algorithm": "NGRAM"}, None),
    ],
)
def test_the_bundled_target_has_a_draft_of_each_kind(
    arguments: dict[str, Any], folder: str | None
) -> None:
    expected = None if folder is None else BUNDLED / folder
    assert resolve_paths(EngineArgs(**arguments)).draft == expected


def test_a_draft_that_is_named_stands_before_the_bundled_targets_own(tmp_path: Path) -> None:
    """`jspec train-draft` without --model-path prints such a command at its end."""
    (tmp_path / "config.json").touch()
    args = EngineArgs(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path))
    assert resolve_paths(args).draft == tmp_path


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (10**9, "num_hidden_layers is 1000000000; expected an integer of at most 1024"),
        (1000, r"no tensor model\.layers\.2\.input_layernorm\.weight(.|\n)*8982 in all"),
    ],
)
def test_too_many_layers_are_an_error_at_once(layers: int, message: str, tmp_path: Path) -> None:
    path = copy_of(GOLDEN, tmp_path / "model", num_hidden_layers=layers)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=message):
        load(model_path=path)
    assert time.monotonic() - started < 10  # building 1,000 layers takes longer


def test_a_head_that_does_not_fit_is_refused_before_its_target_is_read(tmp_path: Path) -> None:
    target = copy_of(BUNDLED / "target", tmp_path / "target")
    draft = copy_of(BUNDLED / "draft", tmp_path / "draft", draft_vocab_size=8)
    arguments = {
        "model_path": target,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
    }
    with pytest.raises(CheckpointError, match=r"draft: 2 tensors do not fit\n  d2t has shape"):
        load(**arguments)


def test_one_error_names_all_that_does_not_fit_of_a_target(tmp_path: Path) -> None:
    path = copy_of(GOLDEN, tmp_path / "model")
    layer = "model.layers.0."
    spoil(
        Path(path),
        **{
            "model.norm.weight": None,
            f"{layer}self_attn.q_proj.weight": None,
            f"{layer}extra.weight": np.zeros(3, np.float32),
            f"{layer}mlp.up_proj.weight": np.zeros((2, 2), np.float32),
            "lm_head.weight": np.zeros((2, 2), np.int16),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load(model_path=path)
    message = str(caught.value)
    for part in (
        "6 tensors do not fit",  # lm_head by shape and by type
        "no tensor model.norm.weight; expected shape",
        f"no tensor {layer}self_attn.q_proj.weight; expected shape",
        f"unknown tensor {layer}extra.weight of shape (3,)",
        f"{layer}mlp.up_proj.weight has shape (2, 2); expected",
        "lm_head.weight has shape (2, 2); expected",
        "lm_head.weight has dtype I16; expected one of F16, BF16, F32, F64",
    ):
        assert part in message


def spoil(path: Path, **changes: Any) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
