"""Running a stack over a paged KV pool: each layer writes its rows and attends, in one inner jit.

The objects here are static (frozen, hashable): definitions and settings. Arrays always come as
arguments, as the plain dicts of `models.llama.split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import Eagle3Config, TransformerConfig
from jspec.layers.attention import Rotation, kv_heads_per_shard, rotate_and_split
from jspec.layers.linear import Shard, logits_of
from jspec.layers.mlp import GatedProduct
from jspec.layers.norm import AddAndNorm, Residual
from jspec.models.eagle3 import Eagle3
from jspec.models.llama import Llama, Params, bind, split, trunk
from jspec.pallas_kernels import add_norm_gpu, fused_attention_gpu, gated_matmul_gpu
from jspec.pallas_kernels.paged_attention import (
    Backend,
    is_gpu_kernel,
    paged_attention,
    pool_width,
)
from jspec.pallas_kernels.rows import AttentionRows

KVPool = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Static half of a paged attention call. queries_per_row: None for the chunks of prompts."""

    backend: Backend
    queries_per_row: int | None

    @property
    def has_gpu_kernels(self) -> bool:
        return is_gpu_kernel(self.backend)

    @property
    def add_and_norm(self) -> AddAndNorm | None:
        """One kernel for the residual add and the norm behind it, where the backend has one."""
        if not self.has_gpu_kernels:
            return None
        return partial(add_norm_gpu.add_and_norm, interpret=self.backend == "gpu_interpret")

    def gated_product(
        self, num_tokens: int, layer: Params, *, by_columns: bool
    ) -> GatedProduct | None:
        """One kernel for an MLP's first product and its gate, where the backend has a faster one
        for so many tokens. Interpreted it takes minutes at the sizes that it serves: XLA's there.

        by_columns: how the weights lie (sharding.param_places).
        """
        weights = layer["mlp"]["gate_up"]["kernel"]
        size, width = weights.shape
        if self.backend != "gpu":
            return None
        tuning = gated_matmul_gpu.choose_gated(
            num_tokens,
            size,
            width,
            dtype=weights.dtype,
            by_columns=by_columns,
            of_prompts=self.queries_per_row is None,
        )
        return None if tuning is None else partial(gated_matmul_gpu.gated_product, tuning=tuning)


class PagedAttend:
    """An `attend` for one layer: holds the pool after its single call (while tracing)."""

    def __init__(self, pages: jax.Array, rows: AttentionRows, settings: AttentionSettings) -> None:
        self.pages = pages
        self._rows = rows
        self._settings = settings

    def __call__(self, heads: jax.Array, rotation: Rotation) -> jax.Array:
        settings, rows = self._settings, self._rows
        if settings.has_gpu_kernels and fused_attention_gpu.serves(
            heads, self.pages, queries_per_row=settings.queries_per_row
        ):
            out, self.pages = fused_attention_gpu.rotate_write_and_attend(
                heads,
                rotation.cos,
                rotation.sin,
                self.pages,
                rows,
                num_heads=rotation.num_heads,
                queries_per_row=settings.queries_per_row,
                interpret=settings.backend == "gpu_interpret",
            )
            return out
        q, k, v = rotate_and_split(heads, rotation)
        out, self.pages = paged_attention(
            q,
            k,
            v,
            self.pages,
            rows.page_table,
            rows.prefix_lens,
            rows.cu_q_lens,
            rows.tail_mask,
            rows.q_positions,
            rows.tail_positions,
            scale=heads.shape[-1] ** -0.5,
            queries_per_row=settings.queries_per_row,
            backend=settings.backend,
        )
        return out[..., : heads.shape[-1]]  # a pool may be wider than a head


@partial(jax.jit, static_argnames=("definition", "settings", "by_columns"), inline=False)
def _llama_layer(
    params: Params,
    stream: Residual,
    pages: jax.Array,
    rows: AttentionRows,
    *,
    definition: nnx.GraphDef[Any],
    settings: AttentionSettings,
    by_columns: bool,
) -> tuple[Residual, jax.Array]:
    attend, add_and_norm = PagedAttend(pages, rows, settings), settings.add_and_norm
    gated_product = settings.gated_product(stream.x.shape[0], params, by_columns=by_columns)
    layer = bind(definition, params)
    stream = layer(stream, rows.q_positions, attend, add_and_norm, gated_product)
    if add_and_norm is None:  # nothing to gain by waiting; and XLA rounds what leaves an inner jit
        stream = Residual(x=stream.sum())
    return stream, attend.pages


@dataclass(frozen=True, slots=True)
class PagedLlama:
    """A Llama target over its pool. `aux_layer_ids` selects what a draft head will be fed.

    by_columns: its weights are placed so (sharding.param_places).
    """

    config: TransformerConfig
    shard: Shard
    aux_layer_ids: tuple[int, ...]
    definition: nnx.GraphDef[Any]
    layer_definition: nnx.GraphDef[Any]
    by_columns: bool = False

    @classmethod
    def create(
        cls,
        config: TransformerConfig,
        *,
        shard: Shard,
        dtype: DTypeLike,
        aux_layer_ids: tuple[int, ...] = (),
        by_columns: bool = False,
    ) -> tuple[PagedLlama, Params]:
        """The static model and its abstract params (shapes and dtypes)."""
        module = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0), shard=shard))
        definition, abstract = split(module)
        layer_definition, _ = split(module.layers[0])
        made = cls(config, shard, aux_layer_ids, definition, layer_definition, by_columns)
        return made, abstract

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        kv: KVPool,
        rows: AttentionRows,
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "T E"], Float[Array, "T A"], KVPool]:
        """(last hidden after the final norm, aux features, pool with the T new rows)."""
        pages = list(kv)

        def layer(i: int, stream: Residual) -> Residual:
            stream, pages[i] = _llama_layer(
                params["layers"][i],
                stream,
                pages[i],
                rows,
                definition=self.layer_definition,
                settings=settings,
                by_columns=self.by_columns,
            )
            return stream

        model = bind(self.definition, params)
        stack = [partial(layer, i) for i in range(self.config.num_layers)]
        stream, aux = trunk(stack, model.embed(token_ids), aux_layer_ids=self.aux_layer_ids)
        _, hidden = model.norm.of_sum(stream, settings.add_and_norm)
        return hidden, aux, tuple(pages)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """f32 logits over this device's vocabulary shard."""
        return logits_of(hidden, params["lm_head"]["kernel"])

    def token_ids(self) -> Int[Array, "V"]:
        """Target id of each column of this device's vocabulary shard."""
        return shard_ids(self.config.vocab_size, self.shard)


@partial(jax.jit, static_argnames=("definition", "settings", "by_columns"), inline=False)
def _eagle3_layer(
    params: Params,
    embedded: jax.Array,
    hidden: jax.Array,
    pages: jax.Array,
    rows: AttentionRows,
    *,
    definition: nnx.GraphDef[Any],
    settings: AttentionSettings,
    by_columns: bool,
) -> tuple[jax.Array, jax.Array]:
    attend = PagedAttend(pages, rows, settings)
    layer = bind(definition, params)
    gated_product = settings.gated_product(hidden.shape[0], params, by_columns=by_columns)
    y = layer(embedded, hidden, rows.q_positions, attend, settings.add_and_norm, gated_product)
    return y, attend.pages


@dataclass(frozen=True, slots=True)
class PagedEagle3:
    """An EAGLE-3 head over its own pool (one layer). by_columns: as PagedLlama's."""

    config: Eagle3Config
    shard: Shard
    definition: nnx.GraphDef[Any]
    layer_definition: nnx.GraphDef[Any]
    by_columns: bool = False

    @classmethod
    def create(
        cls, config: Eagle3Config, *, shard: Shard, dtype: DTypeLike, by_columns: bool = False
    ) -> tuple[PagedEagle3, Params]:
        module = nnx.eval_shape(lambda: Eagle3(config, dtype=dtype, rngs=nnx.Rngs(0), shard=shard))
        definition, abstract = split(module)
        layer_definition, _ = split(module.layer)
        return cls(config, shard, definition, layer_definition, by_columns), abstract

    def features(self, params: Params, aux_hidden: Float[Array, "*b A"]) -> Float[Array, "*b E"]:
        """The target's aux features, fused; applied once, before an extend."""
        return bind(self.definition, params).features(aux_hidden)

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        kv: KVPool,
        rows: AttentionRows,
        settings: AttentionSettings,
    ) -> tuple[Float[Array, "T E"], KVPool]:
        """(output before the final norm, which is what is fed back, pool with the new rows)."""
        model = bind(self.definition, params)
        out, pages = _eagle3_layer(
            params["layer"],
            model.embed(token_ids),
            hidden,
            kv[0],
            rows,
            definition=self.layer_definition,
            settings=settings,
            by_columns=self.by_columns,
        )
        return out, (pages,)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b U"]:
        """f32 logits over this device's shard of the draft vocabulary."""
        normed = bind(self.definition, params).norm(hidden)
        return logits_of(normed, params["lm_head"]["kernel"])


def shard_ids(size: int, shard: Shard) -> Int[Array, "V"]:
    """The ids of this device's columns when `size` ids are split evenly and in order."""
    local = size // shard.size
    first = 0 if shard.axis is None else jax.lax.axis_index(shard.axis) * local
    return first + jnp.arange(local, dtype=jnp.int32)


def empty_pool(
    config: TransformerConfig,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    shards: int,
    dtype: DTypeLike,
    backend: Backend = "xla",
) -> KVPool:
    """One zeroed array a layer, [num_pages, page_size, 2G, D] with the heads of all shards.

    `num_pages` includes the dummy page 0.
    """
    heads = kv_heads_per_shard(config.num_kv_heads, Shard(shards)) * shards
    shape = (num_pages, page_size, 2 * heads, pool_width(config.head_dim, backend))
    return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
