"""Log-probabilities of emitted tokens and of prompts, reduced one depth of the accepted path or one
slice of a prompt at a time: no [B, N, V] or [T, V] array is made besides the step's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.batch import Verified
from jspec.device.state import SamplingBatch
from jspec.messages.request import MAX_TOP_LOGPROBS
from jspec.pallas_kernels.attention.api import QueryIndex
from jspec.sampling.logprobs import Logprobs, logprobs_of
from jspec.speculative.target import Params, Target

SLICE = 64  # most prompt tokens whose logits are in memory at once


def emitted_logprobs(
    target: Target,
    logits: Float[Array, "B N V"],
    verified: Verified,
    sampling: SamplingBatch,
) -> dict[str, jax.Array]:
    """Return the fields of `output_columns` for the emitted ids, [B, M, .]."""

    def at_depth(of_depth: tuple[jax.Array, jax.Array]) -> Logprobs:
        node, emitted_ids = of_depth
        of_node = jnp.take_along_axis(logits, node[:, None, None], axis=1, mode="clip")[:, 0]
        return _reduced(target, of_node, emitted_ids, sampling.logprob_ids)

    by_depth = jax.lax.map(at_depth, (verified.node_path.T, verified.emitted_ids.T))
    return _fields(jax.tree.map(lambda x: x.swapaxes(0, 1), by_depth))


def root_logprobs(
    target: Target, logits: Float[Array, "R 1 V"], roots: Int[Array, "R"], sampling: SamplingBatch
) -> dict[str, jax.Array]:
    """Return the fields for the token sampled at the end of each chunk, [R, 1, .]."""
    found = _reduced(target, logits[:, 0], roots, sampling.logprob_ids)
    return _fields(jax.tree.map(lambda x: x[:, None], found))


def prompt_logprobs(
    target: Target,
    params: Params,
    hidden: Float[Array, "T E"],
    following: Int[Array, "T"],
    sampling: SamplingBatch,
    *,
    index: QueryIndex,
    positions: Int[Array, "T"],
    prompt_lens: Int[Array, "R"],
) -> dict[str, jax.Array]:
    """Return the fields, [T, 1, .]: entry t is for `following[t]`, the token after packed token t.
    Entries without a request for log-probabilities are 0."""

    def of_row(x: jax.Array) -> jax.Array:
        return jnp.take(x, index.row_idx, axis=0, mode="clip")

    of_next = positions + 1
    is_wanted = index.valid & (of_next >= of_row(sampling.logprob_start))
    is_wanted &= of_next < of_row(prompt_lens)
    num_tokens = hidden.shape[0]
    size = next(n for n in range(min(SLICE, num_tokens), 0, -1) if num_tokens % n == 0)
    watched = of_row(sampling.logprob_ids)

    def of_slice(part: tuple[jax.Array, ...]) -> Logprobs:
        wanted, hidden, following, watched = part

        def compute() -> Logprobs:
            return _reduced(target, target.logits(params, hidden), following, watched)

        return jax.lax.cond(jnp.any(wanted), compute, lambda: no_logprobs(watched))

    parts = jax.tree.map(
        lambda x: x.reshape(-1, size, *x.shape[1:]), (is_wanted, hidden, following, watched)
    )
    found = jax.lax.map(of_slice, parts)
    return _fields(jax.tree.map(lambda x: x.reshape(num_tokens, 1, *x.shape[2:]), found))


def _fields(found: Logprobs) -> dict[str, jax.Array]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def _reduced(
    target: Target, logits: jax.Array, chosen_ids: jax.Array, watched_ids: jax.Array
) -> Logprobs:
    return logprobs_of(
        logits, chosen_ids, watched_ids, token_ids=target.token_ids(), shard=target.shard
    )


def no_logprobs(watched_ids: Int[Array, "*b W"]) -> Logprobs:
    *rows, num_watched = watched_ids.shape
    return Logprobs(
        logprobs=jnp.zeros(rows, jnp.float32),
        top_logprobs=jnp.zeros((*rows, MAX_TOP_LOGPROBS), jnp.float32),
        top_ids=jnp.zeros((*rows, MAX_TOP_LOGPROBS), jnp.int32),
        watched_logprobs=jnp.zeros((*rows, num_watched), jnp.float32),
    )
