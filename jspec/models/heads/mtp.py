"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), one pool each.

slot i of layer s is of the pair (feature i, token i + s + 1), at RoPE position i
e = embed(token), h = the target's hidden at i, or (chained) the output of layer s - 1 for slot i
x = fuse([embed_norm(e); hidden_norm(h)])     width 2E; hidden first if the config specifies it
out = the decoder layer over x                an ordinary one, over its own layer's slots alone
logits = lm_head(norm(out))                   of token i + s + 2; lm_head the target's, or its own

A model with one such layer may run it again for every draft level (`RecurrentHead`): h is then the
layer's own output for the token before, with or without its final norm, and all slots are in one
pool, as for an EAGLE head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import Attend
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm
from jspec.models.decoder import (
    KVPool,
    LayerSettings,
    PagedAttend,
    Params,
    run_layer,
    shard_ids,
)
from jspec.models.heads.mtp_params import MtpNames, draft_ids, mtp_params
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import LayerSpec, MtpConfig


def run_mtp_layer(
    params: Params,
    embedded: Float[Array, "*b E"],
    hidden: Float[Array, "*b E"],
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    spec: LayerSpec,
    hidden_first: bool,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "*r E"]:
    """Return a layer's output before its final norm. kept: see `run_layer`."""
    pair = [
        norm(params["embed_norm"], embedded, eps=spec.eps),
        norm(params["hidden_norm"], hidden, eps=spec.eps),
    ]
    x = linear(params["fuse"], jnp.concatenate(pair[::-1] if hidden_first else pair, axis=-1))
    stream = Residual(x=x)
    return run_layer(
        params, stream, positions, attend, spec=spec, settings=settings, kept=kept
    ).sum()


@partial(jax.jit, static_argnames=("spec", "hidden_first", "settings"), inline=False)
def _paged_mtp_layer(
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    pages: jax.Array,
    rows: AttentionMetadata,
    kept: jax.Array | None,
    *,
    spec: LayerSpec,
    hidden_first: bool,
    settings: LayerSettings,
) -> tuple[jax.Array, jax.Array]:
    attend = PagedAttend(pages, rows, spec.softmax_attention, settings)
    out = run_mtp_layer(
        params,
        embedded,
        hidden,
        rows.q_positions,
        attend,
        spec=spec,
        hidden_first=hidden_first,
        settings=settings,
        kept=kept,
    )
    return out, attend.cache


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The layers of a config; each call runs one over the KV pool that it is given."""

    config: MtpConfig
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    names: MtpNames = field(default_factory=MtpNames)

    @property
    def table(self) -> ParamTable:
        return mtp_params(self.config, self.names)

    def forward(
        self,
        params: Params,
        layer: int,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        pages: jax.Array,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], jax.Array]:
        """Return (output before the final norm, updated pool). kept: see `Decoder.forward`."""
        spec = self.config.model.layers[layer]
        embedded = embed(params["embed"], token_ids)
        if self.config.zeroes_first:
            embedded = jnp.where((rows.q_positions > 0)[:, None], embedded, 0)
        return _paged_mtp_layer(
            params["layers"][layer],
            embedded,
            hidden,
            pages,
            rows.of_window(spec.attention.window),
            kept,
            spec=spec,
            hidden_first=self.config.hidden_first,
            settings=LayerSettings(self.ops, self.shard, queries_per_row),
        )

    def handed_on(
        self, params: Params, layer: int, out: Float[Array, "*b E"]
    ) -> Float[Array, "*b E"]:
        """Return the input of the next layer of a chain, or of the next run of this one."""
        return self._normed(params, layer, out) if self.config.feeds_normed else out

    def logits(self, params: Params, layer: int, out: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """Return f32 logits over this device's vocabulary shard from the layer's output."""
        return self.logits_of_normed(params, layer, self._normed(params, layer, out))

    def logits_of_normed(
        self, params: Params, layer: int, normed: Float[Array, "*b E"]
    ) -> Float[Array, "*b V"]:
        """Return f32 logits over this device's vocabulary shard from the layer's normed output."""
        head = params["layers"][layer] if self.config.own_heads else params
        return logits_of(normed, head["lm_head"]["kernel"])

    def token_ids(self) -> Int[Array, "V"]:
        """Return the target id of each column of this device's vocabulary shard."""
        return shard_ids(self.config.model.vocab_size, self.shard)

    def _normed(self, params: Params, layer: int, out: jax.Array) -> jax.Array:
        eps = self.config.model.rms_norm_eps
        return norm(params["layers"][layer]["norm"], out, eps=eps)


@dataclass(frozen=True, slots=True)
class RecurrentHead:
    """One layer that every draft level runs again, as a head for an EAGLE drafter.

    slot i is of the pair (token i + 1, h): h is the target's hidden at i if known, else the layer's
    own output for slot i - 1. params["draft_ids"]: the whole vocabulary.
    """

    layer: MtpHead

    @property
    def config(self) -> MtpConfig:
        return self.layer.config

    @property
    def shard(self) -> Shard:
        return self.layer.shard

    @property
    def ops(self) -> Ops:
        return self.layer.ops

    @property
    def table(self) -> ParamTable:
        return (*self.layer.table, draft_ids(self.config.model.vocab_size))

    def features(self, params: Params, given: Float[Array, "*b E"], /) -> Float[Array, "*b E"]:
        """Return the target's hidden unchanged: every forward joins it with a token."""
        del params
        return given

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], KVPool]:
        """Return (output to feed back, updated pool). kept: see `Decoder.forward`."""
        out, pages = self.layer.forward(
            params, 0, token_ids, hidden, kv[0], rows, queries_per_row=queries_per_row, kept=kept
        )
        return self.layer.handed_on(params, 0, out), (pages,)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """Return f32 logits over this device's vocabulary shard from the fed-back output."""
        if self.config.feeds_normed:
            return self.layer.logits_of_normed(params, 0, hidden)
        return self.layer.logits(params, 0, hidden)
