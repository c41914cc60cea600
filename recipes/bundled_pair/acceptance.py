"""A head's acceptance measured without an engine, on rows sampled from the target.

A chain's draft at depth i is accepted if it and all before it equal the target's tokens. Up to the
first miss, drafting freely and drafting with the true tokens forced are equal, so one unrolled
forward gives for every position how many drafts a verification there would accept. Drafts are
selected as in serving, with the row's own noise; without draft noise they are the plain argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device import noise
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec
from jspec.training.draft_loss import features_on_the_fly, make_unrolled
from jspec.training.heads.draft_head import DraftHead, Guess
from recipes.bundled_pair.sampler import Prompts

Compared = Callable[..., tuple[jax.Array, jax.Array]]
MISS = 2  # the rank of all other tokens


def make_compared(
    target: ModelSpec,
    head: DraftHead,
    *,
    length: int,
    num_steps: int,
    dtype: Any,
    draft_noise: bool = True,
    first: int = 0,
) -> Compared:
    """Return a jitted comparison of the drafts at every position with the row's own tokens.

    (trained params, frozen, rows[B, T], temperatures, seeds) -> (ranks, ratios)
    [B, T - 1 - S - first, S]. At [b, t, i], of the draft of depth i + 1 after first + t + 1 draft
    slots, whose token is x, row b's at first + t + 2 + i:
    ranks: i32, 0 or 1 if x is the best or the second best draft, else MISS
    ratios: min(1, q(x) / p(x)), by which rejection sampling accepts x, at temperatures above 0
    """
    features = features_on_the_fly(target, head, length=length, dtype=dtype)
    run = make_unrolled(head, features, num_depths=num_steps, dtype=dtype)

    def compared(
        params: Params,
        frozen: Params,
        token_ids: jax.Array,
        temperatures: jax.Array,
        seeds: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        slots = jnp.arange(first, length - 1 - num_steps)
        shape = (token_ids.shape[0], len(slots))
        batch = {"ids": token_ids, "roots": jnp.broadcast_to(slots + 1, shape)}
        _, target_logits, guesses = run(params, frozen, batch)
        heat = temperatures[:, None, None]
        ranks, ratios = [], []
        for i, guess in enumerate(guesses):
            own = guess if guess.roots is not None else jax.tree.map(lambda x: x[:, slots], guess)
            taken = token_ids[:, slots + 2 + i]
            positions = jnp.broadcast_to(slots + 2 + i, shape)
            spread = jnp.broadcast_to(seeds[:, None, :], (*shape, 2))
            g = noise.gumbel(spread, positions, frozen["draft_ids"])
            best = _two_best(own, heat * float(draft_noise) * g)
            is_taken = jnp.take(frozen["draft_ids"], best, mode="clip") == taken[..., None]
            ranks.append(jnp.where(is_taken[..., 0], 0, jnp.where(is_taken[..., 1], 1, MISS)))
            above = jnp.where(heat > 0, heat, 1.0)
            p = jax.nn.log_softmax(target_logits[:, slots + 1 + i] / above, axis=-1)
            p = jnp.take_along_axis(p, taken[..., None], axis=-1)[..., 0]
            q = _log_q(own, frozen["draft_ids"], taken, heat=above)
            ratios.append(jnp.exp(jnp.minimum(q - p, 0.0)))
        return jnp.stack(ranks, axis=-1), jnp.stack(ratios, axis=-1)

    return jax.jit(compared)


def _two_best(guess: Guess, added: jax.Array) -> jax.Array:
    """Return the columns of the two best drafts. added: to the logits, before all else."""
    logits = guess.logits + added
    if guess.reranked is None:
        return jax.lax.top_k(logits, 2)[1]
    found = jax.lax.top_k(logits, guess.num_candidates)[1]
    scores = jnp.take_along_axis(guess.reranked + added, found, axis=-1)
    return jnp.take_along_axis(found, jax.lax.top_k(scores, 2)[1], axis=-1)


def _log_q(guess: Guess, draft_ids: jax.Array, taken: jax.Array, *, heat: jax.Array) -> jax.Array:
    """Return the logarithm of the draft's probability of tokens; -inf of those it cannot draft."""
    logits = guess.logits
    if guess.reranked is not None:
        least = jax.lax.top_k(logits, guess.num_candidates)[0][..., -1:]
        logits = jnp.where(logits >= least, guess.reranked, -jnp.inf)
    column = jnp.minimum(jnp.searchsorted(draft_ids, taken), len(draft_ids) - 1)
    log_q = jax.nn.log_softmax(logits / heat, axis=-1)
    found = jnp.take_along_axis(log_q, column[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.take(draft_ids, column, mode="clip") == taken, found, -jnp.inf)


def emitted_by_rejection(ratios: np.ndarray, first_root: int) -> tuple[float, float]:
    """Return the expected (tokens emitted, verifications) of rejection sampling along one row.

    Given the text, a verification at slot t accepts k drafts or more with the probability
    min(1, q/p) multiplied over the first k tokens. So the expectation is exact: slot t is verified
    with a probability that follows from those of the slots before it.

    ratios: [slots, S] of a chain. first_root: the slot that is verified first
    """
    num_slots, num_steps = ratios.shape
    is_verified = np.zeros(num_slots + num_steps + 1)
    is_verified[first_root] = 1.0
    accepted = np.cumprod(ratios, axis=1)
    exactly = -np.diff(accepted, axis=1, prepend=1.0, append=0.0)  # [slots, S + 1]
    tokens = steps = 0.0
    for t in range(first_root, num_slots):
        steps += is_verified[t]
        tokens += is_verified[t] * (1.0 + accepted[t].sum())
        is_verified[t + 1 : t + num_steps + 2] += is_verified[t] * exactly[t]
    return tokens, steps


def accepted_of_chain(ranks: np.ndarray) -> np.ndarray:
    """Return the number of accepted drafts at each slot: those before the first miss."""
    return np.asarray(np.cumprod(ranks == 0, axis=-1).sum(axis=-1))


def accepted_of_caterpillar(ranks: np.ndarray) -> np.ndarray:
    """Return it for a chain with a leaf beside every node: the second best draft there."""
    along = accepted_of_chain(ranks)
    padded = np.concatenate((ranks, np.full((*ranks.shape[:-1], 1), MISS)), axis=-1)
    at_end = np.take_along_axis(padded, along[..., None], axis=-1)[..., 0]
    return np.asarray(along + (at_end == 1))


def emitted_per_verification(accepted: np.ndarray, prompt_lens: np.ndarray) -> list[int]:
    """Return num_emitted of every verification of a plain walk over each row.

    Worked example, S = 2, prompt of 3 tokens: prefill emits x_3 (not counted), so the root is x_3
    and slot t = 2 drafts x_4, x_5. With accepted[2] = 1 the step emits x_4 and the bonus x_5:
    num_emitted 2, the root is x_5, and slot t = 4 drafts next.
    """
    emitted = []
    for row, prompt_len in zip(accepted, prompt_lens, strict=True):
        t = int(prompt_len) - 1
        while t < len(row):
            emitted.append(int(row[t]) + 1)
            t += emitted[-1]
    return emitted


def measure_acceptance(
    target: ModelSpec,
    head: DraftHead,
    params: Params,
    frozen: Params,
    *,
    samples: np.ndarray,
    prompts: Prompts,
    num_steps: int,
    batch_size: int,
    dtype: Any,
    draft_noise: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return by temperature the mean num_emitted of chains of `num_steps`, and agreement by depth.

    samples [R, T]: the target's continuations of the first R prompts. A depth's agreement is over
    all sampled positions, with the true tokens forced at earlier depths.
    """
    run = make_compared(
        target,
        head,
        length=samples.shape[1],
        num_steps=num_steps,
        dtype=dtype,
        draft_noise=draft_noise,
    )
    size = min(batch_size, len(samples))
    parts = []
    for start in range(0, len(samples) - size + 1, size):
        part = slice(start, start + size)
        found = run(
            params,
            frozen,
            jnp.asarray(samples[part], jnp.int32),
            jnp.asarray(prompts.temperatures[part]),
            jnp.asarray(prompts.seeds[part]),
        )
        parts.append(np.asarray(found[0]))
    ranks = np.concatenate(parts)
    table = {}
    for temperature in np.unique(prompts.temperatures[: len(ranks)]):
        chosen = np.flatnonzero(prompts.temperatures[: len(ranks)] == temperature)
        lens = prompts.prompt_lens[chosen]
        emitted = emitted_per_verification(accepted_of_chain(ranks[chosen]), lens)
        sampled = np.arange(ranks.shape[1])[None, :] >= lens[:, None] - 1
        table[f"{temperature:.1f}"] = {
            "mean_emitted": round(float(np.mean(emitted)), 3),
            "num_verifications": len(emitted),
            "agreement": np.round((ranks[chosen][sampled] == 0).mean(axis=0), 3).tolist(),
        }
    return table
