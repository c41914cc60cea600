"""Random weights made on the devices: shapes, places, sizes of numbers, a valid vocabulary map."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import sharding
from jspec.core.config_io import eagle3_config_json, transformer_config_json
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import CheckpointError, ConfigError
from jspec.engine.dummy_weights import STD, dummy_params
from jspec.engine.loading import LoadedModels, load_models, resolve_paths
from jspec.layers.linear import Shard
from jspec.models.paged import PagedLlama
from jspec.testing.tiny_models import tiny_draft_config, tiny_target_config

TARGET = tiny_target_config()
DRAFT = tiny_draft_config(TARGET)


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Two directories that hold nothing but config.json."""
    for name, config in (
        ("target", transformer_config_json(TARGET, dtype="bfloat16")),
        ("draft", eagle3_config_json(DRAFT, dtype="bfloat16")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {
        "model_path": str(tmp_path / "target"),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tmp_path / "draft"),
        "load_format": "dummy",
    }


def load(arguments: dict[str, Any], *, shards: int = 1) -> LoadedModels:
    args = EngineArgs.from_mapping(arguments)
    mesh = sharding.make_mesh(jax.devices("cpu")[:shards])
    return load_models(args, resolve_paths(args), mesh=mesh, dtype=jnp.bfloat16)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_array_has_its_shape_its_dtype_and_its_place(
    arguments: dict[str, Any], shards: int
) -> None:
    models = load(arguments, shards=shards)
    _, abstract = PagedLlama.create(
        TARGET, shard=Shard(shards, sharding.TENSOR_AXIS), dtype=jnp.bfloat16
    )
    like = jax.tree.map(lambda x: (x.shape, x.dtype), models.params["target"])
    assert like == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    mesh = sharding.make_mesh(jax.devices("cpu")[:shards])
    places = sharding.shardings(mesh, sharding.param_specs(models.params))
    own = {**models.params, "draft": {**models.params["draft"]}}
    jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim) or 1 / 0, own, places)


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


def test_ids_of_a_large_vocabulary_do_not_overflow() -> None:
    abstract = {"draft": {"draft_ids": jax.ShapeDtypeStruct((32000,), jnp.int32)}}
    mesh = sharding.make_mesh(jax.devices("cpu")[:1])
    ids = np.asarray(dummy_params(abstract, mesh=mesh, vocab_size=128256)["draft"]["draft_ids"])
    assert (ids[0], ids[-1]) == (0, 31999 * 128256 // 32000)
    assert np.all(np.diff(ids) > 0)


def test_numbers_are_normal_small_and_nowhere_repeated() -> None:
    table = jax.ShapeDtypeStruct((500, 400), jnp.float32)
    mesh = sharding.make_mesh(jax.devices("cpu")[:2])
    abstract = {"target": {"a": {"table": table}, "lm_head": {"kernel": table}}}
    made = dummy_params(abstract, mesh=mesh, vocab_size=500)["target"]
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
    abstract = {"target": {"lm_head": {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.float32)}}}
    one, two = (
        dummy_params(abstract, mesh=sharding.make_mesh(jax.devices("cpu")[:shards]), vocab_size=32)[
            "target"
        ]["lm_head"]["kernel"]
        for shards in (1, 2)
    )
    assert len(two.sharding.device_set) == 2
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_norms_are_one_and_biases_zero() -> None:
    config = dataclasses.replace(TARGET, attention_bias=True)
    _, abstract = PagedLlama.create(config, shard=Shard(), dtype=jnp.bfloat16)
    mesh = sharding.make_mesh(jax.devices("cpu")[:1])
    made = dummy_params({"target": abstract}, mesh=mesh, vocab_size=320)["target"]
    assert np.all(np.asarray(made["norm"]["scale"]) == 1)
    assert np.all(np.asarray(made["layers"][0]["attention"]["qkv"]["bias"]) == 0)
    kernels = [np.asarray(made["layers"][i]["mlp"]["down"]["kernel"]) for i in (0, 1)]
    assert not np.array_equal(*kernels)


def test_without_dummy_the_weights_are_asked_for(arguments: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        load({**arguments, "load_format": "auto"})
    with pytest.raises(ConfigError, match="load_format is 'pt'; expected one of auto, dummy"):
        EngineArgs(load_format="pt")
