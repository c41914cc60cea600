"""The forward pass of a model that drafts a block at once: DFlash (arXiv:2602.06036).

context, of a committed token at position i: ctx = hidden_norm(fc(the target's captured layers at
    i)). Every layer caches K and V of ctx itself, by its own projections, k_norm and RoPE at i.
block, at positions L, L + 1, ...: the embeddings of the root and of masks run through the layers
    and attend to the context and to each other. logits = lm_head(norm(out)); the row at position p
    predicts the token at p, and with `BlockSpec.from_root` the token at p + 1.
Markov head (DSpark, 2026): logits += after(m); `MarkovKind` computes m from the token before.
DFlash2 (z-lab, 2026): `ConvolutionSpec` around each sub-layer, `SelectorSpec` after lm_head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from jspec.layers.attention import Attend, attention, project
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.models.attends import PagedAttend, kv_scales_of
from jspec.models.decoder import KVPool
from jspec.models.heads.dflash import block_params
from jspec.models.layer import LayerSettings, Params, feed_forward
from jspec.models.params import ParamTable, with_formats
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.block_spec import BlockSpec, ConvolutionSpec, MarkovKind, MarkovSpec
from jspec.spec.model_spec import LayerSpec
from jspec.spec.weight_format import Formats


@partial(jax.jit, static_argnames=("spec", "settings"), inline=False)
def _write_context(
    params: Params,
    ctx: jax.Array,
    cache: jax.Array,
    rows: AttentionMetadata,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
) -> jax.Array:
    own = params["attention"]
    heads, rotation = project(
        own,
        ctx,
        rows.q_positions,
        spec=spec.softmax_attention,
        eps=spec.eps,
        shard=settings.shard,
        ops=settings.ops,
    )
    _, k, v = rotate_and_split(heads, rotation)
    return settings.ops.write_kv(
        k, v, cache, rows, queries_per_row=settings.queries_per_row, scales=kv_scales_of(own)
    )


def run_block_layer(
    params: Params,
    stream: Residual,
    positions: Int[Array, "T"],
    attend: Attend,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    convolution: ConvolutionSpec | None,
) -> Residual:
    """Run a layer over blocks of `settings.queries_per_row` rows. positions: for RoPE."""
    ops, own = settings.ops, params["attention"]
    settings = replace(settings, shard=settings.shard.of_layer(params))

    def mixed(x: jax.Array) -> jax.Array:
        how: Any = {"eps": spec.eps, "shard": settings.shard, "ops": ops}
        return attention(own, x, positions, attend, spec=spec.softmax_attention, **how)

    def mlp(x: jax.Array) -> jax.Array:
        return feed_forward(params, x, spec=spec, settings=settings)

    around = {"attention_conv": ("input_norm", mixed), "mlp_conv": ("post_norm", mlp)}
    for name, (norm_name, sublayer) in around.items():
        x, read = norm_of_sum(params[norm_name], stream, eps=spec.eps, ops=ops)
        if convolution is None:
            stream = Residual(x=x, delta=sublayer(read))
            continue
        before, after = _kernels(params[name], read, spec=convolution, ops=ops)
        out = sublayer(_convolved(read, before, size=settings.queries_per_row))
        stream = Residual(x=x, delta=_convolved(out, after, size=settings.queries_per_row))
    if not ops.defers_sums:  # as in decoder.paged_layer
        stream = Residual(x=stream.sum())
    return stream


@partial(jax.jit, static_argnames=("spec", "settings", "convolution"), inline=False)
def _paged_layer(
    params: Params,
    stream: Residual,
    cache: jax.Array,
    positions: jax.Array,
    rows: AttentionMetadata,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    convolution: ConvolutionSpec | None,
) -> tuple[Residual, jax.Array]:
    """Run a layer over pages. rows.q_positions: the positions from which windows count."""
    scales = kv_scales_of(params["attention"])
    attend = PagedAttend(cache, rows, spec.softmax_attention, settings, scales)
    how: Any = {"spec": spec, "settings": settings, "convolution": convolution}
    return run_block_layer(params, stream, positions, attend, **how), attend.cache


def _kernels(
    params: Params, x: Float[Array, "T E"], *, spec: ConvolutionSpec, ops: Ops
) -> Float[Array, "2 T taps E"]:
    dynamic = linear(params["dynamic"], x, ops=ops).reshape(len(x), 2, spec.taps, -1)
    of_channels = jnp.repeat(dynamic, spec.group_size, axis=-1)
    return jnp.moveaxis(params["base"].astype(x.dtype) + of_channels, 1, 0)


def _convolved(
    x: Float[Array, "T E"], kernel: Float[Array, "T taps E"], *, size: int | None
) -> Float[Array, "T E"]:
    """Convolve blocks of `size` rows; no tap reaches before its block's first row."""
    blocks = x.reshape(-1, size or len(x), x.shape[-1])
    out = jnp.zeros_like(x)
    for tap in range(kernel.shape[1]):
        shifted = jnp.pad(blocks, ((0, 0), (tap, 0), (0, 0)))[:, : blocks.shape[1]]
        out += shifted.reshape(x.shape) * kernel[:, tap]
    return out


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block drafter's model over its own KV pools, one per layer."""

    spec: BlockSpec
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    formats: Formats = ()

    @property
    def table(self) -> ParamTable:
        return with_formats(block_params(self.spec), self.formats)

    def context(self, params: Params, features: Float[Array, "*b A"]) -> Float[Array, "*b E"]:
        ctx = linear(params["fc"], features, ops=self.ops)
        return norm(params["hidden_norm"], ctx, eps=self.spec.layer.rms_norm_eps)

    def write_context(
        self,
        params: Params,
        features: Float[Array, "T A"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
    ) -> KVPool:
        """Return the pools with K and V of the tokens with these features."""
        ctx = self.context(params, features)
        settings = LayerSettings(self.ops, self.shard.alone, queries_per_row)
        return tuple(
            _write_context(
                params["layers"][i],
                ctx,
                kv[i],
                rows.of_window(layer.attention.window),
                spec=layer,
                settings=settings,
            )
            for i, layer in enumerate(self.spec.layer.layers)
        )

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "B R"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        causal_mask: UInt32[Array, "T words"],
    ) -> tuple[Float[Array, "B R E"], KVPool]:
        """Run blocks.

        Return (the final norm's output, pools with the block's K and V). rows: R queries per row,
        with a tail in which all see each other. causal_mask: of layers where none sees a later one.
        """
        batch, size = token_ids.shape
        settings = LayerSettings(self.ops, self.shard.alone, size)
        stream, pools = Residual(x=embed(params["embed"], token_ids.reshape(-1))), list(kv)
        for i, layer in enumerate(self.spec.layer.layers):
            window = layer.attention.window
            own = rows.of_window(window)
            if window is not None and self.spec.causal_windows:
                own = replace(own, tail_mask=causal_mask)
            if self.spec.windows_from_root:
                own = replace(own, q_positions=jnp.repeat(rows.prefix_lens, size))
            stream, pools[i] = _paged_layer(
                params["layers"][i],
                stream,
                kv[i],
                rows.q_positions,
                own,
                spec=layer,
                settings=settings,
                convolution=self.spec.convolution,
            )
        out = norm(params["norm"], stream.sum(), eps=self.spec.layer.rms_norm_eps)
        return out.reshape(batch, size, -1), tuple(pools)

    def logits(self, params: Params, out: Float[Array, "*b E"]) -> Float[Array, "*b U"]:
        return logits_of(out, params["lm_head"]["kernel"])

    def markov(
        self,
        params: Params,
        token_ids: Int[Array, "B P"],
        hidden: Float[Array, "B E"],
        state: Float[Array, "B P r"],
    ) -> tuple[Float[Array, "B P r"], Float[Array, "B P U"]]:
        """Return (the recurrent state, terms to add to a row's logits) by the token before it."""
        own, kind = params["markov"], self._markov.kind
        before = jnp.take(own["before"], token_ids, axis=0, mode="clip")
        row = jnp.broadcast_to(hidden[:, None], (*token_ids.shape, hidden.shape[-1]))
        if kind is MarkovKind.GATED:
            joined = jnp.concatenate((row, before), axis=-1)
            before = jax.nn.sigmoid(linear(own["gate"], joined, ops=self.ops)) * before
        elif kind is MarkovKind.RNN:
            joined = jnp.concatenate((state, before, row), axis=-1)
            joint = linear(own["joint"], joined, ops=self.ops)
            gate, new, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state, before = gate * state + (1 - gate) * jnp.tanh(new), jnp.tanh(out)
        return state, logits_of(before, own["after"])

    def transitions(
        self,
        params: Params,
        token_ids: Int[Array, "B P"],
        hidden: Float[Array, "B E"],
        candidates: Int[Array, "B C"],
    ) -> Float[Array, "B P C"]:
        """Return the selector's terms of a row's candidates, given the token before it."""
        after = jnp.take(params["selector"]["after"], candidates, axis=0, mode="clip")
        context = self.transition_context(params, token_ids, hidden)
        return jnp.einsum("bpr,bcr->bpc", context, after, preferred_element_type=jnp.float32)

    def transition_context(
        self, params: Params, token_ids: Int[Array, "B P"], hidden: Float[Array, "B E"]
    ) -> Float[Array, "B P r"]:
        own = params["selector"]
        before = jnp.take(own["before"], token_ids, axis=0, mode="clip")
        return before * linear(own["hidden"], hidden, ops=self.ops)[:, None]

    def no_state(self, batch: int, dtype: DTypeLike) -> Float[Array, "B 1 r"]:
        """Return the recurrent state before a block; without a recurrence it has width 0."""
        is_recurrent = self._markov.kind is MarkovKind.RNN
        return jnp.zeros((batch, 1, self._markov.rank * is_recurrent), dtype)

    @property
    def _markov(self) -> MarkovSpec:
        if self.spec.markov is None:
            raise ValueError("the block drafter has no Markov head; expected one")
        return self.spec.markov
