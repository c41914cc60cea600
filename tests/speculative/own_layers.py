"""Heads with separate layers, small and random, each with its float64 reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from jspec.layers.linear import Shard
from jspec.models.files.stored.tensors import stored_tensors, value_at
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.layer import Params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.model_spec import uniform_decoder
from tests.models.mtp_reference import MtpReference
from tests.speculative.engines import TARGET
from tests.speculative.published_layers import (
    PUBLISHED_LAYERS,
    published_config,
    published_params,
    published_reference,
)

S = 3
SIZE = TARGET.hidden_size
LAYERS = uniform_decoder(
    vocab_size=TARGET.vocab_size,
    hidden_size=SIZE,
    intermediate_size=40,
    num_layers=S,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIGS = {
    "not_chained": mtp_spec(layer=LAYERS, target_num_layers=TARGET.num_layers),
    "chained": mtp_spec(
        layer=LAYERS, target_num_layers=TARGET.num_layers, chained=True, reads_normed=False
    ),
    "hidden_first": mtp_spec(
        layer=LAYERS,
        target_num_layers=TARGET.num_layers,
        chained=True,
        hidden_first=True,
        feeds_back_normed=True,
        zeroes_first=True,
        own_head=True,
    ),
}
# One layer that every level runs again; it has no rows of levels to look at.
RECURRENT = mtp_spec(
    layer=dataclasses.replace(LAYERS, layers=LAYERS.layers[:1]),
    target_num_layers=TARGET.num_layers,
    recurrent=True,
    reads_normed=False,
)


def config_of(name: str) -> HeadSpec:
    """Return one of CONFIGS, or the published layers of a family."""
    if name in PUBLISHED_LAYERS:
        return published_config(name)[0]
    return RECURRENT if name == "recurrent" else CONFIGS[name]


def names_of(name: str) -> HeadNames:
    return published_config(name)[1] if name in PUBLISHED_LAYERS else HeadNames()


def head_of(name: str, ops: Ops | None = None, shard: Shard | None = None) -> FeatureHead:
    return FeatureHead(config_of(name), ops or Ops(), shard or Shard(), names_of(name))


@functools.cache
def params_of(name: str) -> Params:
    """Return random weights, norms away from 1; embedding and lm_head as the target would share
    them."""
    if name in PUBLISHED_LAYERS:
        return published_params(name)
    table = head_params(config_of(name))
    params = init_params(table, seed=5)
    values = {spec.path: value_at(params, spec.path) for spec in table}
    for i, spec in enumerate(table):
        if spec.init is Init.ONES:
            values[spec.path] = 1 + jax.random.normal(jax.random.key(i), spec.shape) / 4
    return nested(values.items())


@functools.cache
def reference_of(name: str) -> MtpReference:
    if name in PUBLISHED_LAYERS:
        return published_reference(name)
    config, params = config_of(name), params_of(name)
    tensors = dict(stored_tensors(head_params(config), params, dtype=np.float32))
    tensors["embed.weight"] = np.asarray(params["embed"]["table"])
    if not config.own_head:
        tensors["head.weight"] = np.asarray(params["lm_head"]["kernel"]).T
    attention = LAYERS.one_layer.attention
    return MtpReference(
        tensors=tensors,
        prefix=HeadNames().prefix,
        head_dim=attention.head_dim,
        theta=attention.rope.theta,
        eps=LAYERS.rms_norm_eps,
        chained=config.chained,
        hidden_first=config.hidden_first,
        feeds_normed=config.feeds_back_normed,
        own_heads=config.own_head,
        zeroes_first=config.zeroes_first,
    )
