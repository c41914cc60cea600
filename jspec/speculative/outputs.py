"""Step outputs, packed into one array with the columns of `messages.layout.output_columns`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import PrefillBatch, Scored, Verified, pack_output
from jspec.device.state import SamplingBatch
from jspec.messages.layout import output_columns
from jspec.messages.step_options import StepOption, StepOptions
from jspec.pallas_kernels.attention.api import index_queries
from jspec.speculative.drafter import Emitted, following_ids
from jspec.speculative.hidden import hidden_bits, rows_of
from jspec.speculative.logprobs import emitted_logprobs, prompt_logprobs, root_logprobs
from jspec.speculative.target import Params, Target


def decode_output(
    target: Target,
    scored: Scored,
    verified: Verified,
    *,
    draft_shape: SpeculativeConfig,
    options: StepOptions,
    sampling: SamplingBatch,
) -> Int[Array, "B M1"]:
    """Pack a verification's results: i32[B, 1 + M], or wider."""
    output = {"num_emitted": verified.num_accepted + 1, "emitted_ids": verified.emitted_ids}
    if StepOption.LOGPROBS in options:
        output |= emitted_logprobs(target, scored.logits, verified, sampling)
    words = 0
    if StepOption.HIDDEN in options:
        path = verified.features.hidden
        output["hidden"], words = hidden_bits(path), rows_of(path).words
    return pack_output(output_columns(draft_shape.max_emitted, options, hidden_words=words), output)


def prefill_output(
    target: Target,
    params: Params,
    batch: PrefillBatch,
    emitted: Emitted,
    *,
    options: StepOptions,
    roots: Int[Array, "R"],
    logits: Float[Array, "R 1 V"],
    hidden: Float[Array, "_ E"],
    prompt_lens: Int[Array, "R"],
) -> Int[Array, "R 2"]:
    """Pack a prefill's results: i32[R, 2], with the root after a final chunk. logits: at each
    chunk's last token.

    With log-probabilities or hidden states there are R + T wider entries: those of the roots, then
    those of the packed tokens; `hidden` must then have all tokens.
    """
    extras = {StepOption.LOGPROBS, StepOption.HIDDEN}.intersection(options)
    of_roots = {"num_emitted": batch.is_final, "emitted_ids": roots[:, None]}
    words = rows_of(hidden).words if StepOption.HIDDEN in extras else 0
    columns = output_columns(1, options, hidden_words=words)
    if not extras:
        return pack_output(columns, of_roots)
    none = jnp.zeros(batch.token_ids.shape, jnp.int32)
    of_prompts = {"num_emitted": none, "emitted_ids": none[:, None]}
    if StepOption.LOGPROBS in extras:
        of_roots |= root_logprobs(target, logits, roots, emitted.sampling)
        of_prompts |= prompt_logprobs(
            target,
            params,
            hidden,
            following_ids(emitted),
            emitted.sampling,
            index=index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None),
            positions=emitted.rows.q_positions,
            prompt_lens=prompt_lens,
        )
    if StepOption.HIDDEN in extras:
        final = jnp.take(hidden, emitted.last, axis=0, mode="clip")
        of_roots["hidden"] = hidden_bits(final)[:, None]
        of_prompts["hidden"] = hidden_bits(hidden)[:, None]
    both = pack_output(columns, of_roots), pack_output(columns, of_prompts)
    return jnp.concatenate(both, axis=0)
