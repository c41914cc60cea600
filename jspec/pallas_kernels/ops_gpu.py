"""The kernel bundle for Hopper GPUs (Mosaic GPU, Triton); interpreted on any platform in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.device.fp8 import FP8Weight
from jspec.device.int8 import INT8Weight
from jspec.device.weights import Weight
from jspec.pallas_kernels import hopper
from jspec.pallas_kernels.add_norm import gpu as add_norm_gpu
from jspec.pallas_kernels.attention import gpu as paged_attention_gpu
from jspec.pallas_kernels.attention import gpu_fused as fused_attention_gpu
from jspec.pallas_kernels.attention import gpu_one_row, gpu_shared, gpu_wide
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata, check_call
from jspec.pallas_kernels.compaction import gpu as compaction_gpu
from jspec.pallas_kernels.delta_rule import gpu as delta_rule_gpu
from jspec.pallas_kernels.delta_rule import gpu_chunks
from jspec.pallas_kernels.delta_rule import reference as delta_rule
from jspec.pallas_kernels.experts import gpu as experts_gpu
from jspec.pallas_kernels.experts import gpu_few, gpu_many, gpu_mixed_norm, gpu_mxfp4
from jspec.pallas_kernels.experts.api import KERNEL_GATES, Mixed
from jspec.pallas_kernels.experts.reference import PRODUCTS, unpacked
from jspec.pallas_kernels.experts.tuning import (
    MOST_FP8,
    MOST_RANKED,
    choose_experts,
    choose_few,
    choose_packed,
    for_fp8,
    sizes_of,
)
from jspec.pallas_kernels.fp8_product import gpu as fp8_product_gpu
from jspec.pallas_kernels.fp8_product.api import Activations, Scaled, values_of
from jspec.pallas_kernels.fp8_product.tuning import MOST_TOKENS
from jspec.pallas_kernels.gated_mlp import gpu as gated_matmul_gpu
from jspec.pallas_kernels.gated_mlp.gpu_few import choose_few_gated, few_gated_product
from jspec.pallas_kernels.kv_write.api import KVScales, Rotation
from jspec.pallas_kernels.kv_write.reference import scaled_outputs, scaled_queries
from jspec.pallas_kernels.latent_attention import gpu as latent_attention_gpu
from jspec.pallas_kernels.latent_attention import gpu_few as gpu_few_latents
from jspec.pallas_kernels.latent_attention import reference as latent_attention
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.prefill import gpu as paged_prefill_gpu
from jspec.pallas_kernels.sample import gpu as sample_gpu
from jspec.pallas_kernels.sample import gpu_rank
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.feed_forward import Gate, MoESpec

# Decode steps with these token counts disable Triton products: XLA's autotuner picks them where
# they are fast in isolation, but whole steps are 2 to 4% slower with them (Llama-3.1-8B, H200).
# Prefill programs in which XLA multiplies fp8 values disable them too: the autotuner of those
# products takes more than a minute for eight layers of 8,192 tokens.
WITHOUT_TRITON = range(48, 513)
NARROW = (64, 128)  # head dims of the Mosaic kernels
WIDE = (256,)  # head dims of gpu_wide.py; prefill uses XLA


@dataclass(frozen=True, slots=True)
class GpuOps(Ops):
    interpret: bool = False
    # Store weights of `Order.BACKENDS` column-major: faster for the many tokens of a verification,
    # slower for few, so plain decoding does not set it.
    columns: bool = False

    name: ClassVar[str] = "gpu"
    default_page_size: ClassVar[int] = 64  # one TMA copy per page
    defers_sums: ClassVar[bool] = True
    writes_peers: ClassVar[bool] = True
    prefers_long_chunks: ClassVar[bool] = True
    sharing_pays_from: ClassVar[int | None] = 96 * 2**20
    sharing_least_rows: ClassVar[int] = 16

    @property
    def column_major(self) -> bool:
        return self.columns

    def with_columns(self, columns: bool) -> GpuOps:
        return replace(self, columns=columns)

    def rows_a_pack(self, *, queries_per_row: int, group: int) -> int:
        return gpu_shared.rows_a_pack(queries_per_row=queries_per_row, group=group)

    def compiler_options(
        self, *, decode_tokens: int | None, fp8_prompt_tokens: int = 0
    ) -> dict[str, Any]:
        is_slow = fp8_prompt_tokens > MOST_TOKENS or decode_tokens in WITHOUT_TRITON
        return {"xla_gpu_enable_triton_gemm": False} if is_slow else {}

    def attend(
        self,
        q: jax.Array,
        k_new: jax.Array | None,
        v_new: jax.Array | None,
        kv_pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: jax.Array | None = None,
        scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        check_call(q, kv_pages, rows, call)
        per_row = call.queries_per_row
        if per_row is not None and per_row > paged_attention_gpu.MAX_QUERIES:
            return Ops.attend(self, q, k_new, v_new, kv_pages, rows, call, sinks, scales)
        if k_new is not None and v_new is not None:
            how: Any = {"queries_per_row": per_row, "scales": scales}
            kv_pages = self.write_kv(k_new, v_new, kv_pages, rows, **how)
        if kv_pages.shape[3] not in NARROW:
            return self.attend_written(q, kv_pages, rows, call, sinks, scales), kv_pages
        given = (scaled_queries(q, scales), kv_pages, rows)
        settings = call.settings | {"sinks": sinks, "interpret": self.interpret}
        if per_row is None:
            out = paged_prefill_gpu.attend_packed(*given, **settings)
        else:
            out = fused_attention_gpu.attend_rows(*given, queries_per_row=per_row, **settings)
        return scaled_outputs(out, scales, q.dtype).astype(q.dtype), kv_pages

    def attend_written(
        self,
        q: jax.Array,
        pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: jax.Array | None = None,
        scales: KVScales | None = None,
    ) -> jax.Array:
        """Attend to a pool of wide heads, for which `attend` has no other kernel."""
        few = call.queries_per_row
        serves = gpu_wide.serves(q, pages, queries_per_row=few, window=call.window)
        if few is None or not serves or scales is not None:
            return Ops.attend_written(self, q, pages, rows, call, sinks, scales)
        how: Any = {"scale": call.scale, "interpret": self.interpret}
        return gpu_wide.attend_rows(q, pages, rows, queries_per_row=few, sinks=sinks, **how)

    def attend_latent(
        self,
        q: jax.Array,
        records: jax.Array,
        pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        scales: KVScales | None = None,
        *,
        rank: int,
    ) -> tuple[jax.Array, jax.Array]:
        few = call.queries_per_row
        serves = gpu_wide.serves(q, pages, queries_per_row=few, window=call.window)
        if few is None or not serves or scales is not None:
            return Ops.attend_latent(self, q, records, pages, rows, call, scales, rank=rank)
        check_call(q, pages, rows, call)
        pages = latent_attention.write_new(records, pages, rows, call)
        how: Any = {"queries_per_row": few, "scale": call.scale, "interpret": self.interpret}
        if latent_attention_gpu.serves(q, pages, queries_per_row=few, rank=rank):
            return latent_attention_gpu.attend_rows(q, pages, rows, rank=rank, **how), pages
        return gpu_wide.attend_rows(q, pages, rows, value_dim=rank, **how), pages

    def latent_inputs(
        self,
        params: dict[str, Any],
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        *,
        spec: LatentAttentionSpec,
    ) -> tuple[jax.Array, jax.Array] | None:
        if not gpu_few_latents.serves(params, x, spec):
            return None
        how: Any = {"spec": spec, "interpret": self.interpret}
        return gpu_few_latents.queries_and_records(params, x, cos, sin, **how)

    def latent_outputs(
        self, params: dict[str, Any], mixed: jax.Array, *, spec: LatentAttentionSpec
    ) -> jax.Array | None:
        if not gpu_few_latents.serves(params, mixed, spec):
            return None
        v_up = params["v_up"]["kernel"]
        return gpu_few_latents.values(mixed, v_up, interpret=self.interpret)

    def rotate_write_and_attend(
        self,
        heads: jax.Array,
        rotation: Rotation,
        kv_pages: jax.Array,
        rows: AttentionMetadata,
        call: AttentionCall,
        sinks: jax.Array | None = None,
        scales: KVScales | None = None,
    ) -> tuple[jax.Array | Scaled, jax.Array]:
        is_whole = 2 * rotation.cos.shape[-1] == heads.shape[-1] and heads.shape[-1] in NARROW
        settings = call.settings | {"sinks": sinks, "interpret": self.interpret}
        if is_whole and call.queries_per_row == 1:
            sizes = {"num_heads": rotation.num_heads}
            pays = gpu_one_row.pays(kv_pages, rows, **sizes)
            if pays and gpu_one_row.serves(heads, kv_pages, rows, **sizes):
                return gpu_one_row.rotate_write_and_attend(
                    heads, rotation, kv_pages, rows, **settings
                )
        serves = fused_attention_gpu.serves(
            heads, kv_pages, queries_per_row=call.queries_per_row, scales=scales
        )
        if not (is_whole and serves):
            return Ops.rotate_write_and_attend(
                self, heads, rotation, kv_pages, rows, call, sinks, scales
            )
        return fused_attention_gpu.rotate_write_and_attend(
            heads,
            rotation,
            kv_pages,
            rows,
            queries_per_row=call.queries_per_row,
            scales=scales,
            **settings,
        )

    def delta_rule(
        self,
        inputs: jax.Array,
        decay: jax.Array,
        beta: jax.Array,
        conv: jax.Array,
        cache: dict[str, jax.Array],
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        given = (inputs, decay, beta, conv, cache, rows)
        how: Any = {"interpret": self.interpret}
        if queries_per_row is None and gpu_chunks.serves(cache["state"]):
            return delta_rule.run_chunks(*given, run=partial(gpu_chunks.run_blocks, **how))
        if queries_per_row is None or not delta_rule_gpu.serves(queries_per_row=queries_per_row):
            return Ops.delta_rule(self, *given, queries_per_row=queries_per_row)
        return delta_rule_gpu.run_rows(*given, nodes=queries_per_row, **how)

    def add_norm(
        self, x: jax.Array, delta: jax.Array, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        return add_norm_gpu.add_and_norm(x, delta, scale, eps=eps, interpret=self.interpret)

    def add_norm_for(
        self,
        reader: Weight | None,
        x: jax.Array,
        delta: jax.Array,
        scale: jax.Array,
        *,
        eps: float,
    ) -> tuple[jax.Array, Activations]:
        if (
            isinstance(reader, FP8Weight)
            and x.size
            and not self.interpret
            and fp8_product_gpu.chosen(x, reader) is not None
        ):
            by_blocks = reader.block is not None
            return add_norm_gpu.add_norm_and_quantize(x, delta, scale, eps=eps, by_blocks=by_blocks)
        return self.add_norm(x, delta, scale, eps=eps)

    def fp8_product(self, x: Activations, weight: FP8Weight) -> jax.Array:
        found = None if self.interpret else fp8_product_gpu.chosen_product(x, weight)
        return Ops.fp8_product(self, x, weight) if found is None else found

    def gated_product(self, x: Activations, kernel: Weight, *, of_prompts: bool) -> jax.Array:
        """Use a fused kernel if one is faster; interpreted, they would take minutes, so use XLA."""
        if self.interpret or isinstance(kernel, INT8Weight):
            return Ops.gated_product(self, x, kernel, of_prompts=of_prompts)
        if isinstance(kernel, FP8Weight):
            found = fp8_product_gpu.chosen_product(x, kernel, is_gated=True)
            return (
                Ops.gated_product(self, x, kernel, of_prompts=of_prompts)
                if found is None
                else found
            )
        x = values_of(x)
        shape = (x.shape[0], *kernel.shape)
        how: dict[str, Any] = {"dtype": kernel.dtype, "column_major": self.columns}
        few = None if of_prompts else choose_few_gated(*shape, **how)
        if few is not None:
            return few_gated_product(x, kernel, tuning=few)
        tuning = gated_matmul_gpu.choose_gated(*shape, **how, of_prompts=of_prompts)
        if tuning is None:
            return Ops.gated_product(self, x, kernel, of_prompts=of_prompts)
        return gated_matmul_gpu.gated_product(x, kernel, tuning=tuning)

    def experts(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        params: dict[str, Any],
        *,
        gate: Gate,
        shards: int = 1,
    ) -> jax.Array:
        """Use Triton for any token count, since XLA's grouped product reads every expert."""
        x, params, run = _planned(x, params, -(-ids.size // shards))
        if run is None or gate not in KERNEL_GATES:
            return Ops.experts(self, x, ids, weights, params, gate=gate, shards=shards)
        mixed = run(x, ids, weights, params, gate=gate, interpret=self.interpret)
        return mixed.sum() if shards == 1 else mixed.own_sum(sizes_of(params).num_experts)

    def moe_of_sum(
        self,
        x: jax.Array,
        delta: jax.Array,
        scale: jax.Array,
        params: dict[str, dict[str, Any]],
        *,
        eps: float,
        spec: MoESpec,
    ) -> tuple[jax.Array, jax.Array, Mixed] | None:
        """Use a few launches instead of 20 to 30. Supports routers without groups."""
        if x.ndim != 2 or not spec.has_ranked_router or spec.num_experts > MOST_RANKED:
            return None
        router = params["router"]
        if "factors" in router or (spec.has_router_bias and router["kernel"].dtype != x.dtype):
            return None
        how: dict[str, Any] = {"eps": eps, "spec": spec, "interpret": self.interpret}
        sizes = sizes_of(params["experts"])
        few = choose_few(x.shape[0], **sizes._asdict())
        if few is not None:
            if _has_fp8(params["experts"]):
                few = for_fp8(few, sizes, is_one=x.shape[0] == 1)
            shared = None if self.columns else gpu_few.shared_of(params, spec)
            return gpu_few.moe_of_sum(x, delta, scale, params, tuning=few, shared=shared, **how)
        x, experts, run = _planned(x, params["experts"], x.shape[0] * spec.top_k)
        if run is None:
            return None
        params = {**params, "experts": experts}
        return gpu_many.moe_of_sum(x, delta, scale, params, run=run, **how)

    def mixed_norm(
        self, x: jax.Array, mixed: Mixed, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        return gpu_mixed_norm.mixed_norm(x, mixed, scale, eps=eps, interpret=self.interpret)

    def commit(
        self,
        kv: tuple[jax.Array, ...],
        page_table: jax.Array,
        seq_lens: jax.Array,
        node_path: jax.Array,
        num_accepted: jax.Array,
    ) -> tuple[jax.Array, ...]:
        return compaction_gpu.compact_paths(
            kv, page_table, seq_lens, node_path, num_accepted, interpret=self.interpret
        )

    def sample(
        self,
        logits: jax.Array,
        *,
        temperature: jax.Array,
        seed: jax.Array,
        positions: jax.Array,
        token_ids: jax.Array,
        threshold: jax.Array | None,
        is_split: bool,
    ) -> tuple[jax.Array, jax.Array]:
        value, best = sample_gpu.sample(
            logits.reshape(-1, logits.shape[-1]),
            temperature,
            seed,
            positions.reshape(-1),
            None if threshold is None else threshold.reshape(-1),
            first_id=token_ids[0] if is_split else 0,
            interpret=self.interpret,
        )
        return value.reshape(positions.shape), best.reshape(positions.shape)

    def rank(
        self, logits: jax.Array, *, topk: int, positions: jax.Array, **rows: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if topk > gpu_rank.MOST:
            return super(GpuOps, self).rank(logits, topk=topk, positions=positions, **rows)
        values, columns, mass = gpu_rank.rank(
            logits.reshape(-1, logits.shape[-1]),
            positions=positions.reshape(-1),
            topk=topk,
            interpret=self.interpret,
            **rows,
        )
        shape = (*positions.shape, -1)
        return values.reshape(shape), columns.reshape(shape), mass.reshape(positions.shape)


def _planned(
    x: jax.Array, params: dict[str, Any], num_pairs: int
) -> tuple[jax.Array, dict[str, Any], Callable[..., Mixed] | None]:
    """Return (x, params, run_experts with its tiles). For many tokens packed experts are unpacked
    first."""
    sizes = sizes_of(params)
    rows = choose_packed(num_pairs, **sizes._asdict())
    if rows is not None and hopper.has_mosaic_gpu() and x.dtype == jnp.bfloat16:
        return x, params, partial(gpu_mxfp4.run_experts, tile_m=rows)
    tuning = choose_experts(num_pairs, **sizes._asdict())
    has_fp8 = _has_fp8(params)
    if has_fp8 and tuning is not None and num_pairs <= MOST_FP8 * sizes.num_experts:
        return x, params, partial(experts_gpu.run_experts, tuning=for_fp8(tuning, sizes))
    if sizes.is_packed or (has_fp8 and tuning is not None):
        x, params = unpacked(x, params)
        tuning = choose_experts(num_pairs, **sizes_of(params)._asdict())
    return x, params, None if tuning is None else partial(experts_gpu.run_experts, tuning=tuning)


def _has_fp8(params: dict[str, Any]) -> bool:
    return any(isinstance(params[name], FP8Weight) for name in PRODUCTS)


def gpu_problem(
    *, compute_capability: str, dtype: DTypeLike, page_size: int | None, head_dims: tuple[int, ...]
) -> str | None:
    """Return why the Hopper kernels cannot be used, or None. page_size None: the default."""
    page_size = page_size or GpuOps.default_page_size
    odd = next((width for width in head_dims if width not in NARROW + WIDE), None)
    expected = {
        f"the GPU's compute capability {compute_capability}": (compute_capability == "9.0", "9.0"),
        f"jax {jax.__version__}": (hopper.has_mosaic_gpu(), "0.11 or later"),
        f"dtype {jnp.dtype(dtype).name}": (
            dtype in (jnp.bfloat16, jnp.float16),
            "bfloat16 or float16",
        ),
        f"page_size {page_size}": (
            page_size in (8, 16, 32, 64) or page_size % 128 == 0,
            "8, 16, 32, 64 or a multiple of 128",
        ),
        f"head_dim {odd}": (odd is None, "64, 128 or 256"),
    }
    found = (f"{name}; expected {wanted}" for name, (fits, wanted) in expected.items() if not fits)
    return next(found, None)
