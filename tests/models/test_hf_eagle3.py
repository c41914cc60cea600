"""EAGLE-3 checkpoint files: both name layouts, the vocabulary map, and everything refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError
from jspec.models.heads.eagle3 import check_eagle3, load_eagle3, save_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.head_files import canonical_name
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.spec.head_spec import FeatureNorm, HeadSpec, eagle3_spec
from jspec.spec.model_spec import uniform_decoder
from tests.models.random_params import assert_same, random_params

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
}
LAYER = uniform_decoder(**SIZES)
CONFIG = eagle3_spec(layer=LAYER, draft_vocab_size=6, target_hidden_size=8, aux_layer_ids=(2, 4, 5))
FULL = replace(CONFIG, draft_vocab_size=20)
TARGET = uniform_decoder(**(SIZES | {"num_layers": 8}))
DRAFT_IDS = np.array([1, 2, 5, 11, 12, 19], np.int32)


def target_params() -> Params:
    return {"embed": {"table": jnp.ones((20, 8))}, "lm_head": {"kernel": jnp.ones((8, 20))}}


def random_head(config: HeadSpec, *, dtype: Any = np.float32) -> Params:
    params = random_params(head_params(config), dtype=dtype)
    full = config.draft_vocab_size == config.layer.vocab_size
    params["draft_ids"] = np.arange(20, dtype=np.int32) if full else DRAFT_IDS
    return params


def written(path: Path, config: HeadSpec = CONFIG, **changes: Any) -> Path:
    """Save a head with tensors replaced, added or (None) removed."""
    path.mkdir(exist_ok=True)
    save_eagle3(path, config, random_head(config), dtype=np.float32, include_embed=True)
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors")
    return path


def load(path: Path, config: HeadSpec = CONFIG) -> Params:
    return load_eagle3(path, config, target_params=target_params(), dtype=np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, FULL, replace(CONFIG, norm_before_residual=True)])
def test_save_then_load_is_exact(config: HeadSpec, dtype: Any, tmp_path: Path) -> None:
    params = random_head(config, dtype=dtype)
    save_eagle3(tmp_path, config, params, dtype=dtype, include_embed=True)
    assert load_eagle3_config(tmp_path, target=TARGET) == config
    found = load_eagle3(tmp_path, config, target_params={}, dtype=dtype)
    assert_same(found, params)


def test_attention_biases_survive(tmp_path: Path) -> None:
    attention = replace(LAYER.one_layer.attention, qkv_bias=True, out_bias=True)
    layer = replace(LAYER, layers=(replace(LAYER.one_layer, attention=attention),))
    config = replace(CONFIG, layer=layer)
    params = random_head(config)
    save_eagle3(tmp_path, config, params, dtype=np.float32, include_embed=True)
    assert load_eagle3_config(tmp_path, target=TARGET) == config
    assert_same(load(tmp_path, config), params)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."])
def test_every_name_layout_is_the_same_head(prefix: str, tmp_path: Path) -> None:
    written(tmp_path)
    root = "model." if prefix.startswith("model.") else ""
    renamed = {
        prefix + name.removeprefix("midlayer.") if name.startswith("midlayer.") else root + name: v
        for name, v in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), random_head(CONFIG))


def test_names_that_only_begin_alike_keep_their_own() -> None:
    assert canonical_name("model.midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical_name("layers.01.x") == "layers.01.x"
    assert canonical_name("midlayer_norm.weight") == "midlayer_norm.weight"


def test_the_stored_map_is_an_offset_and_a_mask(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path) / "model.safetensors")
    np.testing.assert_array_equal(tensors["d2t"], np.array([1, 1, 3, 8, 8, 14]), strict=True)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), DRAFT_IDS)
    assert tensors["t2d"].dtype == bool


@given(st.sets(st.integers(0, 19), min_size=6, max_size=6))
def test_any_ascending_map_survives(
    tmp_path_factory: pytest.TempPathFactory, ids: set[int]
) -> None:
    path = tmp_path_factory.mktemp("map")
    params = random_head(CONFIG) | {"draft_ids": np.array(sorted(ids), np.int32)}
    save_eagle3(path, CONFIG, params, dtype=np.float32)
    np.testing.assert_array_equal(load(path)["draft_ids"], params["draft_ids"], strict=True)


def test_without_its_own_embedding_the_head_holds_the_target_s_array(tmp_path: Path) -> None:
    save_eagle3(tmp_path, CONFIG, random_head(CONFIG), dtype=np.float32)
    target = target_params()
    found = load_eagle3(tmp_path, CONFIG, target_params=target, dtype=np.float32)
    assert found["embed"]["table"] is target["embed"]["table"]


def test_a_full_vocabulary_head_may_use_the_target_s_lm_head(tmp_path: Path) -> None:
    written(tmp_path, FULL, **{"lm_head.weight": None})
    target = target_params()
    found = load_eagle3(tmp_path, FULL, target_params=target, dtype=np.float32)
    assert found["lm_head"]["kernel"] is target["lm_head"]["kernel"]
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(found["draft_ids"], np.arange(20))
    hot = np.array([3, 4, 19], np.int32)
    limited = load_eagle3(tmp_path, FULL, hot_ids=hot, target_params=target, dtype=np.float32)
    np.testing.assert_array_equal(limited["lm_head"]["kernel"], target["lm_head"]["kernel"][:, hot])
    np.testing.assert_array_equal(limited["draft_ids"], hot)


def test_a_missing_t2d_is_no_error(tmp_path: Path) -> None:
    assert_same(load(written(tmp_path, t2d=None)), random_head(CONFIG))


def test_strays_of_known_exporters_are_ignored(tmp_path: Path) -> None:
    strays: dict[str, Any] = {
        "rotary_emb.inv_freq": np.zeros(2, np.float32),
        "midlayer.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
        "verifier_lm_head.weight": np.zeros((6, 8), np.float32),
        "verifier_norm.weight": np.zeros(8, np.float32),
    }
    assert_same(load(written(tmp_path, **strays)), random_head(CONFIG))


def mask(*ids: int) -> Any:
    return np.isin(np.arange(20), ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": DRAFT_IDS.astype(np.int64)}, r"d2t gives target ids from 1 to 24"),
        ({"d2t": np.array([0, 0, 0, 0, 0, -1])}, r"ids from 0 to 4, 5 of them distinct"),
        ({"d2t": np.array([-1, 0, 0, 0, 0, 0])}, r"ids from -1 to 5"),
        ({"d2t": np.zeros(6, np.float32)}, r"d2t has dtype float32; expected integers"),
        ({"t2d": mask(1, 2, 5, 11, 12)}, r"t2d marks 5 target ids that are not the 6 of d2t"),
        ({"t2d": mask(1, 2, 5, 11, 12, 18)}, r"expected where\(t2d\) == d2t \+ arange"),
        ({"d2t": np.array([2, 0, 3, 8, 8, 14])}, r"expected where\(t2d\) == d2t \+ arange"),
        ({"d2t": None}, r"no tensor d2t; expected shape \(6,\)"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fc_norm.0.weight", (8,), r"each aux feature before fc; expected fc_norm true"),
        ("input_norm.weight", (24,), r"all aux features .* expected norm_before_fc true"),
        ("fc.bias", (8,), "a bias in fc; expected bias true"),
        ("midlayer.self_attn.q_norm.weight", (4,), "a norm of q; expected model_type 'qwen3'"),
        ("additional_layers.0.hidden_norm.weight", (8,), "further layers of an earlier SGLang"),
        ("mask_hidden", (1, 24), r"parallel drafting \(P-EAGLE\); expected parallel_drafting true"),
        ("midlayer.self_attn.qkv_proj.weight", (16, 16), r"unknown tensor .*qkv_proj\.weight"),
        ("other.weight", (3,), r"unknown tensor other\.weight of shape \(3,\)"),
        ("lm_head.weight", (7, 8), r"lm_head\.weight has shape \(7, 8\); expected \(6, 8\)"),
        ("fc.weight", (8, 16), r"fc\.weight has shape \(8, 16\); expected \(8, 24\)"),
        ("midlayer.mlp.up_proj.weight", None, r"no tensor layers\.0\.mlp\.up_proj\.weight"),
        ("lm_head.weight", None, r"no tensor lm_head\.weight; expected shape \(6, 8\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {name: None if shape is None else np.zeros(shape, np.float32)}
    with pytest.raises(CheckpointError, match=message):
        load(written(tmp_path, **changes))


def test_every_tensor_of_a_variant_is_named(tmp_path: Path) -> None:
    strange: dict[str, Any] = {"fc.bias": np.zeros(8), "mask_hidden": np.zeros((1, 24))}
    with pytest.raises(CheckpointError) as caught:
        load(written(tmp_path, **strange))
    assert "a bias in fc" in str(caught.value)
    assert "parallel drafting" in str(caught.value)


def restated(path: Path, **changes: Any) -> Path:
    """Change values of the head's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def renamed(path: Path, old: str, new: str) -> Path:
    """Replace a part of the names of the head's tensors."""
    tensors = load_file(path / "model.safetensors")
    kept = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(kept, path / "model.safetensors")
    return path


def test_a_midlayer_head_may_state_its_targets_number_of_layers(tmp_path: Path) -> None:
    restated(written(tmp_path), num_hidden_layers=TARGET.num_layers)
    config = load_eagle3_config(tmp_path, target=TARGET)
    assert config == CONFIG
    assert_same(load(tmp_path, config), random_head(CONFIG))
    renamed(tmp_path, "midlayer.", "layers.0.")
    with pytest.raises(CheckpointError, match=r"is 8, but the weights beside it have 1: \[0\]"):
        load_eagle3_config(tmp_path, target=TARGET)
    stated = load_eagle3_config(tmp_path, target=TARGET, reads_names=False)
    assert stated.layer.num_layers == 8  # config.json alone, for random weights


@pytest.mark.parametrize("stated", [2, 7, 40])
def test_a_midlayer_head_states_no_other_number(stated: int, tmp_path: Path) -> None:
    restated(written(tmp_path), num_hidden_layers=stated)
    message = rf"config\.json: num_hidden_layers is {stated}, .*midlayer.*; expected 1.* 8"
    with pytest.raises(CheckpointError, match=message):
        load_eagle3_config(tmp_path, target=TARGET)


@pytest.mark.parametrize(("stated", "found"), [(1, r"2: \[0, 1\]"), (3, r"2: \[0, 1\]")])
def test_more_layers_than_weights_or_fewer_are_an_error(
    stated: int, found: str, tmp_path: Path
) -> None:
    two = replace(CONFIG, layer=replace(LAYER, layers=LAYER.layers * 2))
    written(tmp_path, two)
    assert load_eagle3_config(tmp_path, target=TARGET) == two
    assert_same(load(tmp_path, two), random_head(two))
    restated(tmp_path, num_hidden_layers=stated)
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers is {stated}, .* have {found}"):
        load_eagle3_config(tmp_path, target=TARGET)


def test_what_bias_means_the_tensors_tell(tmp_path: Path) -> None:
    """SGLang reads `bias` for fc, vLLM for the attention."""
    of_fc = replace(CONFIG, fc_bias=True)
    written(tmp_path / "fc", of_fc)
    assert load_eagle3_config(tmp_path / "fc", target=TARGET) == of_fc
    attention = replace(LAYER.one_layer.attention, qkv_bias=True)
    layer = replace(LAYER, layers=(replace(LAYER.one_layer, attention=attention),))
    of_qkv = replace(CONFIG, layer=layer)
    restated(written(tmp_path / "qkv", of_qkv), bias=True, qkv_bias=False)
    assert load_eagle3_config(tmp_path / "qkv", target=TARGET) == of_qkv
    restated(written(tmp_path / "none"), bias=True)
    with pytest.raises(CheckpointError, match=r"bias is True, but the weights beside it have none"):
        load_eagle3_config(tmp_path / "none", target=TARGET)


@pytest.mark.parametrize("norm", list(FeatureNorm))
def test_norms_before_fc_survive(norm: FeatureNorm, tmp_path: Path) -> None:
    config = replace(CONFIG, feature_norm=norm, logit_scale=0.5)
    save_eagle3(tmp_path, config, random_head(config), dtype=np.float32, include_embed=True)
    assert load_eagle3_config(tmp_path, target=TARGET) == config
    assert_same(load(tmp_path, config), random_head(config))


def test_what_a_head_does_not_read_may_be_there(tmp_path: Path) -> None:
    """fc of a head that reads the last hidden, and a norm that config.json turns off."""
    config = replace(CONFIG, aux_layer_ids=(), norm_before_head=False)
    unread: dict[str, Any] = {"fc.weight": np.zeros((8, 24)), "norm.weight": np.zeros(8)}
    written(tmp_path, config, **unread)
    assert load_eagle3_config(tmp_path, target=TARGET) == config
    assert_same(load(tmp_path, config), random_head(config))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    for read in (lambda: load_eagle3_config(tmp_path, target=TARGET), lambda: load(tmp_path)):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
            read()


def test_all_that_does_not_fit_a_head_is_one_error(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "fc.weight": np.zeros((8, 16), np.float32),
        "norm.weight": None,
        "other.weight": np.zeros(1, np.float32),
        "midlayer.mlp.up_proj.weight": np.zeros((12, 8), np.int16),
    }
    with pytest.raises(CheckpointError, match="4 tensors do not fit") as caught:
        check_eagle3(written(tmp_path, **changes), CONFIG)
    for named in ("no tensor norm.weight", "unknown tensor other.weight", "fc.weight has shape"):
        assert named in str(caught.value)
    assert "layers.0.mlp.up_proj.weight has dtype I16" in str(caught.value)


def test_a_narrower_head_must_own_its_embedding(tmp_path: Path) -> None:
    config = replace(CONFIG, target_hidden_size=16)
    written(tmp_path, config)
    narrow = target_params() | {"embed": {"table": jnp.ones((20, 16))}}
    assert load_eagle3(tmp_path, config, target_params=narrow, dtype=np.float32)
    written(tmp_path, config, **{"embed_tokens.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor embed_tokens\.weight.*\(20, 16\) cannot"):
        load_eagle3(tmp_path, config, target_params=narrow, dtype=np.float32)


@pytest.mark.parametrize(
    "ids", [[1, 2, 5, 11, 12, 20], [-1, 2, 5, 11, 12, 19], [2, 1, 5, 11, 12, 19], [1, 2, 5]]
)
def test_saving_refuses_a_map_that_no_reader_could_use(ids: list[int], tmp_path: Path) -> None:
    params = random_head(CONFIG) | {"draft_ids": np.array(ids, np.int32)}
    with pytest.raises(CheckpointError, match="expected 6 ascending target ids"):
        save_eagle3(tmp_path, CONFIG, params, dtype=np.float32)


@pytest.mark.parametrize("ids", [(1, 4, 5), (0, 2, 3)])
def test_saved_aux_ids_are_read_as_they_were(ids: tuple[int, ...], tmp_path: Path) -> None:
    config = replace(CONFIG, aux_layer_ids=ids)
    save_eagle3(tmp_path, config, random_head(config), dtype=np.float32)
    assert load_eagle3_config(tmp_path, target=TARGET).aux_layer_ids == ids
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in ids]
