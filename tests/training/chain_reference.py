"""Drafting with a cache, one row at a time, as serving does: the reference for the unroll."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.layers.embedding import embed
from jspec.models.decoder import LayerSettings, Params
from jspec.models.heads.eagle3 import Eagle3Head, run_head_layer
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import Eagle3Config


class RowCache:
    """attend of a single row after another: keeps keys and values, sees all of them.

    32 rows of numpy, so that every call has the same shapes and nothing is compiled twice.
    """

    def __init__(self) -> None:
        self.count = 0
        self.keys: np.ndarray | None = None
        self.values: np.ndarray | None = None

    def __call__(self, heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        """heads [1, H + 2G, D]."""
        assert sinks is None
        q, k, v = rotate_and_split(heads, rotation)
        if self.keys is None or self.values is None:
            self.keys, self.values = np.zeros((32, *k.shape[1:])), np.zeros((32, *v.shape[1:]))
        self.keys[self.count], self.values[self.count] = k[0], v[0]
        self.count += 1
        repeats = q.shape[1] // k.shape[1]
        keys = np.repeat(self.keys[: self.count], repeats, axis=1)
        values = np.repeat(self.values[: self.count], repeats, axis=1)
        scores = np.einsum("hd,thd->ht", np.asarray(q[0]), keys) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return jnp.asarray(np.einsum("ht,thd->hd", weights, values)[None], q.dtype)


def chain_logits(
    config: Eagle3Config,
    params: Params,
    committed_ids: np.ndarray,
    aux: jax.Array,
    drafts: list[int],
) -> list[jax.Array]:
    """Logits [U] after the last committed pair and after each draft.

    committed_ids: x_0..x_{t+1}; aux [t + 1, A]: features of x_0..x_t, so the rows 0..t are real.
    """
    head, settings, cache = Eagle3Head(config, Ops()), LayerSettings(Ops()), RowCache()

    def run(token: jax.Array, hidden: jax.Array, position: int) -> jax.Array:
        return run_head_layer(
            params["layer"],
            embed(params["embed"], token),
            hidden,
            jnp.asarray([position]),
            cache,
            config=config,
            settings=settings,
        )

    hidden = aux[:1]
    for i in range(len(aux)):
        fused = head.features(params, aux[i : i + 1])
        hidden = run(jnp.asarray(committed_ids[i + 1 : i + 2]), fused, i)
    logits = [head.logits(params, hidden)[0]]
    for depth, token in enumerate(drafts, start=1):
        hidden = run(jnp.asarray([token]), hidden, len(aux) - 1 + depth)
        logits.append(head.logits(params, hidden)[0])
    return logits
