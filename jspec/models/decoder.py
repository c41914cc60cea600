"""The decoder that every target family runs, as pure functions of its spec and params.

`trunk` knows no caches: training, prefill, verification and decoding differ only in their `attend`.
`Decoder` is the target of a step: the layers over their caches, one inner jit per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.config.expert_placement import ExpertMap
from jspec.layers.attention import take_kept
from jspec.layers.embedding import embed
from jspec.layers.expert_use import COPIES, ExpertCounter, ExpertUse, MoETokens, with_use
from jspec.layers.linear import Shard, logits_of
from jspec.layers.lora import chosen_columns, with_adapters
from jspec.layers.norm import Residual, norm_of_sum
from jspec.layers.sandwich import token_inputs, with_cache_scales
from jspec.models.attends import SparseAttend, attend_of
from jspec.models.layer import LayerSettings, Params, run_layer
from jspec.models.lora_params import lora_params
from jspec.models.params import ParamTable, padded, with_expert_map, with_formats
from jspec.models.registry import table_of
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import Unit
from jspec.spec.cache_groups import CacheGroup, groups_of_layers
from jspec.spec.lora_spec import LoRASpec
from jspec.spec.model_spec import LayerSpec, ModelSpec, cache_groups
from jspec.spec.sandwich import cache_indices
from jspec.spec.weight_format import Formats

KVPool = tuple[Any, ...]  # the layers' caches (device.state.Caches)


@partial(jax.jit, static_argnames=("spec", "settings"), inline=False)
def paged_layer(
    params: Params,
    stream: Residual,
    cache: Any,
    rows: AttentionMetadata,
    kept: jax.Array | None = None,
    token_input: jax.Array | None = None,
    loras: tuple[Params, jax.Array] | None = None,
    tokens: MoETokens | None = None,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
) -> tuple[Residual, Any, jax.Array | None]:
    """Run a layer over its cache: (stream, updated cache, counts of its experts' tokens or None).

    loras: the layer's stacked adapters, and the columns that each token uses. tokens: for its MoE.
    """
    if loras is not None:
        params = with_adapters(params, *loras, kept)
    use = None if tokens is None else ExpertUse(tokens.kept(kept))
    params = with_use(params, use)
    own = params["attention"]
    attend = attend_of(own, cache, rows, spec.attention, settings, stream.selected)
    how: Any = {"spec": spec, "settings": settings, "kept": kept, "token_input": token_input}
    stream = run_layer(params, stream, rows.q_positions, attend, **how)
    if not settings.ops.defers_sums:  # XLA gains nothing, and rounds values leaving an inner jit
        stream = Residual(x=stream.sum())
    if isinstance(attend, SparseAttend):
        stream = replace(stream, selected=attend.selected)
    return stream, attend.cache, None if use is None else use.counts


@dataclass(frozen=True, slots=True)
class Decoder:
    """A target over its caches, one per layer."""

    spec: ModelSpec
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    aux_layer_ids: tuple[int, ...] = ()  # captured for a draft model
    formats: Formats = ()  # of products whose weights are not dense
    lora: LoRASpec | None = None  # capacity for adapters, in params["lora"]
    # The map of placed experts; programs read params["expert_copies"] instead.
    experts: ExpertMap = field(default=(), repr=False)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def table(self) -> ParamTable:
        """All weights, including those of adapters, which no checkpoint of the model has."""
        own = with_expert_map(table_of(self.spec), self.experts)
        return with_formats(own, self.formats) + lora_params(own, self.lora)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.spec, name="target")

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
        lora_slots: Int[Array, "B"] | None = None,
        counter: ExpertCounter | None = None,
    ) -> tuple[Float[Array, "R E"], Float[Array, "T A"], KVPool]:
        """Return (last hidden after the final norm, aux features, caches with the T new tokens),
        like `Target.forward`. For tokens outside `kept` the last layer computes only K and V,
        unless captured."""
        caches = list(kv)
        last = self.spec.num_layers - 1
        ends_early = kept is not None and last + 1 not in self.aux_layer_ids
        settings = LayerSettings(self.ops, self.shard.alone, queries_per_row)
        by_group = {
            group: rows.of_slots()
            if group.entry.unit is Unit.SLOT
            else rows.of_window(group.window)
            for group in self.cache_groups
        }
        of_cache = [by_group[group] for group in groups_of_layers(self.cache_groups)]
        x = self.embed(params, token_ids)
        inputs = self._token_inputs(params, token_ids, x)
        chosen = self._chosen_columns(lora_slots, rows, len(token_ids), queries_per_row)
        tokens_of = self._moe_tokens(params, token_ids, rows, queries_per_row, counter)

        def layer(i: int, stream: Residual, cache: int) -> Residual:
            stream, caches[cache], counts = paged_layer(
                with_cache_scales(params["layers"], i, self.spec.layers[i]),
                stream,
                caches[cache],
                of_cache[cache],
                kept if ends_early and i == last else None,
                None if inputs is None else inputs[:, i],
                None if chosen is None else (params["lora"]["layers"].get(i, {}), chosen),
                tokens_of(i),
                spec=self.spec.layers[i],
                settings=settings,
            )
            if counter is not None:
                counter.add(counts)
            return stream

        stack = [partial(layer, i, cache=cache) for i, cache in enumerate(cache_indices(self.spec))]
        stream, aux = trunk(stack, x, aux_layer_ids=self.aux_layer_ids)
        eps = self.spec.rms_norm_eps
        _, hidden = norm_of_sum(params["norm"], stream, eps=eps, ops=self.ops)
        hidden = hidden if ends_early else take_kept(hidden, kept)
        return hidden, aux, tuple(caches)

    def embed(self, params: Params, token_ids: Int[Array, "*b"]) -> Float[Array, "*b E"]:
        x, scale = embed(params["embed"], token_ids), self.spec.embed_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _token_inputs(
        self, params: Params, token_ids: Int[Array, "T"], x: Float[Array, "T E"]
    ) -> Float[Array, "T L P"] | None:
        if "tokens" not in params:
            return None
        how: Any = {"num_layers": self.spec.num_layers, "eps": self.spec.rms_norm_eps}
        return token_inputs(params["tokens"], token_ids, x, **how, ops=self.ops)

    def _moe_tokens(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        rows: AttentionMetadata,
        queries_per_row: int | None,
        counter: ExpertCounter | None,
    ) -> Callable[[int], MoETokens | None]:
        """Return, by layer, the facts about the tokens that its MoE needs, if any."""
        copies = params.get(COPIES, {})
        if counter is None and not copies:
            return lambda _: None
        is_real = None
        if counter is not None:
            is_real = real_tokens(rows, len(token_ids), queries_per_row)
        # Rows at the same position differ in their ids, so the copies share the rows' tokens.
        tokens = MoETokens(is_real=is_real, keys=rows.q_positions + token_ids)
        return lambda i: replace(tokens, copies=copies.get(i))

    def _chosen_columns(
        self,
        lora_slots: Int[Array, "B"] | None,
        rows: AttentionMetadata,
        num_tokens: int,
        queries_per_row: int | None,
    ) -> jax.Array | None:
        if lora_slots is None or self.lora is None:
            return None
        index = index_queries(rows.cu_q_lens, num_tokens, queries_per_row=queries_per_row)
        return chosen_columns(jnp.take(lora_slots, index.row_idx, mode="clip"), self.lora)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        logits, cap = logits_of(hidden, params["lm_head"]["kernel"]), self.spec.logit_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        if self.vocab_size % self.shard.size:  # columns of no token
            logits = jnp.where(self.token_ids() < self.vocab_size, logits, -jnp.inf)
        return logits

    def token_ids(self) -> Int[Array, "V"]:
        return shard_ids(self.spec.vocab_size, self.shard)


def real_tokens(
    rows: AttentionMetadata, num_tokens: int, queries_per_row: int | None
) -> Bool[Array, "T"]:
    """Return a mask of the tokens that are not padding. Slot 0 in rows.slots is padding."""
    index = index_queries(rows.cu_q_lens, num_tokens, queries_per_row=queries_per_row)
    assert rows.slots is not None
    is_row = jnp.take(rows.slots, index.row_idx, mode="clip") > 0
    return index.valid & is_row


def trunk(
    layers: Sequence[Callable[[Residual], Residual]],
    x: Float[Array, "*b E"],
    *,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Residual, Float[Array, "*b A"]]:
    """Run the layers; also return the residual stream at the INPUT of each aux layer, concatenated
    low to high: [*b, len(aux_layer_ids) * E]. The number of layers as an id: after the last one."""
    stream, captured = Residual(x=x), []
    for i, layer in enumerate(layers):
        if i in aux_layer_ids:
            stream = replace(stream, x=stream.sum(), delta=None)
            captured.append(stream.x)
        stream = layer(stream)
    if len(layers) in aux_layer_ids:
        stream = replace(stream, x=stream.sum(), delta=None)
        captured.append(stream.x)
    aux = jnp.concatenate(captured, axis=-1) if captured else x[..., :0]
    return stream, aux


def shard_ids(size: int, shard: Shard) -> Int[Array, "V"]:
    """Return the ids of this device's columns when `size` ids are sharded evenly and in order. Ids
    from `size` on, in the last columns, are no tokens."""
    local = padded(size, shard.size) // shard.size
    first = 0 if shard.axis is None else jax.lax.axis_index(shard.axis) * local
    return first + jnp.arange(local, dtype=jnp.int32)
