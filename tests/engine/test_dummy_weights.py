"""Random weights made on the devices: shapes, placement, magnitudes, a valid vocabulary map."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel, shardings
from jspec.engine.weights.dummy_weights import STD, dummy_params
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError
from jspec.models.heads.eagle3_config import eagle3_config_json
from jspec.models.heads.head_params import head_params
from jspec.models.layer_params import expert_params, lm_head
from jspec.models.params import INTEGERS, Init, ParamSpec
from jspec.models.placement import Tables, abstract_params, param_specs
from jspec.models.registry import family_named, table_of
from jspec.spec.layers.feed_forward import MoESpec
from tests.support.tiny_models import tiny_draft_config, tiny_target_config

TARGET = tiny_target_config()
DRAFT = tiny_draft_config(TARGET)


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Write two directories that have only a config.json."""
    for name, config in (
        ("target", family_named("llama").to_json(TARGET)),
        ("draft", eagle3_config_json(DRAFT, dtype="bfloat16")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {
        "model_path": str(tmp_path / "target"),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tmp_path / "draft"),
        "load_format": "dummy",
        "dtype": "bfloat16",
    }


def load(arguments: dict[str, Any], *, shards: int = 1) -> LoadedModels:
    args = EngineArgs.from_mapping(arguments)
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return load_models(args, resolve_paths(args), mesh=mesh)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_array_has_its_shape_its_dtype_and_its_place(
    arguments: dict[str, Any], shards: int
) -> None:
    models = load(arguments, shards=shards)
    tables = {"target": table_of(TARGET), "draft": head_params(DRAFT)}
    for name, table in tables.items():
        abstract = abstract_params(table, dtype=jnp.bfloat16, shards=shards)
        like = jax.tree.map(lambda x: (x.shape, x.dtype), models.params[name])
        assert like == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    places = shardings(mesh, param_specs(tables, models.params))
    own = {**models.params, "draft": {**models.params["draft"]}}
    jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim) or 1 / 0, own, places)
    kernel = models.params["target"]["layers"][0]["mlp"]["down"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (64 // shards, 32)


def test_the_draft_vocabulary_is_valid_and_the_embedding_is_the_targets(
    arguments: dict[str, Any],
) -> None:
    params = load(arguments).params
    ids = np.asarray(params["draft"]["draft_ids"])
    assert ids.shape == (DRAFT.draft_vocab_size,)
    assert ids.dtype == np.int32
    assert ids[0] >= 0
    assert ids[-1] < TARGET.vocab_size
    assert np.all(np.diff(ids) > 0)
    assert params["draft"]["embed"]["table"] is params["target"]["embed"]["table"]


def make(
    tables: Tables, *, vocab_size: int, shards: int = 1, dtype: Any = jnp.float32
) -> dict[str, Any]:
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return dummy_params(tables, mesh=mesh, vocab_size=vocab_size, dtype=dtype)


def test_ids_of_a_large_vocabulary_do_not_overflow() -> None:
    spec = ParamSpec(path=("draft_ids",), shape=(32000,), init=Init.IDS, format=INTEGERS)
    made = make({"draft": (spec,)}, vocab_size=128256, dtype=jnp.bfloat16)
    ids = np.asarray(made["draft"]["draft_ids"])
    assert ids.dtype == np.int32
    assert (ids[0], ids[-1]) == (0, 31999 * 128256 // 32000)
    assert np.all(np.diff(ids) > 0)


def test_numbers_are_normal_small_and_nowhere_repeated() -> None:
    table = ParamSpec(path=("a", "table"), shape=(500, 400), init=Init.TABLE)
    own = (table, lm_head(500, 400, tied=False))
    made = make({"target": own}, vocab_size=500, shards=2)["target"]
    flat = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(made)])
    assert abs(flat.std() / STD - 1) < 0.01
    assert abs(flat.mean()) < 4 * STD / flat.size**0.5
    assert np.isfinite(flat).all()
    assert 3.5 * STD < np.abs(flat).max() < 6.5 * STD
    first, second = (np.asarray(x).reshape(-1) for x in jax.tree.leaves(made))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    # Neighbours in a row and in a column.
    square = first.reshape(500, 400)
    assert abs(np.corrcoef(square[:, 1:].ravel(), square[:, :-1].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(square[1:].ravel(), square[:-1].ravel())[0, 1]) < 0.01


def test_weights_do_not_depend_on_the_number_of_devices() -> None:
    tables = {"target": (lm_head(64, 32, tied=False),)}
    one, two = (
        make(tables, vocab_size=32, shards=shards)["target"]["lm_head"]["kernel"]
        for shards in (1, 2)
    )
    assert len(two.sharding.device_set) == 2
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_the_experts_of_a_stack_differ() -> None:
    table = expert_params(MoESpec(num_experts=3, top_k=1, inner=40), size=50)
    made = make({"target": table}, vocab_size=32)["target"]["moe"]["experts"]
    for stack in (np.asarray(made["gate_up"]), np.asarray(made["down"])):
        flat = stack.reshape(3, -1)
        assert np.abs(np.corrcoef(flat) - np.eye(3)).max() < 0.1
        assert abs(flat.std() / STD - 1) < 0.05


def test_norms_are_one_and_biases_zero() -> None:
    layer = TARGET.one_layer
    layer = dataclasses.replace(
        layer, attention=dataclasses.replace(layer.attention, qkv_bias=True, qk_norm=True)
    )
    config = dataclasses.replace(TARGET, layers=(layer,) * 3)
    made = make({"target": table_of(config)}, vocab_size=320)["target"]
    assert np.all(np.asarray(made["layers"][1]["attention"]["k_norm"]["scale"]) == 1)
    assert np.all(np.asarray(made["norm"]["scale"]) == 1)
    assert np.all(np.asarray(made["layers"][0]["attention"]["qkv"]["bias"]) == 0)
    kernels = [np.asarray(made["layers"][i]["mlp"]["down"]["kernel"]) for i in (0, 1)]
    assert not np.array_equal(*kernels)


def test_without_dummy_the_weights_are_asked_for(arguments: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        load({**arguments, "load_format": "auto"})
    with pytest.raises(ConfigError, match="load_format is 'pt'; expected one of auto, dummy"):
        EngineArgs(load_format="pt")
