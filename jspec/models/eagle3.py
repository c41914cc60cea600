"""The EAGLE-3 draft head (Li et al., 2025, arXiv:2503.01840).

row i of the draft holds the pair (token i + 1, feature of position i)
e = embed(token), h = fc([low; mid; high]) for a target feature, else the parent's own output
u = [input_norm(e); hidden_norm(h)]             width 2E, embedding first
h1 = res + attention(u)                         res = h (norm_before_residual: hidden_norm(h))
h2 = h1 + mlp(post_norm(h1))                    h2, before the final norm, is fed back
logits = lm_head(norm(h2))                      over the draft vocabulary U
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.model_spec import Eagle3Config
from jspec.layers.attention import Attend, attention
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.models.decoder import KVPool, LayerSettings, PagedAttend, Params, feed_forward
from jspec.models.params import (
    Init,
    ParamSpec,
    ParamTable,
    Split,
    attention_params,
    ffn_params,
    lm_head,
    prefixed,
    product,
)
from jspec.models.params import norm as norm_param
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.ops import Ops

LAYER = "layers.0."


def eagle3_params(config: Eagle3Config) -> ParamTable:
    """The table of a head, under speculators' names.

    embed.table and draft_ids have no stored form of their own here: a head may share its target's
    embedding, and the vocabulary is stored as offsets (models.hf_eagle3 reads both).
    draft_ids[u] is the TARGET id of draft id u (checkpoints store d2t[u] = id - u).
    """
    model, layer = config.layer, config.layer.one_layer
    E, U = model.hidden_size, config.draft_vocab_size
    own = (
        norm_param("input_norm", "input_layernorm", E),
        norm_param("hidden_norm", "hidden_norm", E),
        *attention_params(layer.attention, in_size=2 * E, out_size=E),
        norm_param("post_norm", "post_attention_layernorm", E),
        *ffn_params(layer.ffn, size=E),
    )
    aux_size = len(config.aux_layer_ids) * config.target_hidden_size
    return (
        ParamSpec(path=("embed", "table"), shape=(model.vocab_size, E), init=Init.TABLE),
        *product(("fc",), aux_size, (("fc", E, 1),)),
        *prefixed(own, path=("layer",), stored=LAYER),
        norm_param("norm", "norm", E),
        lm_head(E, U, tied=False),
        ParamSpec(path=("draft_ids",), shape=(U,), split=Split.OUT, init=Init.IDS, is_integer=True),
    )


def run_head_layer(
    params: Params,
    embedded: Float[Array, "*b E"],
    hidden: Float[Array, "*b E"],
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    config: Eagle3Config,
    settings: LayerSettings,
) -> Float[Array, "*b E"]:
    """The head's one layer: attention over [embedding; hidden], as wide as 2E at its input."""
    spec = config.layer.one_layer
    normed = norm(params["hidden_norm"], hidden, eps=spec.eps)
    wide = jnp.concatenate((norm(params["input_norm"], embedded, eps=spec.eps), normed), axis=-1)
    mixed = attention(
        params["attention"],
        wide,
        positions,
        attend,
        spec=spec.attention,
        eps=spec.eps,
        shard=settings.shard,
    )
    stream = Residual(x=normed if config.norm_before_residual else hidden, delta=mixed)
    x, normed = norm_of_sum(params["post_norm"], stream, eps=spec.eps, ops=settings.ops)
    return x + feed_forward(params, normed, spec=spec, settings=settings)


@partial(jax.jit, static_argnames=("config", "settings"), inline=False)
def _paged_head_layer(
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    pages: jax.Array,
    rows: AttentionRows,
    *,
    config: Eagle3Config,
    settings: LayerSettings,
) -> tuple[jax.Array, jax.Array]:
    attend = PagedAttend(pages, rows, config.layer.one_layer.attention, settings)
    out = run_head_layer(
        params, embedded, hidden, rows.q_positions, attend, config=config, settings=settings
    )
    return out, attend.pages


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """An EAGLE-3 head over its own pool (one layer)."""

    config: Eagle3Config
    ops: Ops
    shard: Shard = field(default_factory=Shard)

    @property
    def table(self) -> ParamTable:
        return eagle3_params(self.config)

    def features(self, params: Params, aux_hidden: Float[Array, "*b A"]) -> Float[Array, "*b E"]:
        """The target's aux features, fused; applied once, before an advance."""
        return linear(params["fc"], aux_hidden)

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        kv: KVPool,
        rows: AttentionRows,
        *,
        queries_per_row: int | None,
    ) -> tuple[Float[Array, "T E"], KVPool]:
        """(output before the final norm, which is what is fed back, pool with the new rows)."""
        out, pages = _paged_head_layer(
            params["layer"],
            embed(params["embed"], token_ids),
            hidden,
            kv[0],
            rows,
            config=self.config,
            settings=LayerSettings(self.ops, self.shard, queries_per_row),
        )
        return out, (pages,)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b U"]:
        """f32 logits over this device's shard of the draft vocabulary."""
        normed = norm(params["norm"], hidden, eps=self.config.layer.rms_norm_eps)
        return logits_of(normed, params["lm_head"]["kernel"])
