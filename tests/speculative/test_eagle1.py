"""EAGLE-1 heads with their targets: reading, sharing, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import save_target
from jspec.models.files.stored.tensors import stored_tensors, value_at
from jspec.models.heads.head_params import head_params
from jspec.speculative.drafters.ranked import EagleDrafter
from tests.speculative.engines import TARGET, mesh_of, tiny_params
from tests.speculative.every_drafter import EAGLE1, eagle1_weights

SIZE = TARGET.hidden_size


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Write TARGET and a head for it."""
    save_target(tmp_path / "target", TARGET, tiny_params()[0], dtype=np.float32)
    draft = tmp_path / "draft"
    draft.mkdir()
    tensors = stored_tensors(head_params(EAGLE1), eagle1_weights(), dtype=np.float32)
    save_file(tensors, draft / "model.safetensors")
    attention = EAGLE1.layer.one_layer.attention
    values = {
        "architectures": ["LlamaForCausalLMEagle"],
        "vocab_size": TARGET.vocab_size,
        "hidden_size": SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": EAGLE1.layer.rms_norm_eps,
    }
    (draft / "config.json").write_text(json.dumps(values))
    np.save(tmp_path / "freq.npy", HOT_IDS[::-1])
    return tmp_path


HOT_IDS = np.sort(np.random.default_rng(2).choice(TARGET.vocab_size, 64, replace=False))


def load(directory: Path, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(directory / "target"),
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(directory / "draft"),
        **{"dtype": "float32", **arguments},
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(1))


def test_a_head_is_read_beside_its_target(pair: Path) -> None:
    models = load(pair)
    assert isinstance(models.drafter, EagleDrafter)
    assert models.drafter.model.spec == EAGLE1
    assert models.target.aux_layer_ids == ()
    draft, target = models.params["draft"], models.params["target"]
    assert draft["lm_head"]["kernel"] is target["lm_head"]["kernel"]
    assert draft["embed"]["table"] is target["embed"]["table"]
    for path in (("layers", 0, "fuse", "kernel"), ("layers", 0, "attention", "qkv", "kernel")):
        np.testing.assert_array_equal(value_at(draft, path), value_at(eagle1_weights(), path))
    dummy = load(pair, load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def test_a_map_of_frequent_ids_takes_columns_of_the_targets_head(pair: Path) -> None:
    models = load(pair, speculative_token_map=str(pair / "freq.npy"))
    draft, target = models.params["draft"], models.params["target"]
    np.testing.assert_array_equal(draft["draft_ids"], HOT_IDS)
    kernel = draft["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, np.asarray(target["lm_head"]["kernel"])[:, HOT_IDS])
    assert kernel.sharding == target["lm_head"]["kernel"].sharding
    dummy = load(pair, speculative_token_map=str(pair / "freq.npy"), load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def test_an_eagle3_head_is_told_apart(pair: Path) -> None:
    path = pair / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_vocab_size": 160}))
    with pytest.raises(ConfigError, match="use --speculative-algorithm EAGLE3"):
        load(pair)


def test_what_does_not_fit_is_refused_before_the_target_is_read(pair: Path) -> None:
    few = pair / "few.json"
    few.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="speculative_eagle_topk is 4; expected at most 2"):
        load(pair, speculative_token_map=str(few), speculative_eagle_topk=4)
    with pytest.raises(CheckpointError, match=r"absent\.json: cannot be read"):
        load(pair, speculative_token_map=str(pair / "absent.json"))
    (pair / "draft" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"draft: expected model\.safetensors or"):
        load(pair)


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "NONE"])
def test_a_map_belongs_to_a_head(algorithm: str) -> None:
    message = rf"speculative_token_map is 'x\.npy', .* {algorithm}; expected it unset"
    with pytest.raises(ConfigError, match=message):
        EngineArgs(speculative_token_map="x.npy", speculative_algorithm=algorithm)


def test_a_head_with_an_lm_head_of_its_own_takes_no_map() -> None:
    args = EngineArgs(speculative_token_map="x.npy")
    with pytest.raises(ConfigError, match="draft has an lm_head of its own; expected it unset"):
        load_models(args, resolve_paths(args), mesh=mesh_of(1))
