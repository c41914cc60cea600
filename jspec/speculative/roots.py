"""Sampling of roots in a prefill step, and the token counts that their penalties need."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.device.batch import PrefillBatch
from jspec.device.state import EngineState, SamplingBatch, Seen
from jspec.messages.step_options import StepOption, StepOptions
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from jspec.sampling.grammar import restrict
from jspec.sampling.penalties import penalize, see_filled
from jspec.speculative.target import Target


def see_chunks(
    target: Target,
    state: EngineState,
    batch: PrefillBatch,
    rows: AttentionMetadata,
    *,
    prompt_lens: jax.Array,
) -> Seen:
    """Return `seen` with the chunks' tokens; after the prompt they are a retracted row's output."""
    index = index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None)
    slots = jnp.take(batch.slots, index.row_idx, mode="clip")
    prompt = jnp.take(prompt_lens, index.row_idx, mode="clip")
    return see_filled(
        state.rows.seen,
        slots,
        batch.token_ids,
        index.valid,
        is_prompt=rows.q_positions < prompt,
        first_id=target.token_ids()[0],
    )


def sample_roots(
    target: Target,
    logits: jax.Array,
    sampling: SamplingBatch,
    *,
    seen: Seen,
    prompt_lens: jax.Array,
    ends: jax.Array,
    options: StepOptions,
    allowed: jax.Array | None,
) -> jax.Array:
    """Return the token after each chunk, i32[R], sampled with the noise of its position, `ends`."""
    token_ids, raw = target.token_ids(), logits
    if StepOption.PENALTIES in options:
        logits = penalize(
            logits,
            sampling,
            token_ids=token_ids,
            seen=seen,
            tokens_on_path=jnp.zeros((*logits.shape[:2], 0), jnp.int32),  # the root alone
            num_output=(ends - prompt_lens)[:, None],
        )
    if allowed is not None:
        allowed = allowed[:, None]
        logits = restrict(logits, raw, allowed, token_ids=token_ids, shard=target.shard)
    chosen = choose(
        logits,
        sampling,
        positions=ends[:, None],
        token_ids=token_ids,
        filtered=StepOption.FILTERS in options,
        shard=target.shard,
        ops=Ops(),
    )
    return chosen[:, 0]
