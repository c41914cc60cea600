"""Attention of a head that is unrolled over its own outputs (EAGLE-3, arXiv:2503.01840).

Alignment, for a row of T tokens x_0..x_{T-1}: the same as in serving, where draft row i holds the
pair (token i + 1, feature of position i).

    step i, row t:  token x_{t+1+i}, RoPE position t + i; hidden = the target's feature of
                    position t (i = 0) or the row's own output at step i - 1
    its logits guess x_{t+2+i}; its teacher is the target's distribution at position t + 1 + i
    attention: keys of step 0 of rows 0..t, and the row's own keys of steps 1..i

    T = 5: step 0 rows 0..3 hold (x1,f0) (x2,f1) (x3,f2) (x4,f3), teachers at 1 2 3 4
           step 1 rows 0..2 hold (x2,o0) (x3,o1) (x4,o2),         teachers at 2 3 4

Row t of the unrolled steps 0..i thus equals drafting i tokens after t + 1 committed rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.kv_write.rotation import Rotation, rotate_and_split

# (index of the step, its tokens' ids, positions, hidden) -> output, what is handed on
Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class UnrolledAttention:
    """attend of the unrolled steps, called once a step: causal over step 0, then own later rows.

    Softmax in float32 over both parts at once, merged by their common maximum. Queries go in four
    blocks, each against the keys up to its own end: of 1,024 rows, 62% of the scores are computed.
    """

    def __init__(self) -> None:
        self._keys: list[jax.Array] = []
        self._values: list[jax.Array] = []

    def __call__(
        self, heads: Float[Array, "B R heads D"], rotation: Rotation, sinks: jax.Array | None
    ) -> Float[Array, "B R H D"]:
        del sinks  # no target that is trained here has them
        q, k, v = rotate_and_split(heads, rotation)
        self._keys.append(k)
        self._values.append(v)
        num_rows, num_groups = k.shape[1], k.shape[2]
        grouped = q.reshape(*q.shape[:2], num_groups, -1, q.shape[-1]) * q.shape[-1] ** -0.5
        block = num_rows // 4 if num_rows % 4 == 0 else num_rows
        out = [self._block(grouped, i, i + block) for i in range(0, num_rows, block)]
        return jnp.concatenate(out, axis=1).reshape(q.shape).astype(q.dtype)

    def _block(self, grouped: Float[Array, "B R G Q D"], start: int, stop: int) -> jax.Array:
        """f32[B, stop - start, G, Q, D]: what the queries of these rows attend to."""
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
    """Outputs of every step; entry i has rows 0..T-2-i (those whose token exists).

    step: (ids[B, T], positions[B, T], hidden[B, T, E]) -> out[B, T, E]. All T rows are computed, so
    that products keep round shapes; the last ones hold token 0 and no valid row sees them.
    """
    batch_size, length = token_ids.shape
    padded = jnp.pad(token_ids, ((0, 0), (0, num_depths)))
    outs = []
    for i in range(num_depths):
        positions = jnp.broadcast_to(jnp.arange(length) + i, (batch_size, length))
        hidden = step(padded[:, 1 + i : 1 + i + length], positions, hidden)
        outs.append(hidden[:, : length - 1 - i])
    return outs
