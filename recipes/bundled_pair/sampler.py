"""Batched sampling from a target with a dense KV cache: training data for a head.

The token at position p of a row with seed s is argmax_v(logits(v) + T * g(s, p, v)), as in the
engine, so a head's acceptance can be measured on these rows. All rows run in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise
from jspec.layers.attention import Attend
from jspec.layers.embedding import embed
from jspec.layers.norm import Residual, norm
from jspec.models.decoder import trunk
from jspec.models.layer import LayerSettings, Params, run_layer
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.training.data.token_stream import TokenStream
from jspec.training.dense import lm_logits

Cache = list[tuple[jax.Array, jax.Array]]  # K and V per layer, [B, T, G, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Rows to sample; ids beyond prompt_lens are replaced by samples."""

    token_ids: np.ndarray  # i32[R, T]
    prompt_lens: np.ndarray  # i32[R], in [1, T]
    temperatures: np.ndarray  # f32[R]
    seeds: np.ndarray  # u32[R, 2], (high word, low word)


def draw_prompts(
    stream: TokenStream,
    *,
    count: int,
    length: int,
    shortest: int,
    longest: int,
    temperatures: tuple[float, ...],
    seed: int,
) -> Prompts:
    """Return random crops as prompts, a quarter of them from the start of a document.

    Temperatures are assigned round robin; listing one twice gives it twice the rows.
    """
    random = np.random.default_rng((seed, 1))
    last = len(stream.ids) - length
    starts = random.integers(0, last + 1, count)
    heads = stream.starts[stream.starts <= last]
    if len(heads):
        at_head = np.arange(count) % 4 == 3
        starts = np.where(at_head, random.choice(heads, count), starts)
    return Prompts(
        token_ids=stream.ids[starts[:, None] + np.arange(length)].astype(np.int32),
        prompt_lens=random.integers(shortest, longest + 1, count).astype(np.int32),
        temperatures=np.resize(np.asarray(temperatures, np.float32), count),
        seeds=random.integers(0, 2**32, (count, 2), dtype=np.uint32),
    )


def cached_attend(cache: Cache, position: jax.Array) -> Callable[[int], Attend]:
    """Return attend of layer i at `position`: writes K and V there, attends to 0..position.

    Heads are [B, H + 2G, D]: one token per row, all at the same position.
    """

    def of_layer(index: int) -> Attend:
        def attend(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
            del sinks  # targets trained here have none
            q, k, v = rotate_and_split(heads, rotation)
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new[:, None], position, axis=1)
                for old, new in zip(cache[index], (k, v), strict=True)
            )
            cache[index] = (keys, values)
            num_groups = k.shape[1]
            grouped = q.reshape(q.shape[0], num_groups, -1, q.shape[-1])
            scores = jnp.einsum(
                "bgrd,btgd->bgrt", grouped, keys, preferred_element_type=jnp.float32
            )
            visible = jnp.arange(keys.shape[1]) <= position
            scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
            return jnp.einsum("bgrt,btgd->bgrd", weights, values).reshape(q.shape)

        return attend

    return of_layer


def choose(
    logits: Float[Array, "B V"],
    seeds: UInt32[Array, "B 2"],
    positions: Int[Array, "B"],
    temperatures: Float[Array, "B"],
    token_ids: Int[Array, "V"],
) -> Int[Array, "B"]:
    """Return the index of argmax(logits + T * g(seed, position, token id)), in float32."""
    perturbed = logits + temperatures[:, None] * noise.gumbel(seeds, positions, token_ids)
    return jnp.argmax(perturbed, axis=-1).astype(jnp.int32)


def _run_layer(
    params: Params, spec: LayerSpec, stream: Residual, *, positions: jax.Array, attend: Attend
) -> Residual:
    return run_layer(params, stream, positions, attend, spec=spec, settings=LayerSettings(Ops()))


def make_sampler(
    config: ModelSpec, *, length: int, dtype: DTypeLike
) -> Callable[[Params, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return jitted (params, token_ids[B, T], prompt_lens, temperatures, seeds) -> i32[B, T].

    The prompt is fed token by token: one program, no prefill. params: as served, with lm_head.
    """
    vocabulary = jnp.arange(config.vocab_size)

    def sample(
        params: Params,
        token_ids: jax.Array,
        prompt_lens: jax.Array,
        temperatures: jax.Array,
        seeds: jax.Array,
    ) -> jax.Array:
        batch_size = token_ids.shape[0]
        heads = config.one_layer.attention
        shape = (batch_size, length, heads.num_kv_heads, heads.head_dim)
        empty = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))] * config.num_layers

        def step(
            carry: tuple[Cache, jax.Array], inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[Cache, jax.Array], jax.Array]:
            (cache, token), (position, following) = carry, inputs
            updated = list(cache)
            attend_of = cached_attend(updated, position)
            positions = jnp.broadcast_to(position, token.shape)
            layers = [
                partial(
                    _run_layer, params["layers"][i], spec, positions=positions, attend=attend_of(i)
                )
                for i, spec in enumerate(config.layers)
            ]
            x = embed(params["embed"], token).astype(dtype)
            stream, _ = trunk(layers, x, aux_layer_ids=())
            hidden = norm(params["norm"], stream.sum(), eps=config.rms_norm_eps)
            logits = lm_logits(params, hidden)
            chosen = choose(logits, seeds, positions + 1, temperatures, vocabulary)
            next_token = jnp.where(position + 1 < prompt_lens, following, chosen)
            return (updated, next_token), next_token

        first = token_ids[:, 0]
        inputs = (jnp.arange(length - 1), token_ids[:, 1:].T)
        _, rest = jax.lax.scan(step, (empty, first), inputs)
        return jnp.concatenate((first[:, None], rest.T), axis=1)

    return jax.jit(sample)


def sample_rows(
    config: ModelSpec,
    params: Params,
    prompts: Prompts,
    *,
    batch_size: int,
    dtype: DTypeLike,
    should_stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Continue prompts in whole batches until `should_stop`: i32[R', T], R' <= R."""
    length = prompts.token_ids.shape[1]
    sampler = make_sampler(config, length=length, dtype=dtype)
    size = min(batch_size, len(prompts.token_ids))
    done = []
    for start in range(0, len(prompts.token_ids) - size + 1, size):
        rows = slice(start, start + size)
        out = sampler(
            params,
            jnp.asarray(prompts.token_ids[rows]),
            jnp.asarray(prompts.prompt_lens[rows]),
            jnp.asarray(prompts.temperatures[rows]),
            jnp.asarray(prompts.seeds[rows]),
        )
        done.append(np.asarray(out))
        if should_stop():
            break
    return np.concatenate(done)
