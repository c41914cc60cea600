"""A tiny random target and head in float32, shared by the training tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.training.dense import init_target, with_lm_head
from jspec.training.heads.head_eagle3 import TrainedEagle3, eagle3_head

V, U = 48, 40


def tiny_target() -> tuple[ModelSpec, Params]:
    """2 layers, GQA, tied; logits sharpened so that its text is not uniform."""
    config = uniform_decoder(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )
    params = with_lm_head(init_target(config, seed=1))
    params["norm"]["scale"] = params["norm"]["scale"] * 4.0
    return config, params


def tiny_head(target: ModelSpec, target_params: Params) -> tuple[TrainedEagle3, Params, np.ndarray]:
    """(head, trainable parameters, draft_ids): a random head that misses 8 target ids."""
    draft_ids = np.delete(np.arange(V), np.arange(5, 45, 5)).astype(np.int32)
    head = eagle3_head(target, draft_vocab_size=U, intermediate_size=40, aux_layer_ids=(0, 1, 2))
    return head, head.init(target_params, draft_ids, seed=2), draft_ids


def random_rows(count: int, length: int, *, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(0, V, (count, length)), jnp.int32)
