"""The EAGLE-3 draft head (Li et al., 2025, arXiv:2503.01840), and 3.1's variants.

slot i of the draft's KV cache is of the pair (token i + 1, feature of position i)
e = embed(token), h = fc([low; mid; high]) for a target feature, else the parent's own output
u = [input_norm(e); hidden_norm(h)]             width 2E, embedding first
h1 = res + attention(u)                         res = h (norm_before_residual: hidden_norm(h))
h2 = h1 + mlp(post_norm(h1))                    through further decoder layers, if any
logits = lm_head(norm(h2))                      over the draft vocabulary U

h2 is fed back (feeds_back_normed: norm(h2)). Features may be normed before fc, together or each by
itself. A head without aux layers uses the target's last hidden as h, and has no fc.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import Attend, attention, take_kept
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.models.decoder import (
    KVPool,
    LayerSettings,
    PagedAttend,
    Params,
    feed_forward,
    paged_layer,
)
from jspec.models.heads.head_files import LAYER, further_layers, head_layers
from jspec.models.layer_params import attention_params, ffn_params, lm_head, product
from jspec.models.layer_params import norm as norm_param
from jspec.models.params import INTEGERS, Init, ParamSpec, ParamTable, prefixed
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import Eagle3Config, FeatureNorm


def eagle3_params(config: Eagle3Config) -> ParamTable:
    """Declare a head, under speculators' names.

    embed.table and draft_ids have no layout here: a head may share its target's embedding, and the
    vocabulary is stored as offsets (heads.hf_eagle3 reads both). draft_ids[u] is the TARGET id of
    draft id u (checkpoints store d2t[u] = id - u).
    """
    model, layer = config.layer, config.layer.one_layer
    E, U = model.hidden_size, config.draft_vocab_size
    first = (
        norm_param("input_norm", "input_layernorm", E),
        norm_param("hidden_norm", "hidden_norm", E),
        *attention_params(layer.softmax_attention, in_size=2 * E, out_size=E),
        norm_param("post_norm", "post_attention_layernorm", E),
        *ffn_params(layer.ffn, size=E),
    )
    further = (_or_hidden_norm(spec) for spec in further_layers(model))
    layers = (*prefixed(first, path=("layer",), stored=LAYER), *further)
    return (
        ParamSpec(path=("embed", "table"), shape=(model.vocab_size, E), init=Init.TABLE),
        *_feature_params(config),
        *head_layers(layers),
        *((norm_param("norm", "norm", E),) if config.norm_before_head else ()),
        lm_head(E, U, tied=False),
        ParamSpec(path=("draft_ids",), shape=(U,), axes=("vocab",), init=Init.IDS, format=INTEGERS),
    )


def _or_hidden_norm(spec: ParamSpec) -> ParamSpec:
    """Let a further layer's input norm be named hidden_norm, as in SGLang's layout."""
    names = [part.name for layout in spec.layouts for part in layout]
    if not names[0].endswith(".input_layernorm.weight"):
        return spec
    ((part,),) = spec.layouts
    other = replace(part, name=part.name.replace("input_layernorm", "hidden_norm"))
    return replace(spec, layouts=(*spec.layouts, (other,)))


def _feature_params(config: Eagle3Config) -> ParamTable:
    """Declare fc and the norms before it; empty without aux layers."""
    if not config.aux_layer_ids:
        return ()
    count, size = len(config.aux_layer_ids), config.target_hidden_size
    norms: ParamTable = ()
    if config.feature_norm is FeatureNorm.WHOLE:
        norms = (norm_param("feature_norm", "input_norm", count * size),)
    elif config.feature_norm is FeatureNorm.EACH:
        each = (norm_param(f"norm_{i}", f"fc_norm.{i}", size) for i in range(count))
        norms = prefixed(each, path=("feature_norms",), stored="")
    parts = (("fc", config.layer.hidden_size, 1),)
    return (*norms, *product(("fc",), count * size, parts, bias=config.fc_bias))


def run_head_layer(
    params: Params,
    embedded: Float[Array, "*b E"],
    hidden: Float[Array, "*b E"],
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    config: Eagle3Config,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "*r E"]:
    """Run the first layer: attention over [embedding; hidden], 2E wide. kept: see `run_layer`."""
    spec = config.layer.one_layer
    normed = norm(params["hidden_norm"], hidden, eps=spec.eps)
    wide = jnp.concatenate((norm(params["input_norm"], embedded, eps=spec.eps), normed), axis=-1)
    mixed = attention(
        params["attention"],
        wide,
        positions,
        attend,
        spec=spec.softmax_attention,
        eps=spec.eps,
        shard=settings.shard,
        kept=kept,
    )
    residual = normed if config.norm_before_residual else hidden
    stream = Residual(x=take_kept(residual, kept), delta=mixed)
    x, normed = norm_of_sum(params["post_norm"], stream, eps=spec.eps, ops=settings.ops)
    return x + feed_forward(params, normed, spec=spec, settings=settings)


@partial(jax.jit, static_argnames=("config", "settings"), inline=False)
def _paged_head_layer(
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    pages: jax.Array,
    rows: AttentionMetadata,
    kept: jax.Array | None,
    *,
    config: Eagle3Config,
    settings: LayerSettings,
) -> tuple[jax.Array, jax.Array]:
    attend = PagedAttend(pages, rows, config.layer.one_layer.softmax_attention, settings)
    out = run_head_layer(
        params,
        embedded,
        hidden,
        rows.q_positions,
        attend,
        config=config,
        settings=settings,
        kept=kept,
    )
    return out, attend.cache


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """An EAGLE-3 head over its own KV pools, one per layer."""

    config: Eagle3Config
    ops: Ops
    shard: Shard = field(default_factory=Shard)

    @property
    def table(self) -> ParamTable:
        return eagle3_params(self.config)

    def features(self, params: Params, given: Float[Array, "*b A"], /) -> Float[Array, "*b E"]:
        """Fuse the target's concatenated aux features with fc, once before an advance."""
        config, eps = self.config, self.config.layer.rms_norm_eps
        if not config.aux_layer_ids:
            return given
        if config.feature_norm is FeatureNorm.WHOLE:
            given = norm(params["feature_norm"], given, eps=eps)
        elif config.feature_norm is FeatureNorm.EACH:
            each = jnp.split(given, len(config.aux_layer_ids), axis=-1)
            norms = params["feature_norms"]
            given = jnp.concatenate(
                [norm(norms[f"norm_{i}"], x, eps=eps) for i, x in enumerate(each)], axis=-1
            )
        return linear(params["fc"], given)

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
        """Return (output to feed back, updated pools). kept: see `Decoder.forward`."""
        settings = LayerSettings(self.ops, self.shard, queries_per_row)
        last = self.config.layer.num_layers - 1
        out, first = _paged_head_layer(
            params["layer"],
            embed(params["embed"], token_ids),
            hidden,
            kv[0],
            rows,
            kept if last == 0 else None,
            config=self.config,
            settings=settings,
        )
        pages = [first]
        stream = Residual(x=out)
        for i, spec in enumerate(self.config.layer.layers[1:], start=1):
            stream, after = paged_layer(
                params["layers"][i],
                stream,
                kv[i],
                rows,
                kept if i == last else None,
                spec=spec,
                settings=settings,
            )
            pages.append(after)
        return self._carried(params, stream.sum()), tuple(pages)

    def _carried(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        if not self.config.feeds_back_normed:
            return hidden
        return norm(params["norm"], hidden, eps=self.config.layer.rms_norm_eps)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b U"]:
        """Return f32 logits of `forward`'s output over this device's draft vocabulary shard."""
        config = self.config
        if config.norm_before_head and not config.feeds_back_normed:
            hidden = norm(params["norm"], hidden, eps=config.layer.rms_norm_eps)
        logits = logits_of(hidden, params["lm_head"]["kernel"])
        return logits if config.logit_scale == 1.0 else logits * config.logit_scale
