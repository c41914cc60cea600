"""A decoder as pure functions of its spec and params: what every target family runs.

`trunk` runs the stack with one function per layer and says nothing about caches: training,
prefill, verification and plain decoding are the same function with different attends. `Decoder` is
the target of a step: the stack over its paged KV pools, each layer in one inner jit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import Attend, attention, take_kept
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, logits_of
from jspec.layers.mlp import gated_mlp
from jspec.layers.moe import mixture, mixture_of_sum
from jspec.layers.norm import Residual, norm_of_sum
from jspec.models.params import ParamTable
from jspec.models.registry import table_of
from jspec.pallas_kernels.attention.contract import AttentionCall
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.kv_write.rotation import Rotation
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec, cache_groups

Params = dict[str, Any]
KVPool = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """The static half of a layer's call. queries_per_row: None for the chunks of prompts."""

    ops: Ops
    shard: Shard = field(default_factory=Shard)
    queries_per_row: int | None = None


def run_layer(
    params: Params,
    stream: Residual,
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Residual:
    """x + attention(norm(x)), then x + ffn(norm(x)); the last sum is left to whoever is next.

    kept: of T rows, those whose result is asked for. The others end after their K and V.
    """
    ops, shard = settings.ops, settings.shard
    x, normed = norm_of_sum(params["input_norm"], stream, eps=spec.eps, ops=ops)
    mixed = attention(
        params["attention"],
        normed,
        positions,
        attend,
        spec=spec.attention,
        eps=spec.eps,
        shard=shard,
        kept=kept,
    )
    stream = Residual(x=take_kept(x, kept), delta=mixed)
    if isinstance(spec.ffn, MoESpec):
        return mixture_of_sum(
            params["moe"],
            params["post_norm"],
            stream,
            spec=spec.ffn,
            eps=spec.eps,
            shard=shard,
            ops=ops,
        )
    x, normed = norm_of_sum(params["post_norm"], stream, eps=spec.eps, ops=ops)
    return Residual(x=x, delta=feed_forward(params, normed, spec=spec, settings=settings))


def feed_forward(
    params: Params, x: Float[Array, "*b E"], *, spec: LayerSpec, settings: LayerSettings
) -> Float[Array, "*b E"]:
    """The layer's MLP or mixture of experts."""
    ops, shard = settings.ops, settings.shard
    if isinstance(spec.ffn, MoESpec):
        flat = x.reshape(-1, x.shape[-1])
        return mixture(params["moe"], flat, spec=spec.ffn, shard=shard, ops=ops).reshape(x.shape)
    return gated_mlp(
        params["mlp"],
        x,
        shard=shard,
        ops=ops,
        of_prompts=settings.queries_per_row is None,
        limit=spec.ffn.limit,
    )


class PagedAttend:
    """An `attend` for one layer: holds the pool after its single call (while tracing)."""

    def __init__(
        self, pages: jax.Array, rows: AttentionRows, spec: AttentionSpec, settings: LayerSettings
    ) -> None:
        self.pages = pages
        self._rows = rows
        self._ops = settings.ops
        self._call = AttentionCall(
            queries_per_row=settings.queries_per_row, scale=spec.softmax_scale, window=spec.window
        )

    def __call__(self, heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        out, self.pages = self._ops.rotate_write_and_attend(
            heads, rotation, self.pages, self._rows, self._call, sinks
        )
        return out


@partial(jax.jit, static_argnames=("spec", "settings"), inline=False)
def paged_layer(
    params: Params,
    stream: Residual,
    pages: jax.Array,
    rows: AttentionRows,
    kept: jax.Array | None = None,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
) -> tuple[Residual, jax.Array]:
    """`run_layer` over its pool, jitted once for all layers alike: (stream, pool with new rows)."""
    attend = PagedAttend(pages, rows, spec.attention, settings)
    stream = run_layer(
        params, stream, rows.q_positions, attend, spec=spec, settings=settings, kept=kept
    )
    if not settings.ops.defers_sums:  # XLA gains nothing, and rounds what leaves an inner jit
        stream = Residual(x=stream.sum())
    return stream, attend.pages


@dataclass(frozen=True, slots=True)
class Decoder:
    """A target over its pools, one a layer. aux_layer_ids: what a draft model will be fed."""

    spec: ModelSpec
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    aux_layer_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def table(self) -> ParamTable:
        return table_of(self.spec)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.spec, name="target")

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        kv: KVPool,
        rows: AttentionRows,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], Float[Array, "T A"], KVPool]:
        """(last hidden after the final norm, aux features, pools with the T new rows).

        kept: the tokens whose last hidden is asked for; None: all T. Nothing else reads what the
        last layer makes of the others, so it computes their K and V alone.
        """
        pages = list(kv)
        last = self.spec.num_layers - 1
        ends_early = kept is not None and last + 1 not in self.aux_layer_ids
        settings = LayerSettings(self.ops, self.shard, queries_per_row)
        windows = {layer.attention.window for layer in self.spec.layers}
        by_window = {window: rows.of_window(window) for window in windows}

        def layer(i: int, stream: Residual) -> Residual:
            stream, pages[i] = paged_layer(
                params["layers"][i],
                stream,
                pages[i],
                by_window[self.spec.layers[i].attention.window],
                kept if ends_early and i == last else None,
                spec=self.spec.layers[i],
                settings=settings,
            )
            return stream

        stack = [partial(layer, i) for i in range(self.spec.num_layers)]
        x = embed(params["embed"], token_ids)
        stream, aux = trunk(stack, x, aux_layer_ids=self.aux_layer_ids)
        eps = self.spec.rms_norm_eps
        _, hidden = norm_of_sum(params["norm"], stream, eps=eps, ops=self.ops)
        hidden = hidden if ends_early else take_kept(hidden, kept)
        return hidden, aux, tuple(pages)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """f32 logits over this device's vocabulary shard."""
        return logits_of(hidden, params["lm_head"]["kernel"])

    def token_ids(self) -> Int[Array, "V"]:
        """Target id of each column of this device's vocabulary shard."""
        return shard_ids(self.spec.vocab_size, self.shard)


def trunk(
    layers: Sequence[Callable[[Residual], Residual]],
    x: Float[Array, "*b E"],
    *,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Residual, Float[Array, "*b A"]]:
    """Runs the stack; also returns the residual stream, summed, at the INPUT of each aux layer.

    What is captured is passed on as one summand: the layer works on the very same numbers.
    An aux id equal to the number of layers is the residual after the last one. The captures are
    concatenated, low to high: [*b, len(aux_layer_ids) * E].
    """
    stream, captured = Residual(x=x), []
    for i, layer in enumerate(layers):
        if i in aux_layer_ids:
            stream = Residual(x=stream.sum())
            captured.append(stream.x)
        stream = layer(stream)
    if len(layers) in aux_layer_ids:
        stream = Residual(x=stream.sum())
        captured.append(stream.x)
    aux = jnp.concatenate(captured, axis=-1) if captured else x[..., :0]
    return stream, aux


def shard_ids(size: int, shard: Shard) -> Int[Array, "V"]:
    """The ids of this device's columns when `size` ids are split evenly and in order."""
    local = size // shard.size
    first = 0 if shard.axis is None else jax.lax.axis_index(shard.axis) * local
    return first + jnp.arange(local, dtype=jnp.int32)
