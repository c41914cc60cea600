"""The kernel bundle for TPUs (Mosaic TPU); interpreted on any platform in tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.experimental.pallas import tpu as pltpu

from jspec.device.weights import Weight
from jspec.pallas_kernels.attention import tpu as paged_attention_tpu
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata, check_call
from jspec.pallas_kernels.bonus_token import tpu as bonus_token_tpu
from jspec.pallas_kernels.compaction import tpu as compaction_tpu
from jspec.pallas_kernels.delta_rule import tpu as delta_rule_tpu
from jspec.pallas_kernels.experts import tpu as experts_tpu
from jspec.pallas_kernels.experts.api import KERNEL_GATES
from jspec.pallas_kernels.kv_write.api import KVScales
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.prefill import tpu as paged_prefill_tpu
from jspec.spec.cache_entry import FP8
from jspec.spec.layers.feed_forward import Gate

# XLA fuses a sum over shards with an independent product that is scheduled after its start. The
# last option keeps it from merging sums. Newer compilers refuse this on chips other than v5e, where
# results could be wrong.
ASYNC_SUMS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_count": 1,
}
V5E, V7X = "TPU v5 lite", "TPU7x"
# Bytes of a shard's weights from which reading half of them takes longer than the latency of a sum.
LEAST_HALVED = 16 << 20


@dataclass(frozen=True, slots=True)
class TpuOps(Ops):
    """The TPU implementation of `Ops`. async_sums: sum large products in halves."""

    interpret: bool = False
    async_sums: bool = False

    name: ClassVar[str] = "tpu"
    default_page_size: ClassVar[int] = 64  # one DMA per page; large, as page tables are in SMEM
    lanes: ClassVar[int] = 128  # whole vectors, which the kernels read and a TPU pads to

    def xla_for_fp8(self) -> tuple[str, ...]:
        return ("attention of prompts", "attention of decodes", "compaction of trees")

    def on(self, device_kind: str) -> TpuOps:
        return replace(self, async_sums=device_kind == V5E)

    def page_size_on(self, device_kind: str) -> int:
        # A v7x core has half of a chip's heads and twice a v6e's bandwidth: starting the copies of
        # pages of 64 tokens takes longer than reading them.
        return 128 if device_kind == V7X else self.default_page_size

    def compiler_options(
        self, *, decode_tokens: int | None, fp8_prompt_tokens: int = 0
    ) -> dict[str, Any]:
        del decode_tokens, fp8_prompt_tokens
        return dict(ASYNC_SUMS) if self.async_sums else {}

    def sums_halves(self, kernel: Weight, shards: int) -> bool:
        if not (self.async_sums and shards > 1 and isinstance(kernel, jax.Array)):
            return False
        return kernel.size * kernel.dtype.itemsize >= LEAST_HALVED

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
        is_wide = per_row is not None and per_row > paged_attention_tpu.MAX_QUERIES_PER_ROW
        if is_wide or kv_pages.dtype == FP8:
            return Ops.attend(self, q, k_new, v_new, kv_pages, rows, call, sinks, scales)
        if per_row is None:
            return paged_prefill_tpu.attend_packed(
                q,
                k_new,
                v_new,
                kv_pages,
                rows,
                sinks=sinks,
                interpret=pltpu.InterpretParams() if self.interpret else False,
                **call.settings,
            )
        return paged_attention_tpu.attend_rows(
            q,
            k_new,
            v_new,
            kv_pages,
            rows,
            sinks=sinks,
            queries_per_row=per_row,
            interpret=self.interpret,
            **call.settings,
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
        if queries_per_row is None or not delta_rule_tpu.serves(cache["state"]):
            return Ops.delta_rule(self, *given, queries_per_row=queries_per_row)
        return delta_rule_tpu.run_rows(*given, nodes=queries_per_row, interpret=self.interpret)

    def experts(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        params: dict[str, jax.Array],
        *,
        gate: Gate,
        shards: int = 1,
    ) -> jax.Array:
        how: dict[str, Any] = {"gate": gate, "shards": shards}
        tile_m = experts_tpu.choose_tile_m(-(-ids.size // shards), params["down"].shape[0])
        if tile_m is None or gate not in KERNEL_GATES:
            return Ops.experts(self, x, ids, weights, params, **how)
        return experts_tpu.run_experts(
            x, ids, weights, params, **how, tile_m=tile_m, interpret=self.interpret
        )

    def commit(
        self,
        kv: tuple[jax.Array, ...],
        page_table: jax.Array,
        seq_lens: jax.Array,
        node_path: jax.Array,
        num_accepted: jax.Array,
    ) -> tuple[jax.Array, ...]:
        if any(pages.dtype == FP8 for pages in kv):
            return Ops.commit(self, kv, page_table, seq_lens, node_path, num_accepted)
        return compaction_tpu.compact_paths(
            kv, page_table, seq_lens, node_path, num_accepted, interpret=self.interpret
        )

    def gather_emitted(
        self,
        target_ids: jax.Array,
        hidden: jax.Array,
        node_path: jax.Array,
        num_accepted: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if not hidden.shape[2]:
            return Ops.gather_emitted(self, target_ids, hidden, node_path, num_accepted)
        return bonus_token_tpu.gather_emitted(
            target_ids, hidden, node_path, num_accepted, interpret=self.interpret
        )
