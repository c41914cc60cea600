"""Training a target: overfitting a batch, and reading an export back."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.training.dense import dropout, init_target, with_lm_head
from jspec.training.draft_recipe import draft_vocabulary
from jspec.training.loop import LoopConfig, init_state, make_step
from recipes.bundled_pair.target import TargetRecipe, export_target, next_token_loss
from recipes.bundled_pair.tokenizer_training import load_tokenizer, train_tokenizer
from tests.training.tiny_pair import random_rows, tiny_head, tiny_target


@pytest.mark.slow
def test_one_batch_can_be_learnt_by_heart() -> None:
    config, _ = tiny_target()
    loop = LoopConfig(num_steps=200, peak_learning_rate=1e-2, weight_decay=0.0)
    recipe = TargetRecipe(loop=loop, length=12, dropout_rate=0.0, compute_dtype=jnp.float32)
    step_fn = make_step(next_token_loss(config, recipe, train=True), loop)
    state = init_state(init_target(config, seed=0), loop)
    batch = random_rows(4, 12)
    losses = []
    for _ in range(150):
        state, metrics = step_fn(state, None, batch, jnp.float32(1e-2))
        losses.append(float(metrics["loss"]))
    assert losses[0] > 3.0
    assert losses[-1] < 0.1
    assert float(metrics["accuracy"]) == 1.0


def test_dropout_keeps_the_mean_and_every_use_has_its_own_mask() -> None:
    drop = dropout(jax.random.key(0), 0.25)
    first, second = (np.asarray(drop(jnp.ones((64, 64)), index)) for index in (0, 1))
    assert abs(first.mean() - 1.0) < 0.05
    assert set(np.unique(first)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert (first != second).mean() > 0.2


def test_an_exported_pair_reads_back(tmp_path: Path) -> None:
    config, params = tiny_target()
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"], vocab_size=300)
    export_target(tmp_path / "target", config, params, tokenizer=tokenizer)
    read = load_model_spec(tmp_path / "target")
    assert read.eos_token_ids == (0,)
    assert read.tie_word_embeddings
    again = load_target(tmp_path / "target", read, dtype=ml_dtypes.bfloat16)
    whole = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), with_lm_head(params))
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    assert load_tokenizer(tmp_path / "target").get_vocab_size() == tokenizer.get_vocab_size()
    trained, head, draft_ids = tiny_head(config, params)
    trained.save(
        tmp_path / "head", head, draft_ids=draft_ids, dtype=ml_dtypes.bfloat16, target=config
    )
    read_head = load_eagle3_config(tmp_path / "head", target=read)
    assert read_head.aux_layer_ids == trained.aux_layer_ids
    loaded = load_eagle3(
        tmp_path / "head", read_head, dtype=ml_dtypes.bfloat16, target_params=again
    )
    np.testing.assert_array_equal(loaded["draft_ids"], draft_ids)
    np.testing.assert_array_equal(
        loaded["fc"]["kernel"], np.asarray(head["fc"]["kernel"]).astype(ml_dtypes.bfloat16)
    )


def test_the_draft_vocabulary_is_the_most_frequent_ids_in_order() -> None:
    tables = [np.asarray([[7, 7, 3], [3, 7, 1]]), np.asarray([5, 5, 5, 5])]
    found = draft_vocabulary(tables, vocab_size=9, size=3)
    assert found.tolist() == [3, 5, 7]
