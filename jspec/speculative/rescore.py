"""Rescoring of a finished text: plain decoding's choice after each of its prefixes. It runs one
row, a chunk per call, in its own pools, like a step without tree or drafter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch, Seen
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from jspec.sampling.logprobs import logprobs_of
from jspec.sampling.penalties import penalize
from jspec.spec import indexing
from jspec.speculative.target import KVPool, Params, Target


@pytree
class TextChunk:
    """Tokens start, start + 1, ... of a text; the first num_tokens are valid."""

    token_ids: jax.Array  # i32[T]
    following: jax.Array  # i32[T], the token after each
    start: jax.Array  # i32[1]
    num_tokens: jax.Array  # i32[1]
    prompt_len: jax.Array  # i32[1]
    sampling: SamplingBatch  # [1]


@pytree
class ChunkScores:
    """The target's prediction after each token."""

    chosen_ids: jax.Array  # i32[T], chosen with penalties, filters and noise
    logprobs: jax.Array  # f32[T], of `following`, from the raw logits
    top_logprobs: jax.Array  # f32[T, 20], descending
    top_ids: jax.Array  # i32[T, 20]
    hidden: jax.Array  # [T, E], after the final norm
    aux: jax.Array  # [T, A], at the target's aux layers


def rescore_chunk(
    target: Target,
    params: Params,
    kv: KVPool,
    seen: Seen,
    chunk: TextChunk,
    *,
    num_pages: int,
) -> tuple[KVPool, Float[Array, "T V"], ChunkScores]:
    """Return (pools with the chunk's KV, penalized f32 logits, scores). The row owns pages 1 to
    num_pages and slot 1. seen: of this row before the chunk, with all prompt marks."""
    size = chunk.token_ids.shape[0]
    positions = chunk.start + jnp.arange(size, dtype=jnp.int32)
    rows = AttentionMetadata(
        page_table=1 + jnp.arange(num_pages, dtype=jnp.int32)[None],
        slots=jnp.ones((1,), jnp.int32),
        prefix_lens=chunk.start,
        cu_q_lens=jnp.concatenate((jnp.zeros((1,), jnp.int32), chunk.num_tokens)),
        q_positions=positions,
    )
    hidden, aux, kv = target.forward(params, chunk.token_ids, kv, rows, queries_per_row=None)
    raw = target.logits(params, hidden)
    token_ids = target.token_ids()
    # Each token is a row of one node, which has seen the text up to and including itself.
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape[1:])), chunk.sampling)
    of_next = indexing.chosen_position(positions, 0)
    penalized = penalize(
        raw[:, None],
        sampling,
        token_ids=token_ids,
        seen=_seen_by_token(seen, chunk, positions, token_ids),
        tokens_on_path=jnp.zeros((size, 1, 0), jnp.int32),
        num_output=(of_next - chunk.prompt_len)[:, None],
    )
    chosen = choose(
        penalized,
        sampling,
        positions=of_next[:, None],
        token_ids=token_ids,
        filtered=True,
        shard=target.shard,
        ops=Ops(),
    )
    known = logprobs_of(
        raw, chunk.following, sampling.logprob_ids, token_ids=token_ids, shard=target.shard
    )
    scores = ChunkScores(
        chosen_ids=chosen[:, 0],
        logprobs=known.logprobs,
        top_logprobs=known.top_logprobs,
        top_ids=known.top_ids,
        hidden=hidden,
        aux=aux,
    )
    return kv, penalized[:, 0], scores


def _seen_by_token(
    seen: Seen, chunk: TextChunk, positions: jax.Array, token_ids: jax.Array
) -> Seen:
    is_output = positions >= chunk.prompt_len
    emitted = (chunk.token_ids[:, None] == token_ids) & is_output[:, None]
    counts = seen.output_counts + jnp.cumsum(emitted.astype(jnp.int32), axis=0)
    marks = jnp.broadcast_to(seen.prompt_marks, counts.shape)
    return Seen(output_counts=counts, prompt_marks=marks)
