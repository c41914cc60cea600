"""Training-time test of an EAGLE-3 head (Li et al., 2025, arXiv:2503.01840): unroll and loss.

Alignment, for a row of T tokens x_0..x_{T-1}: the same as in serving, where draft row i holds the
pair (token i + 1, feature of position i).

    step i, row t:  token x_{t+1+i}, RoPE position t + i; hidden = fused target features of
                    position t (i = 0) or the row's own output at step i - 1, before the final norm
    its logits predict x_{t+2+i}; its teacher is the target's distribution at position t + 1 + i
    attention: keys of step 0 of rows 0..t, and the row's own keys of steps 1..i

    T = 5: step 0 rows 0..3 hold (x1,f0) (x2,f1) (x3,f2) (x4,f3), teachers at 1 2 3 4
           step 1 rows 0..2 hold (x2,o0) (x3,o1) (x4,o2),         teachers at 2 3 4

Row t of the unrolled steps 0..i thus equals drafting i tokens behind t + 1 committed rows.
The loss of step i is the cross entropy to the target's distribution, restricted to the draft
vocabulary and renormalised, where the target's argmax lies in it, plus `overlap_weight` times the
mass that the two do not share, 1 - sum_v min(p_v, q_v); steps weigh 0.8**i. The full distribution
matters: with shared noise a draft is accepted when both distributions, perturbed alike, have the
same argmax, and that becomes rarer with the mass they do not share, not with the cross entropy.

Knows no optimizer, no data and no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.errors import ConfigError
from jspec.core.model_spec import Eagle3Config, ModelSpec
from jspec.layers.embedding import embed
from jspec.models.decoder import LayerSettings, Params
from jspec.models.eagle3 import Eagle3Head, run_head_layer
from jspec.pallas_kernels.kv_write.rotation import Rotation, rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.training.dense import (
    attention_backend,
    causal_attend,
    forward,
    lm_logits,
)
from jspec.training.loop import Loss

STEP_DECAY = 0.8


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
    config: Eagle3Config,
    params: Params,
    token_ids: Int[Array, "B T"],
    aux: Float[Array, "B T A"],
    *,
    num_depths: int,
    dtype: DTypeLike,
) -> list[Float[Array, "B R U"]]:
    """Draft logits of every step, float32; entry i has rows 0..T-2-i (those whose token exists).

    params: the head's, with embed and draft_ids. All T rows are computed, so that products keep
    round shapes; the last ones hold token 0 and no valid row sees them.
    Raises ConfigError for a head of several layers, or one that feeds back what it normed.
    """
    if config.layer.num_layers != 1 or config.feeds_back_normed:
        raise ConfigError(
            f"the head has {config.layer.num_layers} layers and feeds_back_normed is "
            f"{config.feeds_back_normed}; expected 1 and False, which is all that is trained here"
        )
    batch_size, length = token_ids.shape
    padded = jnp.pad(token_ids, ((0, 0), (0, num_depths)))
    attend = UnrolledAttention()
    head = Eagle3Head(config, Ops())
    settings = LayerSettings(Ops())
    hidden = head.features(params, aux.astype(dtype))
    logits = []
    for i in range(num_depths):
        embedded = embed(params["embed"], padded[:, 1 + i : 1 + i + length]).astype(dtype)
        positions = jnp.broadcast_to(jnp.arange(length) + i, (batch_size, length))
        hidden = run_head_layer(
            params["layer"], embedded, hidden, positions, attend, config=config, settings=settings
        )
        every = head.logits(params, hidden)
        logits.append(every[:, : length - 1 - i])
    return logits


def whole_head(params: Params, target_params: Params, draft_ids: Any) -> Params:
    """The head as it is served: trained parameters, the target's table, the draft vocabulary."""
    table = target_params["embed"]["table"]
    return {**params, "embed": {"table": table}, "draft_ids": draft_ids}


def make_frozen(target_params: Params, draft_ids: Any) -> Params:
    """What the loss needs beside the head: the target on the device, and the draft vocabulary."""
    return {
        "target": jax.tree.map(jnp.asarray, target_params),
        "draft_ids": jnp.asarray(draft_ids),
    }


def make_unrolled_forward(
    target: ModelSpec,
    config: Eagle3Config,
    *,
    length: int,
    num_depths: int,
    dtype: Any,
) -> Callable[[Params, Params, jax.Array], tuple[jax.Array, list[jax.Array]]]:
    """(head, frozen, token_ids[B, T]) -> (target logits [B, T, V], draft logits of each step)."""
    attend = causal_attend(attention_backend(target, length=length, dtype=dtype))

    def run(
        params: Params, frozen: Params, token_ids: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        hidden, aux = forward(
            target,
            frozen["target"],
            token_ids,
            dtype=dtype,
            attend=attend,
            aux_layer_ids=config.aux_layer_ids,
        )
        target_logits = lm_logits(frozen["target"], hidden)
        cast = jax.tree.map(lambda x: x.astype(dtype) if x.ndim >= 2 else x, params)
        head = whole_head(cast, frozen["target"], frozen["draft_ids"])
        frozen_values = jax.lax.stop_gradient((target_logits, aux))
        logits = unroll(
            config, head, token_ids, frozen_values[1], num_depths=num_depths, dtype=dtype
        )
        return frozen_values[0], logits

    return run


def training_time_test_loss(
    target: ModelSpec,
    config: Eagle3Config,
    *,
    length: int,
    num_depths: int,
    dtype: Any,
    overlap_weight: float = 0.0,
) -> Loss:
    """Sum over steps of 0.8**i times (masked mean cross entropy + weighted unshared mass).

    Metrics per step: accuracy, and the shared mass `overlap` (at most 1) over the whole vocabulary.
    Accuracy is agreement with the target's argmax over its whole vocabulary: an argmax outside
    the draft vocabulary counts as a miss.
    """
    run = make_unrolled_forward(target, config, length=length, num_depths=num_depths, dtype=dtype)

    def loss(
        params: Params, frozen: Any, batch: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del key
        target_logits, draft_logits = run(params, frozen, batch)
        draft_ids = frozen["draft_ids"]
        best = jnp.argmax(target_logits, axis=-1)
        in_draft = jnp.zeros((config.layer.vocab_size,), bool).at[draft_ids].set(True)
        mask = jnp.take(in_draft, best, mode="clip").astype(jnp.float32)
        probs = jax.nn.softmax(target_logits, axis=-1)
        probs = jnp.take(probs, draft_ids, axis=-1, mode="clip")
        teacher = probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-20)
        total, accuracies, overlaps = jnp.zeros(()), [], []
        for i, logits in enumerate(draft_logits):
            log_q = jax.nn.log_softmax(logits, axis=-1)
            cross = -jnp.sum(teacher[:, 1 + i :] * log_q, axis=-1)
            overlap = jnp.mean(jnp.sum(jnp.minimum(probs[:, 1 + i :], jnp.exp(log_q)), axis=-1))
            step_loss = jnp.mean(mask[:, 1 + i :] * cross) + overlap_weight * (1.0 - overlap)
            total = total + STEP_DECAY**i * step_loss
            guess = jnp.take(draft_ids, jnp.argmax(logits, axis=-1), mode="clip")
            accuracies.append(jnp.mean((guess == best[:, 1 + i :]).astype(jnp.float32)))
            overlaps.append(overlap)
        return total, {"accuracy": jnp.stack(accuracies), "overlap": jnp.stack(overlaps)}

    return loss
