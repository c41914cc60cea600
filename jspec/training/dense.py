"""Whole-sequence forwards of a target for training: serving's layers with another `attend`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.device.weights import PACKED, Weight, dense
from jspec.errors import ConfigError
from jspec.layers.attention import Attend
from jspec.layers.embedding import embed
from jspec.layers.latent_attention import AttendLatent
from jspec.layers.linear import logits_of
from jspec.layers.norm import Residual, norm
from jspec.models.decoder import trunk
from jspec.models.layer import MIXERS, LayerSettings, Params, feed_forward, run_layer
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import AttentionSpec, LatentAttentionSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.sandwich import SandwichSpec

Backend = Literal["cudnn", "xla"]
AttendOf = Callable[[AttentionSpec], Attend]  # for a layer
Drop = Callable[[jax.Array, int], jax.Array]  # (activations, index of the use) -> activations


def init_target(config: ModelSpec, *, seed: int) -> Params:
    """Return float32 parameters, without a tied lm_head; depth scales the residual writers. Tables
    are scaled by E**-0.5, like lm_head's columns."""
    params = init_params(table_of(config), seed=seed)
    shrink = (2 * config.num_layers) ** -0.5
    for layer in params["layers"].values():
        for writer in (layer["attention"]["out"], layer["mlp"]["down"]):
            writer["kernel"] = writer["kernel"] * shrink
    params["embed"]["table"] = params["embed"]["table"] * config.hidden_size**-0.5
    if config.tie_word_embeddings:
        del params["lm_head"]
    return params


def with_lm_head(params: Params) -> Params:
    if "lm_head" in params:
        return params
    return {**params, "lm_head": {"kernel": params["embed"]["table"].T}}


def compute_view(params: Params, dtype: DTypeLike) -> Params:
    """Cast matrices to `dtype`, unpack packed weights, add a tied lm_head. Norms and the embedding
    table stay float32; the table's gradient sums over all uses of a token."""
    full = with_lm_head(params)

    def cast_one(x: Weight) -> jax.Array:
        if isinstance(x, PACKED):
            return dense(x, dtype)
        found: jax.Array = x.astype(dtype) if x.ndim >= 2 else x
        return found

    cast = jax.tree.map(cast_one, full, is_leaf=lambda x: isinstance(x, PACKED))
    return {**cast, "embed": full["embed"]}


def dropout(key: jax.Array, rate: float) -> Drop:
    """Return inverted dropout; each use has its own index and mask."""

    def drop(x: jax.Array, index: int) -> jax.Array:
        keep = jax.random.bernoulli(jax.random.fold_in(key, index), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)

    return drop


def causal_attend(backend: Backend) -> AttendOf:
    def of_layer(spec: AttentionSpec) -> Attend:
        def attend(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
            q, k, v = rotate_and_split(heads, rotation)
            if sinks is not None:
                return _attend_with_sinks(q, k, v, sinks, spec=spec)
            return attend_dense(q, k, v, backend=backend, spec=spec)

        return attend

    return of_layer


def attend_dense(
    q: jax.Array, k: jax.Array, v: jax.Array, *, backend: Backend, spec: AttentionSpec
) -> jax.Array:
    """Attend. XLA's [B, H, T, T] scores are recomputed in the backward pass to save memory."""
    reaches_back = spec.window is not None and spec.window < q.shape[1]
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        scale=spec.softmax_scale,
        local_window_size=((spec.window or 1) - 1, 0) if reaches_back else None,
        implementation=backend,
    )
    out: jax.Array = (jax.checkpoint(attend) if backend == "xla" else attend)(q, k, v)
    return out


def _attend_with_sinks(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, *, spec: AttentionSpec
) -> jax.Array:
    batch_size, length, num_groups, _ = k.shape
    grouped = q.reshape(batch_size, length, num_groups, -1, q.shape[-1])
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, k, preferred_element_type=jnp.float32)
    apart = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    visible = (apart >= 0) & (apart < (spec.window or length))
    scores = jnp.where(visible, scores * spec.softmax_scale, -jnp.inf)
    sink = sinks.astype(jnp.float32).reshape(num_groups, -1, 1, 1)
    sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate((scores, sink), axis=-1), axis=-1)[..., :-1]
    mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights.astype(v.dtype), v)
    return mixed.reshape(q.shape)


def _folded(attend: Attend, shape: tuple[int, ...]) -> Attend:
    def apart(x: jax.Array) -> jax.Array:
        return x.reshape(*shape, *x.shape[1:])

    def folded(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        turned = replace(rotation, cos=apart(rotation.cos), sin=apart(rotation.sin))
        out = attend(apart(heads), turned, sinks)
        return out.reshape(-1, *out.shape[2:])

    return folded


def _attend_latent(spec: LatentAttentionSpec, shape: tuple[int, ...]) -> AttendLatent:
    """Return causal attention over flat rows with one kv head, whose V is its K."""

    def attend(queries: jax.Array, records: jax.Array) -> jax.Array:
        q = queries.reshape(*shape, *queries.shape[1:])
        k = records.reshape(*shape, 1, records.shape[-1])
        return attend_dense(q, k, k, backend="xla", spec=spec).reshape(queries.shape)

    return attend


@functools.cache
def attention_backend(config: ModelSpec, *, length: int, dtype: Any) -> Backend:
    """Return 'cudnn' if it compiles and runs here for these shapes and gradients, else 'xla'."""
    if jax.default_backend() != "gpu" or dtype != jnp.bfloat16:
        return "xla"
    heads = config.layers[0].softmax_attention
    if any(layer.softmax_attention.sinks for layer in config.layers):
        return "xla"
    q = jnp.zeros((2, length, heads.num_heads, heads.head_dim), dtype)
    k = jnp.zeros((2, length, heads.num_kv_heads, heads.head_dim), dtype)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attend_dense(q, k, v, backend="cudnn", spec=heads).astype(jnp.float32))

    try:
        jax.block_until_ready(jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, k))
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        print(f"cudnn attention is not available, using xla: {str(error)[:200]}")
        return "xla"
    return "cudnn"


def _run_layer(
    index: int,
    stream: Residual,
    *,
    spec: LayerSpec,
    params: Params,
    positions: jax.Array,
    attend: Callable[..., jax.Array],
    drop: Drop | None,
) -> Residual:
    settings = LayerSettings(Ops())
    if drop is None:
        return run_layer(params, stream, positions, attend, spec=spec, settings=settings)
    x = stream.sum()
    normed = norm(params["input_norm"], x, eps=spec.eps)
    mixed = MIXERS[type(spec.attention)](
        params["attention"],
        normed,
        positions,
        attend,
        spec=spec.attention,
        eps=spec.eps,
        shard=settings.shard,
        ops=settings.ops,
    )
    x = x + drop(mixed, 2 * index)
    inner = feed_forward(
        params, norm(params["post_norm"], x, eps=spec.eps), spec=spec, settings=settings
    )
    return Residual(x=x, delta=drop(inner, 2 * index + 1))


def forward(
    spec: ModelSpec,
    params: Params,
    token_ids: Int[Array, "B T"],
    *,
    dtype: DTypeLike,
    attend: AttendOf,
    aux_layer_ids: tuple[int, ...] = (),
    drop: Drop | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T A"]]:
    """Return (hidden after the final norm, aux features) of `params` from `compute_view`."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    x = embed(params["embed"], token_ids).astype(dtype)
    if drop is not None:
        x = drop(x, 2 * spec.num_layers)
    # MoE sorts the tokens of all rows, and latent attention takes flat tokens.
    is_flat = any(
        isinstance(layer.ffn, MoESpec) or isinstance(layer.attention, LatentAttentionSpec)
        for layer in spec.layers
    )
    if is_flat:
        x, positions = x.reshape(-1, x.shape[-1]), positions.reshape(-1)

    def attend_in(layer: LayerSpec) -> Callable[..., jax.Array]:
        if isinstance(layer.attention, LatentAttentionSpec):
            if layer.attention.is_sparse:
                raise ConfigError(
                    "the target has sparse attention (index_topk); expected another family: the "
                    "forward that trains drafts attends to all tokens"
                )
            return _attend_latent(layer.attention, token_ids.shape)
        if isinstance(layer, SandwichSpec):
            raise ConfigError(
                "the target's layers have norms after their sub-layers (Gemma 4); expected another "
                "family: the forward that trains drafts does not run these"
            )
        own = attend(layer.softmax_attention)
        return _folded(own, token_ids.shape) if is_flat else own

    layers = [
        functools.partial(
            _run_layer,
            i,
            spec=layer,
            params=params["layers"][i],
            positions=positions,
            attend=attend_in(layer),
            drop=drop,
        )
        for i, layer in enumerate(spec.layers)
    ]
    stream, aux = trunk(layers, x, aux_layer_ids=aux_layer_ids)
    hidden = norm(params["norm"], stream.sum(), eps=spec.rms_norm_eps)
    return hidden.reshape(*token_ids.shape, -1), aux.reshape(*token_ids.shape, aux.shape[-1])


def lm_logits(params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
    return logits_of(hidden, params["lm_head"]["kernel"])
