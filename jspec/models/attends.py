"""The `attend` of each kind of attention: what a layer reads from and writes to its cache."""

from __future__ import annotations

from typing import Any

import jax

from jspec.models.layer import LayerSettings, Params
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.fp8_product.api import Scaled
from jspec.pallas_kernels.kv_write.api import KVScales, Rotation
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.pallas_kernels.latent_attention.xla import Index
from jspec.spec.layers.attention import AttentionSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.model_spec import Mixer


def kv_scales_of(params: Params) -> KVScales | None:
    """Return the scales of the cached K and V, or None. A latent has one scale for both."""
    if "k_scale" not in params:
        return None
    k: jax.Array = params["k_scale"]
    return KVScales(k=k, v=params.get("v_scale", k))


class PagedAttend:
    """An `attend` for one layer. Call it once, while tracing; `cache` is then the updated one."""

    def __init__(
        self,
        pages: jax.Array,
        rows: AttentionMetadata,
        spec: AttentionSpec,
        settings: LayerSettings,
        scales: KVScales | None = None,
    ) -> None:
        self.cache = pages
        self._rows, self._scales = rows, scales
        self._ops = settings.ops
        self._reads_another = spec.kv_of is not None
        self._call = AttentionCall(
            queries_per_row=settings.queries_per_row, scale=spec.softmax_scale, window=spec.window
        )

    def __call__(
        self, heads: jax.Array, rotation: Rotation, sinks: jax.Array | None
    ) -> jax.Array | Scaled:
        if self._reads_another:  # the cache has this call's tokens
            q = rotate(heads, rotation.cos, rotation.sin)
            read, _ = self._ops.attend(
                q, None, None, self.cache, self._rows, self._call, sinks, self._scales
            )
            return read[..., : heads.shape[-1]]
        out, self.cache = self._ops.rotate_write_and_attend(
            heads, rotation, self.cache, self._rows, self._call, sinks, self._scales
        )
        return out


class LatentAttend:
    def __init__(
        self,
        pages: jax.Array,
        rows: AttentionMetadata,
        spec: LatentAttentionSpec,
        settings: LayerSettings,
        scales: KVScales | None = None,
    ) -> None:
        self.cache: Any = pages
        self._rows, self._scales = rows, scales
        self._ops, self._rank = settings.ops, spec.kv_rank
        self._call = AttentionCall(
            queries_per_row=settings.queries_per_row, scale=spec.softmax_scale
        )

    def __call__(self, queries: jax.Array, records: jax.Array) -> jax.Array:
        given = (queries, records, self.cache, self._rows, self._call, self._scales)
        out, self.cache = self._ops.attend_latent(*given, rank=self._rank)
        return out


class SparseAttend(LatentAttend):
    """An `attend` to selected tokens; `selected` is of the last indexer, after the call."""

    def __init__(
        self,
        cache: Any,
        rows: AttentionMetadata,
        spec: LatentAttentionSpec,
        settings: LayerSettings,
        scales: KVScales | None,
        selected: jax.Array | None,
    ) -> None:
        super().__init__(cache, rows, spec, settings, scales)
        self.selected = selected
        self._indexer = spec.indexer

    def __call__(
        self, queries: jax.Array, records: jax.Array, index: Index | None = None
    ) -> jax.Array:
        pages, call = self.cache, (self._rows, self._call)
        if self._indexer is not None:
            assert index is not None
            top_k, keys, pages = self._indexer.top_k, self.cache["index"], self.cache["latent"]
            self.selected, keys = self._ops.select_latents(index, keys, *call, top_k=top_k)
        given = (queries, records, self.selected, pages, *call, self._scales)
        out, pages = self._ops.attend_selected(*given, rank=self._rank)
        self.cache = pages if self._indexer is None else {"latent": pages, "index": keys}
        return out


class DeltaAttend:
    def __init__(
        self, cache: dict[str, jax.Array], rows: AttentionMetadata, settings: LayerSettings
    ) -> None:
        self.cache = cache
        self._rows = rows
        self._settings = settings

    def __call__(
        self, inputs: jax.Array, decay: jax.Array, beta: jax.Array, conv: jax.Array
    ) -> jax.Array:
        out, self.cache = self._settings.ops.delta_rule(
            inputs,
            decay,
            beta,
            conv,
            self.cache,
            self._rows,
            queries_per_row=self._settings.queries_per_row,
        )
        return out


def attend_of(
    params: Params,
    cache: Any,
    rows: AttentionMetadata,
    spec: Mixer,
    settings: LayerSettings,
    selected: jax.Array | None = None,
) -> PagedAttend | LatentAttend | DeltaAttend:
    """Return a layer's `attend`. selected: by the last layer with an indexer (`Residual`)."""
    if isinstance(spec, DeltaNetSpec):
        return DeltaAttend(cache, rows, settings)
    if isinstance(spec, LatentAttentionSpec):
        scales = kv_scales_of(params)
        if spec.is_sparse:
            return SparseAttend(cache, rows, spec, settings, scales, selected)
        return LatentAttend(cache, rows, spec, settings, scales)
    return PagedAttend(cache, rows, spec, settings, kv_scales_of(params))
