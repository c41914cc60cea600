"""Attention of a head that is unrolled over its own outputs (EAGLE-3, arXiv:2503.01840).

Alignment for tokens x_0..x_{T-1}, as in serving, where draft slot i has the pair (token i + 1,
feature of position i):

    step i, slot t: token x_{t+1+i}, RoPE position t + i; hidden = the target's feature of
                    position t (i = 0) or the slot's own output at step i - 1
    its logits predict x_{t+2+i}; its teacher is the target's distribution at position t + 1 + i
    attention: keys of slots 0..t of step 0, and the slot's own keys of steps 1..i
    T = 5: step 0 slots 0..3 are (x1,f0) (x2,f1) (x3,f2) (x4,f3), teachers at 1 2 3 4
           step 1 slots 0..2 are (x2,o0) (x3,o1) (x4,o2),         teachers at 2 3 4

Steps 0..i of slot t thus equal drafting i tokens after t + 1 committed slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.embedding import embed
from jspec.models.heads.feature_head import run_first_layer
from jspec.models.layer import LayerSettings, Params
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec

# (ids [B, T], positions [B, T], hidden [B, T, E]) -> output [B, T, E], the next step's hidden
Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class UnrolledAttention:
    """An `attend` to call once per step: causal over step 0, then the slot's own later keys.
    Queries run in four blocks, each against the keys up to its own end."""

    def __init__(self) -> None:
        self._keys: list[jax.Array] = []
        self._values: list[jax.Array] = []

    def __call__(
        self, heads: Float[Array, "B R heads D"], rotation: Rotation, sinks: jax.Array | None
    ) -> Float[Array, "B R H D"]:
        del sinks  # heads trained here have none
        q, k, v = rotate_and_split(heads, rotation)
        self._keys.append(k)
        self._values.append(v)
        num_rows, num_groups = k.shape[1], k.shape[2]
        grouped = q.reshape(*q.shape[:2], num_groups, -1, q.shape[-1]) * q.shape[-1] ** -0.5
        block = num_rows // 4 if num_rows % 4 == 0 else num_rows
        out = [self._block(grouped, i, i + block) for i in range(0, num_rows, block)]
        return jnp.concatenate(out, axis=1).reshape(q.shape).astype(q.dtype)

    def _block(self, grouped: Float[Array, "B R G Q D"], start: int, stop: int) -> jax.Array:
        queries = grouped[:, start:stop]
        keys, values = self._keys[0][:, :stop], self._values[0][:, :stop]
        visible = jnp.tril(jnp.ones((stop - start, stop), bool), k=start)
        first = jnp.einsum("bqgrd,bkgd->bgrqk", queries, keys, preferred_element_type=jnp.float32)
        first = jnp.where(visible, first, -jnp.inf)
        later = [
            jnp.einsum(
                "bqgrd,bqgd->bgrq", queries, key[:, start:stop], preferred_element_type=jnp.float32
            )
            for key in self._keys[1:]
        ]
        top = jnp.max(first, axis=-1)
        for score in later:
            top = jnp.maximum(top, score)
        top = jax.lax.stop_gradient(top)
        weights = jnp.exp(first - top[..., None])
        total = jnp.sum(weights, axis=-1)
        mixed = jnp.einsum(
            "bgrqk,bkgd->bgrqd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        for score, value in zip(later, self._values[1:], strict=True):
            weight = jnp.exp(score - top)
            total = total + weight
            own = value[:, start:stop].transpose(0, 2, 1, 3)[:, :, None]
            mixed = mixed + weight[..., None] * own
        return (mixed / total[..., None]).transpose(0, 3, 1, 2, 4)


def unroll(
    step: Step,
    token_ids: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    *,
    num_depths: int,
) -> list[Float[Array, "B R E"]]:
    """Return the outputs of every step; entry i has slots 0..T-2-i, those whose token exists."""
    batch_size, length = token_ids.shape
    padded = jnp.pad(token_ids, ((0, 0), (0, num_depths)))
    outs = []
    for i in range(num_depths):
        positions = jnp.broadcast_to(jnp.arange(length) + i, (batch_size, length))
        hidden = step(padded[:, 1 + i : 1 + i + length], positions, hidden)
        outs.append(hidden[:, : length - 1 - i])
    return outs


def unroll_head(
    head: HeadSpec,
    params: Params,
    token_ids: Int[Array, "B T"],
    hidden: Float[Array, "B T E"],
    *,
    num_depths: int,
) -> list[Float[Array, "B R E"]]:
    """Return `unroll` of a head of one layer. hidden: in the dtype of the computation."""
    attend, settings = UnrolledAttention(), LayerSettings(Ops())

    def step(ids: jax.Array, positions: jax.Array, given: jax.Array) -> jax.Array:
        return run_first_layer(
            params["layers"][0],
            embed(params["embed"], ids).astype(hidden.dtype),
            given,
            positions,
            attend,
            head=head,
            spec=head.layer.one_layer,
            settings=settings,
        )

    return unroll(step, token_ids, hidden, num_depths=num_depths)
