"""The forward pass of every draft head over pairs of a token and a feature.

slot i of a head's KV cache has the pair (token i + 1, feature i), at RoPE position i
e = embed(token)
h = the target's feature at i if known (its last hidden, or captured layers through fc), else the
    head's own output for the token before

EAGLE-1 and 2 (Li et al., 2024, arXiv:2401.15077), and HASS, which norms e and h:
    x = fc([e; h]); out = x + attention(x); out = out + mlp(post_norm(out))
layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2):
    x = fuse([embed_norm(e); hidden_norm(h)]); out = an ordinary decoder layer over x
EAGLE-3 (Li et al., 2025, arXiv:2503.01840), 2E wide:
    out = h + attention([embed_norm(e); hidden_norm(h)]); out = out + mlp(post_norm(out))

Further decoder layers may follow. logits = lm_head(norm(out)) if the head has a norm, and out or
norm(out) is fed back. `HeadSpec` has all of this as data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, all_columns, linear, logits_of
from jspec.layers.norm import Residual, norm
from jspec.models.attends import attend_of
from jspec.models.decoder import KVPool, paged_layer, shard_ids
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.layer import LayerSettings, Params, run_layer, run_sublayers
from jspec.models.params import ParamTable, with_formats
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import FeatureNorm, HeadSpec, Join
from jspec.spec.model_spec import LayerSpec
from jspec.spec.weight_format import Formats


def run_first_layer(
    params: Params,
    embedded: Float[Array, "*b E"],
    hidden: Float[Array, "*b E"],
    positions: Int[Array, "*b"],
    attend: Callable[..., Any],
    *,
    head: HeadSpec,
    spec: LayerSpec,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "*r E"]:
    """Join token and feature, and run the layer that reads them. kept: see `run_layer`."""
    feature = hidden
    if head.norms_pair:
        embedded = norm(params["embed_norm"], embedded, eps=spec.eps)
        hidden = norm(params["hidden_norm"], hidden, eps=spec.eps)
    pair = (hidden, embedded) if head.hidden_first else (embedded, hidden)
    joined = jnp.concatenate(pair, axis=-1)
    run = partial(run_sublayers, params, attend=attend, spec=spec, settings=settings, kept=kept)
    if head.join is Join.WIDE:
        residual = hidden if head.norm_before_residual else feature
        return run(residual, joined, positions).sum()
    x = linear(params["fuse"], joined, ops=settings.ops)
    if not head.input_norm:
        return run(x, x, positions).sum()
    return run_layer(
        params, Residual(x=x), positions, attend, spec=spec, settings=settings, kept=kept
    ).sum()


@partial(jax.jit, static_argnames=("head", "spec", "settings"), inline=False)
def _paged_first_layer(
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    pages: Any,
    rows: AttentionMetadata,
    kept: jax.Array | None,
    *,
    head: HeadSpec,
    spec: LayerSpec,
    settings: LayerSettings,
) -> tuple[jax.Array, Any]:
    attend = attend_of(params["attention"], pages, rows, spec.attention, settings)
    out = run_first_layer(
        params,
        embedded,
        hidden,
        rows.q_positions,
        attend,
        head=head,
        spec=spec,
        settings=settings,
        kept=kept,
    )
    return out, attend.cache


@dataclass(frozen=True, slots=True)
class FeatureHead:
    """A draft head over its own KV pools, one per layer. names: of its weights in files."""

    spec: HeadSpec
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    names: HeadNames | None = None
    formats: Formats = ()

    @property
    def table(self) -> ParamTable:
        return with_formats(head_params(self.spec, self.names), self.formats)

    def features(self, params: Params, given: Float[Array, "*b A"]) -> Float[Array, "*b E"]:
        """Return h of captured features of the target; called once before an advance."""
        spec, eps = self.spec, self.spec.layer.rms_norm_eps
        if not spec.fuses_features:
            return given
        if spec.feature_norm is FeatureNorm.WHOLE:
            given = norm(params["feature_norm"], given, eps=eps)
        elif spec.feature_norm is FeatureNorm.EACH:
            each = jnp.split(given, len(spec.aux_layer_ids), axis=-1)
            norms = params["feature_norms"]
            given = jnp.concatenate(
                [norm(norms[f"norm_{i}"], x, eps=eps) for i, x in enumerate(each)], axis=-1
            )
        return all_columns(self.shard, linear(params["fc"], given, ops=self.ops))

    @property
    def mask_token_id(self) -> int:
        if self.spec.mask_token_id is None:
            raise ValueError("the head has no mask_token_id; expected one that drafts in parallel")
        return self.spec.mask_token_id

    def mask_feature(self, params: Params) -> Float[Array, "E"]:
        return self.features(params, params["mask_hidden"].reshape(-1))

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
        level: int = 0,
    ) -> tuple[Float[Array, "R E"], KVPool]:
        """Run the layers of a level. Return (output to feed back and score, updated pools)."""
        head, settings = self.spec, LayerSettings(self.ops, self.shard.alone, queries_per_row)
        embedded = embed(params["embed"], token_ids)
        if head.zeroes_first:
            embedded = jnp.where((rows.q_positions > 0)[:, None], embedded, 0)
        first, *further = stack = head.stack(level)
        pools, last = list(kv), stack[-1]
        spec = head.layer.layers[first]
        out, pools[first] = _paged_first_layer(
            params["layers"][first],
            embedded,
            hidden,
            kv[first],
            rows.of_window(spec.attention.window),
            kept if first == last else None,
            head=head,
            spec=spec,
            settings=settings,
        )
        stream = Residual(x=out)
        for i in further:
            spec = head.layer.layers[i]
            stream, pools[i], _ = paged_layer(
                params["layers"][i],
                stream,
                kv[i],
                rows.of_window(spec.attention.window),
                kept if i == last else None,
                spec=spec,
                settings=settings,
            )
        out = stream.sum()
        if head.feeds_back_normed:
            out = self._normed(params, out, level)
        return out, tuple(pools)

    def logits(
        self, params: Params, out: Float[Array, "*b E"], *, level: int = 0
    ) -> Float[Array, "*b U"]:
        spec = self.spec
        if spec.norm_before_head and not spec.feeds_back_normed:
            out = self._normed(params, out, level)
        own = self._end(params, level) if spec.own_head else params
        logits = logits_of(out, own["lm_head"]["kernel"])
        return logits if spec.logit_scale == 1.0 else logits * spec.logit_scale

    def token_ids(self, params: Params) -> Int[Array, "U"]:
        """Return the target id of each column of this device's shard of the logits."""
        if self.spec.per_level:
            return shard_ids(self.spec.draft_vocab_size, self.shard)
        ids: jax.Array = params["draft_ids"]
        return ids

    def _normed(self, params: Params, out: jax.Array, level: int) -> jax.Array:
        return norm(self._end(params, level)["norm"], out, eps=self.spec.layer.rms_norm_eps)

    def _end(self, params: Params, level: int) -> Params:
        end: Params = params["layers"][level] if self.spec.per_level else params
        return end
