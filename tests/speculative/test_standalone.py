"""A language model as draft, on disk: reading, and drafts that do not fit their target."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.models.files.checkpoint import save_target
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.spec.model_spec import uniform_decoder
from jspec.speculative.drafters.ranked import StandaloneDrafter
from tests.speculative.engines import (
    TARGET,
    mesh_of,
    tiny_params,
)
from tests.support.tiny_models import tiny_tokenizer

SMALL = uniform_decoder(
    vocab_size=TARGET.vocab_size,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


@functools.cache
def small_params() -> Params:
    return init_params(table_of(SMALL), seed=7)


def load(directory: Path, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(directory / "target"),
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(directory / "draft"),
        **{"dtype": "float32", **arguments},
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(1))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Write a target and a small model, each with the same tokenizer."""
    for name, spec, params in (
        ("target", TARGET, tiny_params()[0]),
        ("draft", SMALL, small_params()),
    ):
        save_target(tmp_path / name, spec, params, dtype=np.float32)
        tiny_tokenizer().save(str(tmp_path / name / "tokenizer.json"))
    return tmp_path


def test_a_draft_is_read_as_a_target_is(pair: Path) -> None:
    models = load(pair)
    assert isinstance(models.drafter, StandaloneDrafter)
    assert models.drafter.model.spec == models.draft_layer
    assert [group.name for group in models.drafter.cache_groups] == ["draft"]
    assert models.target.aux_layer_ids == ()
    embedding = models.params["draft"]["embed"]["table"]
    np.testing.assert_array_equal(embedding, small_params()["embed"]["table"])
    dummy = load(pair, load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def other_vocab_size(pair: Path) -> None:
    path = pair / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 321}))


def other_token(pair: Path) -> None:
    path = pair / "draft" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|end|>"))


def no_weights(pair: Path) -> None:
    (pair / "draft" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "arguments", "kind", "message"),
    [
        (
            other_vocab_size,
            {},
            ConfigError,
            r"draft/config\.json: vocab_size is 321; expected 320, the target's",
        ),
        (
            other_token,
            {},
            CheckpointError,
            r"draft/tokenizer\.json: id 256 is '<\|end\|>'; expected '<\|endoftext\|>', as in "
            r"the target's tokenizer\.json: a draft must have .* \(1 ids differ\)",
        ),
        (no_weights, {}, CheckpointError, r"draft: expected model\.safetensors"),
        (
            None,
            {"speculative_draft_rope_theta": 5.0},
            ConfigError,
            "speculative_draft_rope_theta is 5.0, but speculative_algorithm is STANDALONE",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_the_target_is_read(
    pair: Path, spoil: Any, arguments: dict[str, Any], kind: type[JspecError], message: str
) -> None:
    if spoil is not None:
        spoil(pair)
    with pytest.raises(kind, match=message):
        load(pair, **arguments)


def test_a_draft_without_a_tokenizer_is_taken_at_its_vocab_size(pair: Path) -> None:
    (pair / "draft" / "tokenizer.json").unlink()
    load(pair, load_format="dummy")


def test_a_target_of_ones_own_needs_a_draft_that_is_named() -> None:
    with pytest.raises(ConfigError, match="STANDALONE; expected speculative_draft_model_path too"):
        EngineArgs(model_path="m", speculative_algorithm="STANDALONE")
