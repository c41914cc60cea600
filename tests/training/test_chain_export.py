"""A chain of MTP layers as `train-draft` exports it.

SGLang's class for the layout hard-codes Step-3.5-Flash's first layer number and takes no embedding
from the target.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.checkpoint_info import describe
from jspec.engine.weights.loading import load_models, resolve_paths
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import CheckpointError
from jspec.messages.weight_update import ArrayUpdate, Model
from jspec.models.files.checkpoint import save_target
from jspec.models.heads.mtp import (
    check_mtp,
    load_mtp,
    load_mtp_config,
    mtp_config_json,
    written_config,
)
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.training.heads.head_mtp import TrainedMtp, mtp_head
from tests.training.tiny_pair import tiny_target

COUNT, PUBLISHED = 3, 45


def target_of(num_layers: int) -> tuple[ModelSpec, Params]:
    """Return the tiny target with num_layers layers; the head reads none of their params."""
    target, params = tiny_target()
    return replace(target, layers=target.layers[:1] * num_layers), params


def exported(folder: Path, target: ModelSpec, params: Params) -> tuple[TrainedMtp, Params]:
    """Export a chain with every tensor moved from its initial value; return it and its params."""
    head = mtp_head(target, num_layers=COUNT, intermediate_size=40, chained=True)
    ids = np.arange(target.vocab_size, dtype=np.int32)
    own = head.init(params, ids, seed=3)
    leaves, tree = jax.tree.flatten(own)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    moved = [x + jax.random.normal(k, x.shape) / 8 for x, k in zip(leaves, keys, strict=True)]
    own = jax.tree.unflatten(tree, moved)
    whole = head.whole(own, params, ids)
    head.save(folder, whole, draft_ids=ids, dtype=np.float32, target=target)
    return head, own


def check_reads(folder: Path, target: ModelSpec, params: Params, head: TrainedMtp, own: Any) -> Any:
    """Read the chain beside its target, as an engine does; return the config."""
    config, names = load_mtp_config(folder, target=target, num_layers=COUNT)
    check_mtp(folder, config, names)
    read = load_mtp(folder, config, names, target_params=params, dtype=np.float32)
    assert read["embed"] is params["embed"]
    assert config.aux_layer_ids == (target.num_layers,)
    assert config.own_head
    assert config.chained
    got, expected = {"layers": read["layers"]}, {"layers": own["layers"]}
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(expected))
    assert head.aux_layer_ids == config.aux_layer_ids
    return config


def test_a_chain_has_what_the_peers_classes_look_for(tmp_path: Path) -> None:
    """Including one number among the MoE layers, and for vLLM a window of the whole context."""
    target, params = target_of(3)
    exported(tmp_path, target, params)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_hidden_layers"] == PUBLISHED
    assert written["num_nextn_predict_layers"] == COUNT
    assert written["use_head_wise_attn_gate"] is True
    assert [int(i) for i in written["moe_layers_enum"].split(",")] == [-1]
    assert written["layer_types"] == ["sliding_attention"] * (PUBLISHED + COUNT)
    assert written["sliding_window"] == target.max_position == written["max_seq_len"]
    for name in ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
        assert len(written[name]) == PUBLISHED + COUNT, name
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    np.testing.assert_array_equal(table, np.asarray(params["embed"]["table"]))
    assert {name.split(".")[2] for name in tensors} == {"45", "46", "47"}
    assert all(name.startswith("model.layers.") for name in tensors)


@pytest.mark.parametrize("num_layers", [3, 44, 46, 61])
def test_a_chain_is_read_beside_a_target_of_any_number_of_layers(
    num_layers: int, tmp_path: Path
) -> None:
    target, params = target_of(num_layers)
    head, own = exported(tmp_path, target, params)
    assert check_reads(tmp_path, target, params, head, own) == head.spec


def test_a_chain_that_has_not_the_number_beside_it_is_refused(tmp_path: Path) -> None:
    target, params = target_of(3)
    exported(tmp_path, target, params)
    said = tmp_path / "config.json"
    written = json.loads(said.read_text())
    said.write_text(json.dumps(written | {"num_hidden_layers": 44}))
    config, names = load_mtp_config(tmp_path, target=target, num_layers=COUNT)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.44\."):
        check_mtp(tmp_path, config, names)
    said.write_text(json.dumps(written | {"num_hidden_layers": 46}))
    with pytest.raises(CheckpointError, match=r"layer_types has 48 entries; expected .* layer 48"):
        load_mtp_config(tmp_path, target=target, num_layers=COUNT)


@pytest.mark.parametrize("rope", [RopeConfig(theta=10000.0), RopeConfig(theta=5e5, factor=8.0)])
def test_a_chain_says_again_how_its_rope_is_scaled(rope: RopeConfig) -> None:
    target, _ = target_of(3)
    layer = target.layers[0]
    layer = replace(layer, attention=replace(layer.attention, rope=rope))
    config = written_config(target, layer, num_layers=COUNT, chained=True)
    written = mtp_config_json(config, target=target, dtype="float32")  # which reads it again
    assert (written["rope_scaling"] is not None) == (rope.factor > 1)
    assert written["rope_theta"][PUBLISHED:] == [rope.theta] * COUNT


def test_its_own_tensors_update_it_and_no_layer_of_its_target(tmp_path: Path) -> None:
    """If the target also has layers 45 to 47, a tensor's name is ambiguous."""
    target, params = target_of(48)
    params = {**params, "layers": dict.fromkeys(range(48), params["layers"][0])}
    save_target(tmp_path / "target", target, params, dtype=np.float32)
    exported(tmp_path / "head", target, params)
    args = EngineArgs(
        model_path=str(tmp_path / "target"),
        speculative_algorithm="NEXTN",
        speculative_draft_model_path=str(tmp_path / "head"),
        dtype="float32",
    )
    mesh = Parallel().mesh(jax.devices("cpu")[:1])
    models = load_models(args, resolve_paths(args), mesh=mesh)
    runner = SimpleNamespace(params=models.params)
    served = ServedWeights(replace(models, params={}), runner, mesh=mesh)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    update = ArrayUpdate(arrays={name: 2 * x for name, x in stored.items()})
    with pytest.raises(CheckpointError, match=r"layers\.45\.\S+ is a tensor of the target and of"):
        served.prepare(update)
    served.prepare(replace(update, model=Model.DRAFT))
    both = next(name for name in stored if name.endswith("45.self_attn.q_proj.weight"))
    served.prepare(ArrayUpdate(arrays={both: stored[both]}))  # by itself it is the target's
    alone = describe(tmp_path / "head")
    beside = describe(tmp_path / "head", target=tmp_path / "target")
    assert alone.parameters - beside.parameters == target.vocab_size * target.hidden_size
