"""The loss of a draft head. test_draft_heads.py compares the unroll with served drafting."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.errors import ConfigError
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec
from jspec.training.dense import causal_attend, forward
from jspec.training.draft_loss import (
    LossWeights,
    draft_loss,
    features_on_the_fly,
    make_frozen,
    make_unrolled,
)
from jspec.training.draft_recipe import all_count
from jspec.training.heads.draft_head import TargetFeatures
from jspec.training.heads.head_eagle3 import TrainedEagle3
from jspec.training.loop import Loss
from tests.training.tiny_pair import random_rows, tiny_head, tiny_target

LENGTH = 12  # a multiple of 4: attention works in four blocks


def guesses_of(
    head: TrainedEagle3, whole: Params, ids: jax.Array, aux: jax.Array, *, num_depths: int
) -> list[jax.Array]:
    features = TargetFeatures(hidden=aux[..., :0], aux=aux)
    found = head.guesses(whole, ids, features, num_depths=num_depths, dtype=jnp.float32)
    return [guess.logits for guess in found]


def loss_of(target: ModelSpec, head: TrainedEagle3, *, num_depths: int, **weights: float) -> Loss:
    features = features_on_the_fly(target, head, length=LENGTH, dtype=jnp.float32)
    run = make_unrolled(head, features, num_depths=num_depths, dtype=jnp.float32)
    return draft_loss(run, LossWeights(**{"overlap": 0.0, **weights}))


def test_a_head_of_several_layers_is_not_trained() -> None:
    head, _, _ = tiny_head(*tiny_target())
    layer = head.spec.layer
    two = replace(head.spec, layer=replace(layer, layers=layer.layers * 2))
    for other in (two, replace(head.spec, feeds_back_normed=True)):
        with pytest.raises(ConfigError, match="expected 1 and False"):
            TrainedEagle3(other)


@pytest.mark.slow
def test_the_loss_weighs_depths_and_masks_what_cannot_be_drafted() -> None:
    target, target_params = tiny_target()
    head, params, draft_ids = tiny_head(target, target_params)
    rows = random_rows(2, LENGTH)
    counts = np.zeros((2, LENGTH), np.float32)
    counts[:, 2:10] = 1.0
    batch = {"ids": rows, "weights": jnp.asarray(counts)}
    frozen = make_frozen(target_params, draft_ids)
    loss, metrics = loss_of(target, head, num_depths=2)(params, frozen, batch, jax.random.key(0))
    hidden, aux = forward(
        target,
        target_params,
        rows,
        dtype=jnp.float32,
        attend=causal_attend("xla"),
        aux_layer_ids=head.aux_layer_ids,
    )
    logits = np.asarray(hidden @ target_params["lm_head"]["kernel"], np.float64)
    whole = head.whole(params, target_params, jnp.asarray(draft_ids))
    expected, misses = 0.0, 0
    for i, draft in enumerate(guesses_of(head, whole, rows, aux, num_depths=2)):
        terms = []
        for b in range(2):
            for t in range(LENGTH - 1 - i):
                if not counts[b, t + 1 + i]:
                    continue
                row = logits[b, t + 1 + i]
                teacher = np.exp(row[draft_ids]) / np.exp(row[draft_ids]).sum()
                q = np.asarray(draft[b, t], np.float64)
                log_q = q - np.log(np.exp(q).sum())
                inside = row.argmax() in draft_ids
                misses += not inside
                terms.append(-inside * (teacher * log_q).sum())
        expected += 0.8**i * np.mean(terms)
    assert misses > 0
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert metrics["accuracy"].shape == (2,)
    weighted = loss_of(target, head, num_depths=2, overlap=3.0)
    more, _ = weighted(params, frozen, batch, jax.random.key(0))
    unshared = 1.0 - np.asarray(metrics["overlap"])
    assert unshared.min() > 0.0
    assert unshared.max() < 1.0
    expected += 3.0 * (unshared[0] + 0.8 * unshared[1])
    assert float(more) == pytest.approx(expected, rel=1e-4)


def test_the_overlap_of_a_perfect_draft_is_the_mass_of_the_draft_vocabulary() -> None:
    target, target_params = tiny_target()
    head, params, draft_ids = tiny_head(target, target_params)
    batch = jax.tree.map(jnp.asarray, all_count(np.asarray(random_rows(2, LENGTH))))
    # Both models made constant: zero hidden states give uniform logits over either vocabulary.
    params = {**params, "norm": {"scale": params["norm"]["scale"] * 0.0}}
    scale = target_params["norm"]["scale"] * 0.0
    frozen = make_frozen({**target_params, "norm": {"scale": scale}}, draft_ids)
    loss = jax.jit(loss_of(target, head, num_depths=1))
    _, metrics = loss(params, frozen, batch, jax.random.key(0))
    share = len(draft_ids) / target.vocab_size
    np.testing.assert_allclose(metrics["overlap"], [share], rtol=1e-5)
