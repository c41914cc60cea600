"""The kernels of a platform, selected once when an engine is built.

`Ops` is plain XLA; TpuOps and GpuOps override the methods for which they have a kernel. To add a
fusion, add a method with its XLA implementation here. Equal bundles share compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.device.fp8 import FP8Weight
from jspec.device.int8 import INT8Weight
from jspec.device.weights import Weight
from jspec.pallas_kernels.add_norm import reference as add_norm
from jspec.pallas_kernels.attention import reference, xla
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata, check_call
from jspec.pallas_kernels.bonus_token import reference as bonus_token
from jspec.pallas_kernels.compaction import reference as compaction
from jspec.pallas_kernels.delta_rule import reference as delta_rule
from jspec.pallas_kernels.experts import reference as experts
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.fp8_product import reference as fp8_product
from jspec.pallas_kernels.fp8_product.api import Activations, Scaled, values_of
from jspec.pallas_kernels.gated_mlp.reference import gated
from jspec.pallas_kernels.int8_product.reference import int8_product
from jspec.pallas_kernels.kv_write.api import KVScales, Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split, scaled_outputs, scaled_queries
from jspec.pallas_kernels.latent_attention import reference as latent_attention
from jspec.pallas_kernels.latent_attention import xla as sparse
from jspec.pallas_kernels.latent_attention.xla import Index
from jspec.pallas_kernels.sample import reference as sample
from jspec.spec.axes import MeshAxis
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.feed_forward import Gate, MoESpec


@dataclass(frozen=True, slots=True)
class Ops:
    """The XLA implementation of every operation."""

    name: ClassVar[str] = "xla"
    default_page_size: ClassVar[int] = 16  # tokens
    lanes: ClassVar[int] = 1  # the width of cached records is a multiple of this
    # Layers leave their last residual add to the next norm (`add_norm`).
    defers_sums: ClassVar[bool] = False
    # Devices add rows by writing into each other's memory (`peer_sum`).
    writes_peers: ClassVar[bool] = False
    # The prefill kernel reads each query's own row only, so long prefill steps are efficient.
    prefers_long_chunks: ClassVar[bool] = False
    # Least bytes of one layer's K and V per decode step that reading shared prefixes once (cascade
    # attention) must save, for at least sharing_least_rows rows. None: no kernel.
    sharing_pays_from: ClassVar[int | None] = None
    sharing_least_rows: ClassVar[int] = 1

    @property
    def column_major(self) -> bool:
        """True if weights of `Order.BACKENDS` are stored column-major, as [out, in]."""
        return False

    def on(self, device_kind: str) -> Ops:
        """Return this bundle for devices of a jax device kind."""
        del device_kind
        return self

    def page_size_on(self, device_kind: str) -> int:
        """Return the tokens of a page, unless a flag says otherwise, on a jax device kind."""
        del device_kind
        return self.default_page_size

    def with_columns(self, columns: bool) -> Ops:
        """Return this bundle for column-major weights, or not, if its kernels can read them."""
        del columns
        return self

    def rows_a_pack(self, *, queries_per_row: int, group: int) -> int:
        """Return the rows that share one read of a prefix. group: query heads per kv head."""
        del queries_per_row, group
        return 1

    def xla_for_fp8(self) -> tuple[str, ...]:
        """Return the operations that use XLA because their kernel reads no FP8 cache."""
        return ()

    def compiler_options(
        self, *, decode_tokens: int | None, fp8_prompt_tokens: int = 0
    ) -> dict[str, Any]:
        """Return XLA options. decode_tokens: of a decode step, None for a prefill.
        fp8_prompt_tokens: tokens of a prefill with fp8 weights."""
        del decode_tokens, fp8_prompt_tokens
        return {}

    def sums_halves(self, kernel: Weight, shards: int) -> bool:
        """Return whether a row-parallel product is summed over shards in two halves of columns."""
        del kernel, shards
        return False

    def write_kv(
        self,
        k_new: Float[Array, "T G Dk"],
        v_new: Float[Array, "T G Dv"],
        kv_pages: Float[Array, "NP S G2 D"],
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        scales: KVScales | None = None,
    ) -> Float[Array, "NP S G2 D"]:
        """Write K and V as `attend` does, for tokens that attend to nothing."""
        return reference.write_new(
            k_new, v_new, kv_pages, rows, queries_per_row=queries_per_row, scales=scales
        )

    def attend(
        self,
        q: Float[Array, "T H Dq"],
        k_new: Float[Array, "T G Dk"] | None,
        v_new: Float[Array, "T G Dv"] | None,
        kv_pages: Float[Array, "NP S G2 D"],
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: Float[Array, "H"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T H D"], Float[Array, "NP S G2 D"]]:
        """Write k_new and v_new, then attend, as attention/api.py specifies."""
        check_call(q, kv_pages, rows, call)
        if k_new is not None and v_new is not None:
            how: Any = {"queries_per_row": call.queries_per_row, "scales": scales}
            kv_pages = self.write_kv(k_new, v_new, kv_pages, rows, **how)
        return self.attend_written(q, kv_pages, rows, call, sinks, scales), kv_pages

    def attend_written(
        self,
        q: Float[Array, "T H Dq"],
        pages: Float[Array, "NP S *G2 D"],
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: Float[Array, "H"] | None = None,
        scales: KVScales | None = None,
    ) -> Float[Array, "T H D"]:
        """Attend to a KV or a latent pool that has this call's tokens."""
        how: Any = {"sinks": sinks, "queries_per_row": call.queries_per_row, **call.settings}
        out = xla.attend(scaled_queries(q, scales), pages, rows, **how)
        return scaled_outputs(out, scales, q.dtype)

    def attend_latent(
        self,
        q: Float[Array, "T H Dq"],
        records: Float[Array, "T Dq"],
        pages: Float[Array, "NP S D"],
        rows: AttentionMetadata,
        call: AttentionCall,
        scales: KVScales | None = None,
        *,
        rank: int,
    ) -> tuple[Float[Array, "T H Dv"], Float[Array, "NP S D"]]:
        """Write the records, then attend. rank: the width that is needed; a result may be wider."""
        del rank
        check_call(q, pages, rows, call)
        pages = latent_attention.write_new(records, pages, rows, call, scales)
        out = self.attend_written(q, pages, rows, call, scales=scales)
        return out[..., : q.shape[-1]], pages

    def select_latents(
        self,
        index: Index,
        keys: Float[Array, "NP S D"],
        rows: AttentionMetadata,
        call: AttentionCall,
        *,
        top_k: int,
    ) -> tuple[Int[Array, "T K"] | None, Float[Array, "NP S D"]]:
        """Write the index keys, then select slots, as latent_attention/xla.py specifies."""
        keys = latent_attention.write_new(index.keys, keys, rows, call)
        per_row = call.queries_per_row
        return sparse.select(index, keys, rows, queries_per_row=per_row, top_k=top_k), keys

    def attend_selected(
        self,
        q: Float[Array, "T H Dq"],
        records: Float[Array, "T Dq"],
        selected: Int[Array, "T K"] | None,
        pages: Float[Array, "NP S D"],
        rows: AttentionMetadata,
        call: AttentionCall,
        scales: KVScales | None = None,
        *,
        rank: int,
    ) -> tuple[Float[Array, "T H Dv"], Float[Array, "NP S D"]]:
        """Apply `attend_latent` to what `select_latents` selected."""
        if selected is None:
            return self.attend_latent(q, records, pages, rows, call, scales, rank=rank)
        check_call(q, pages, rows, call)
        pages = latent_attention.write_new(records, pages, rows, call, scales)
        how: Any = {"queries_per_row": call.queries_per_row, "scale": call.scale}

        def attend_to_all() -> jax.Array:
            return Ops.attend_written(self, q, pages, rows, call, scales=scales)

        def attend_to_some() -> jax.Array:
            out = sparse.attend(scaled_queries(q, scales), selected, pages, rows, **how)
            return scaled_outputs(out, scales, q.dtype)

        is_all = sparse.all_selected(rows, top_k=selected.shape[1])
        out = jax.lax.cond(is_all, attend_to_all, attend_to_some)
        return out[..., : q.shape[-1]], pages

    def latent_inputs(
        self,
        params: dict[str, Any],
        x: Float[Array, "T I"],
        cos: Float[Array, "T half"],
        sin: Float[Array, "T half"],
        *,
        spec: LatentAttentionSpec,
    ) -> tuple[Float[Array, "T H Dq"], Float[Array, "T Dq"]] | None:
        """Return (absorbed queries, records) for `attend_latent`; None without a kernel."""
        del params, x, cos, sin, spec
        return None

    def latent_outputs(
        self, params: dict[str, Any], mixed: Float[Array, "T H rank"], *, spec: LatentAttentionSpec
    ) -> Float[Array, "T HV"] | None:
        """Return the heads' values from their means of latents; None without a kernel."""
        del params, mixed, spec
        return None

    def delta_rule(
        self,
        inputs: Float[Array, "T C"],
        decay: Float[Array, "T Hv"],
        beta: Float[Array, "T Hv"],
        conv: Float[Array, "W C"],
        cache: dict[str, jax.Array],
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
    ) -> tuple[Float[Array, "T Hv Dv"], dict[str, jax.Array]]:
        """Fold what the last step accepted, then run the tokens (delta_rule/reference.py)."""
        given = (inputs, decay, beta, conv, cache, rows)
        if queries_per_row is None:
            return delta_rule.run_chunks(*given)
        return delta_rule.run_rows(*given, nodes=queries_per_row)

    def rotate_write_and_attend(
        self,
        heads: Float[Array, "T heads D"],
        rotation: Rotation,
        kv_pages: Float[Array, "NP S G2 Dp"],
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: Float[Array, "H"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T H D"] | Scaled, Float[Array, "NP S G2 Dp"]]:
        """Run a layer's attention from heads (q, k, v), before norms and RoPE, to its output."""
        q, k, v = rotate_and_split(heads, rotation)
        out, kv_pages = self.attend(q, k, v, kv_pages, rows, call, sinks, scales)
        return out[..., : heads.shape[-1]], kv_pages  # a pool may be wider than a head

    def add_norm(
        self,
        x: Float[Array, "*b E"],
        delta: Float[Array, "*b E"],
        scale: Float[Array, "E"],
        *,
        eps: float,
    ) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"]]:
        """Return (x + delta, RMSNorm of that sum times scale)."""
        return add_norm.add_norm(x, delta, scale, eps=eps)

    def add_norm_for(
        self,
        reader: Weight | None,
        x: Float[Array, "*b E"],
        delta: Float[Array, "*b E"],
        scale: Float[Array, "E"],
        *,
        eps: float,
    ) -> tuple[Float[Array, "*b E"], Activations]:
        """Apply `add_norm`, in the form that the product with the weight `reader` takes."""
        del reader
        return self.add_norm(x, delta, scale, eps=eps)

    def gated_product(
        self, x: Activations, kernel: Weight, *, of_prompts: bool
    ) -> Float[Array, "*b I"]:
        """Return silu(x @ gate) * (x @ up); `kernel` has gate and up columns in its two halves."""
        del of_prompts
        return gated(*jnp.split(self.product(x, kernel), 2, axis=-1))

    def product(
        self, x: Activations, kernel: Weight, *, axis: MeshAxis | None = None
    ) -> Float[Array, "*b N"]:
        """Return x @ kernel in x's dtype; W8A8 weights quantize activations per token.

        axis: the mesh axes over which the inputs are sharded; the result is a shard's summand.
        """
        if isinstance(kernel, FP8Weight):
            return self.fp8_product(x, kernel)
        x = values_of(x)
        if isinstance(kernel, INT8Weight):
            return int8_product(x, kernel, out_dtype=x.dtype, axis=axis)
        return x @ kernel

    def fp8_product(self, x: Activations, weight: FP8Weight) -> Float[Array, "*b N"]:
        """Return x @ weight in x's dtype, with activations quantized per token."""
        x = values_of(x)
        return fp8_product.fp8_product(x, weight, out_dtype=x.dtype)

    def experts(
        self,
        x: Float[Array, "T E"],
        ids: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        params: dict[str, Any],
        *,
        gate: Gate,
        shards: int = 1,
    ) -> Float[Array, "T E"]:
        """Return the weighted sum of each token's experts (experts/reference.run_experts)."""
        return experts.run_experts(x, ids, weights, params, gate=gate, shards=shards)

    def moe_of_sum(
        self,
        x: Float[Array, "*b E"],
        delta: Float[Array, "*b E"],
        scale: Float[Array, "E"],
        params: dict[str, dict[str, Any]],
        *,
        eps: float,
        spec: MoESpec,
    ) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"], Mixed] | None:
        """Return (x + delta, that sum's norm, the MoE output for it); None without a kernel."""
        del x, delta, scale, params, eps, spec
        return None

    def mixed_norm(
        self, x: Float[Array, "T E"], mixed: Mixed, scale: Float[Array, "E"], *, eps: float
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
        return self.add_norm(x, mixed.sum(), scale, eps=eps)

    def commit(
        self,
        kv: tuple[jax.Array, ...],
        page_table: Int[Array, "B P"],
        seq_lens: Int[Array, "B"],
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> tuple[jax.Array, ...]:
        """Apply `compaction.compact_path` to every layer's pool, in place for donated pools."""
        return tuple(
            compaction.compact_path(pages, page_table, seq_lens, node_path, num_accepted)
            for pages in kv
        )

    def commit_latent(
        self,
        pools: tuple[jax.Array, ...],
        page_table: Int[Array, "B P"],
        seq_lens: Int[Array, "B"],
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> tuple[jax.Array, ...]:
        return Ops.commit(self, pools, page_table, seq_lens, node_path, num_accepted)

    def commit_state(
        self,
        cache: dict[str, jax.Array],
        slots: Int[Array, "B"] | None,
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> dict[str, jax.Array]:
        """Record the path in the cache of a recurrent layer; the next step folds it."""
        return delta_rule.record_path(cache, slots, node_path, num_accepted)

    def save_state(
        self,
        snapshots: dict[str, jax.Array],
        cache: dict[str, jax.Array],
        *,
        slots: Int[Array, "B"],
        entries: Int[Array, "B"],
    ) -> dict[str, jax.Array]:
        return delta_rule.save_snapshots(snapshots, cache, slots=slots, entries=entries)

    def load_state(
        self,
        cache: dict[str, jax.Array],
        snapshots: dict[str, jax.Array],
        *,
        slots: Int[Array, "B"],
        entries: Int[Array, "B"],
    ) -> dict[str, jax.Array]:
        return delta_rule.load_snapshots(cache, snapshots, slots=slots, entries=entries)

    def gather_emitted(
        self,
        target_ids: Int[Array, "B N"],
        hidden: Float[Array, "B N A"],
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> tuple[Int[Array, "B M"], Int[Array, "B"], Float[Array, "B M A"]]:
        """Return (emitted ids, bonus token, hidden states of the path), 0 after each path."""
        return bonus_token.gather_emitted(target_ids, hidden, node_path, num_accepted)

    def sample(
        self,
        logits: Float[Array, "B N V"],
        *,
        temperature: Float[Array, "B"],
        seed: UInt32[Array, "B 2"],
        positions: Int[Array, "B N"],
        token_ids: Int[Array, "V"],
        threshold: Float[Array, "B N"] | None,
        is_split: bool,
    ) -> tuple[Float[Array, "B N"], Int[Array, "B N"]]:
        """Return (value, id) of each node's largest logit + T * noise; the lowest id wins ties.
        threshold: the least logit to choose. is_split: token_ids is a vocabulary shard's range."""
        values, ids = sample.sample(
            logits.reshape(-1, logits.shape[-1]),
            temperature,
            seed,
            positions.reshape(-1),
            None if threshold is None else threshold.reshape(-1),
            first_id=token_ids[0] if is_split else 0,
        )
        return values.reshape(positions.shape), ids.reshape(positions.shape)

    def rank(
        self,
        logits: Float[Array, "B R U"],
        *,
        topk: int,
        temperature: Float[Array, "B"],
        seed: UInt32[Array, "B 2"],
        positions: Int[Array, "B R"],
        token_ids: Int[Array, "U"],
        lowest: float,  # the value of NaN and lower scores; -lowest bounds scores above
    ) -> tuple[Float[Array, "B R K"], Int[Array, "B R K"], Float[Array, "B R"]]:
        """Return (the K largest of logit + T * noise, best first; their columns; the sum of
        exp(score - largest)). Equal scores are in the order of their columns. K: topk, at most U.
        """
        values, columns, mass = sample.rank(
            logits.reshape(-1, logits.shape[-1]),
            temperature,
            seed,
            positions.reshape(-1),
            token_ids,
            topk=topk,
            lowest=lowest,
        )
        shape = (*positions.shape, -1)
        return values.reshape(shape), columns.reshape(shape), mass.reshape(positions.shape)


@dataclass(frozen=True, slots=True)
class ReferenceOps(Ops):
    """`Ops` with attention by its definition, for tests."""

    name: ClassVar[str] = "reference"

    def attend_written(
        self,
        q: jax.Array,
        pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: jax.Array | None = None,
        scales: KVScales | None = None,
    ) -> jax.Array:
        how: Any = {"sinks": sinks, "queries_per_row": call.queries_per_row, **call.settings}
        out = reference.attend(scaled_queries(q, scales), pages, rows, **how)
        return scaled_outputs(out, scales, q.dtype)
