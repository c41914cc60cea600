"""The platform's kernels as one frozen bundle, chosen once where an engine is built.

`Ops` runs anywhere: its methods are what XLA compiles. ops_tpu.TpuOps and ops_gpu.GpuOps replace
those for which the platform has a kernel. Models, drafters and samplers call methods and never ask
which platform they are on; a new fusion is a new method with its XLA form here.

Bundles are static and compared by value: equal ones share compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise
from jspec.pallas_kernels.add_norm.reference import rms_norm
from jspec.pallas_kernels.attention import reference, streaming
from jspec.pallas_kernels.attention.contract import AttentionCall, check_call
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.bonus_token import reference as bonus_token
from jspec.pallas_kernels.compaction import reference as compaction
from jspec.pallas_kernels.experts import reference as experts
from jspec.pallas_kernels.experts.mixed import Mixed
from jspec.pallas_kernels.kv_write.rotation import Rotation, rotate_and_split
from jspec.pallas_kernels.sample import rank
from jspec.spec.model_spec import Gate, MoESpec


@dataclass(frozen=True, slots=True)
class Ops:
    """XLA's programs."""

    name: ClassVar[str] = "xla"
    default_page_size: ClassVar[int] = 16
    # Whether a layer leaves its last sum to the norm that comes next (`add_norm`).
    defers_sums: ClassVar[bool] = False
    # Whether attention meets a prompt's queries with their own row's keys alone, so that long
    # prefill steps pay.
    prefers_long_chunks: ClassVar[bool] = False
    # Whether experts pay that stay packed in memory, in bfloat16 and whole on one device.
    reads_packed: ClassVar[bool] = False
    # Bytes of one layer's K and V that a decode need not read, from which it pays to read what rows
    # begin with once for several (and at so many rows); None: there is no kernel for it.
    sharing_pays_from: ClassVar[int | None] = None
    sharing_least_rows: ClassVar[int] = 1

    @property
    def by_columns(self) -> bool:
        """Whether weights marked so lie as [out, in] in memory."""
        return False

    def with_columns(self, columns: bool) -> Ops:
        """The same for weights that lie by columns, or not, where its kernels can read them so."""
        del columns
        return self

    def rows_a_pack(self, *, queries_per_row: int, group: int) -> int:
        """Rows of which a kernel reads a shared prefix at once. group: heads of a kv head."""
        del queries_per_row, group
        return 1

    def pool_width(self, head_dim: int) -> int:
        """D of a KV pool for heads of `head_dim`."""
        return head_dim

    def compiler_options(self, *, decode_tokens: int | None) -> dict[str, Any]:
        """What XLA is told beside its defaults. decode_tokens: of a decode step, None of a prefill.

        For speed alone: a compiler that does not know one of them does without.
        """
        del decode_tokens
        return {}

    def attend(
        self,
        q: Float[Array, "T H Dq"],
        k_new: Float[Array, "T G Dk"] | None,
        v_new: Float[Array, "T G Dv"] | None,
        kv_pages: Float[Array, "NP S G2 D"],
        rows: AttentionRows,
        call: AttentionCall,
        sinks: Float[Array, "H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Float[Array, "NP S G2 D"]]:
        """Writes k_new and v_new, then attends: the contract of attention/contract.py."""
        check_call(q, kv_pages, rows, call)
        kv_pages = _written(k_new, v_new, kv_pages, rows, call)
        out = streaming.attend(
            q, kv_pages, rows, sinks=sinks, queries_per_row=call.queries_per_row, **call.settings
        )
        return out, kv_pages

    def rotate_write_and_attend(
        self,
        heads: Float[Array, "T heads D"],
        rotation: Rotation,
        kv_pages: Float[Array, "NP S G2 Dp"],
        rows: AttentionRows,
        call: AttentionCall,
        sinks: Float[Array, "H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Float[Array, "NP S G2 Dp"]]:
        """A layer's attention from projected heads (q, then k, then v) to mixed ones.

        rotation: all that is still to be done to the heads, their norms included.
        """
        q, k, v = rotate_and_split(heads, rotation)
        out, kv_pages = self.attend(q, k, v, kv_pages, rows, call, sinks)
        return out[..., : heads.shape[-1]], kv_pages  # a pool may be wider than a head

    def add_norm(
        self,
        x: Float[Array, "*b E"],
        delta: Float[Array, "*b E"],
        scale: Float[Array, "E"],
        *,
        eps: float,
    ) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"]]:
        """(x + delta, the RMSNorm of that sum times scale)."""
        total = x + delta
        return total, rms_norm(total, scale, eps=eps)

    def gated_product(
        self, x: Float[Array, "*b E"], kernel: Float[Array, "E I2"], *, of_prompts: bool
    ) -> Float[Array, "*b I"]:
        """silu(x @ gate) * (x @ up), gate and up side by side in `kernel`."""
        del of_prompts
        gate, up = jnp.split(x @ kernel, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def experts(
        self,
        x: Float[Array, "T E"],
        ids: Int[Array, "T k"],
        weights: Float[Array, "T k"],
        params: dict[str, Any],
        *,
        gate: Gate,
    ) -> Float[Array, "T E"]:
        """The weighted sum of each token's experts, without what `down` adds as a bias.

        params: gate_up [X, E, 2I], down [X, I, E], and gate_up_bias [X, 2I] where there is one.
        """
        return experts.run_experts(x, ids, weights, params, gate=gate)

    def mixture_of_sum(
        self,
        x: Float[Array, "*b E"],
        delta: Float[Array, "*b E"],
        scale: Float[Array, "E"],
        params: dict[str, dict[str, Any]],
        *,
        eps: float,
        spec: MoESpec,
    ) -> tuple[Float[Array, "*b E"], Mixed] | None:
        """(x + delta, the whole mixture of that sum's norm), or None: there is no kernel for it.

        For weights that are whole on this device. params: router and experts.
        """
        del x, delta, scale, params, eps, spec
        return None

    def mixed_norm(
        self, x: Float[Array, "T E"], mixed: Mixed, scale: Float[Array, "E"], *, eps: float
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
        """`add_norm` of x and a mixture's sum."""
        return self.add_norm(x, mixed.sum(), scale, eps=eps)

    def commit(
        self,
        kv: tuple[jax.Array, ...],
        page_table: Int[Array, "B P"],
        seq_lens: Int[Array, "B"],
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> tuple[jax.Array, ...]:
        """`compaction.compact_path` of every layer's pool, in place when the pools are donated."""
        return tuple(
            compaction.compact_path(pages, page_table, seq_lens, node_path, num_accepted)
            for pages in kv
        )

    def gather_emitted(
        self,
        target_ids: Int[Array, "B N"],
        hidden: Float[Array, "B N A"],
        node_path: Int[Array, "B M"],
        num_accepted: Int[Array, "B"],
    ) -> tuple[Int[Array, "B M"], Int[Array, "B"], Float[Array, "B M A"]]:
        """(emitted ids, bonus token, hidden rows along the path), 0 after each path."""
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
        """(value, id) of the largest logit + T * noise at each node, the lowest id on ties.

        threshold: only what reaches it, scaled by `scaled`, may be chosen. is_split: token_ids is
        one of several shards' (they count up from its first id).
        """
        del is_split
        logits = without_nan(logits)
        seeds = jnp.broadcast_to(seed[:, None, :], (*positions.shape, 2))
        perturbed = logits + temperature[:, None, None] * noise.gumbel(seeds, positions, token_ids)
        if threshold is not None:
            keep = scaled(logits, temperature) >= threshold[..., None]
            perturbed = jnp.where(keep, perturbed, -jnp.inf)
        best = jnp.argmax(perturbed, axis=-1)
        return jnp.max(perturbed, axis=-1), jnp.take(token_ids, best, mode="clip")

    def rank_one(
        self,
        logits: Float[Array, "B R U"],
        *,
        temperature: Float[Array, "B"],
        seed: UInt32[Array, "B 2"],
        positions: Int[Array, "B R"],
        token_ids: Int[Array, "U"],
        scale: float,
        lowest: float,
    ) -> tuple[Float[Array, "B R"], Int[Array, "B R"], Float[Array, "B R"]]:
        """(largest of scale * (logit + T * noise), its first column, the sum of exp(score - it)).

        lowest: what NaN and lower scores count as, and -lowest what higher ones do.
        """
        found = rank.reference(
            logits.reshape(-1, logits.shape[-1]),
            temperature,
            seed,
            positions.reshape(-1),
            token_ids,
            scale=scale,
            lowest=lowest,
        )
        top, column, mass = (x.reshape(positions.shape) for x in found)
        return top, column, mass


@dataclass(frozen=True, slots=True)
class ReferenceOps(Ops):
    """Attention by its definition: for tests."""

    name: ClassVar[str] = "reference"

    def attend(
        self,
        q: jax.Array,
        k_new: jax.Array | None,
        v_new: jax.Array | None,
        kv_pages: jax.Array,
        rows: AttentionRows,
        call: AttentionCall,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        check_call(q, kv_pages, rows, call)
        kv_pages = _written(k_new, v_new, kv_pages, rows, call)
        out = reference.attend(
            q, kv_pages, rows, sinks=sinks, queries_per_row=call.queries_per_row, **call.settings
        )
        return out, kv_pages


def without_nan(logits: jax.Array) -> jax.Array:
    """NaN as the lowest: it is not chosen where anything else is."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def scaled(logits: Float[Array, "B N V"], temperature: Float[Array, "B"]) -> jax.Array:
    """What the filters compare: logits / T, or the logits where T is 0; no NaN."""
    wide = temperature[:, None, None]
    return without_nan(logits) / jnp.where(wide > 0, jnp.maximum(wide, noise.COLDEST), 1.0)


def _written(
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    kv_pages: jax.Array,
    rows: AttentionRows,
    call: AttentionCall,
) -> jax.Array:
    if k_new is None or v_new is None:
        return kv_pages
    return reference.write_new(k_new, v_new, kv_pages, rows, queries_per_row=call.queries_per_row)
