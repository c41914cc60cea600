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
from jspec.models.decoder import Params
from jspec.spec.model_spec import ModelSpec
from jspec.training.draft_loss import features_on_the_fly, make_unrolled
from jspec.training.heads.draft_head import DraftHead
from recipes.bundled_pair.sampler import Prompts


def make_hits(
    target: ModelSpec,
    head: DraftHead,
    *,
    length: int,
    num_steps: int,
    dtype: Any,
    draft_noise: bool = True,
) -> Callable[..., jax.Array]:
    """Return jitted hits of the drafts at every position.

    (trained params, frozen, rows[B, T], temperatures, seeds) -> bool[B, T - 1 - S, S].
    hits[b, t, i]: the draft of depth i + 1 after t + 1 draft slots is row b's token t + 2 + i.
    """
    features = features_on_the_fly(target, head, length=length, dtype=dtype)
    run = make_unrolled(head, features, num_depths=num_steps, dtype=dtype)

    def hits_fn(
        params: Params,
        frozen: Params,
        token_ids: jax.Array,
        temperatures: jax.Array,
        seeds: jax.Array,
    ) -> jax.Array:
        draft_ids = frozen["draft_ids"]
        num_rows = length - 1 - num_steps
        shape = (token_ids.shape[0], num_rows)
        hits = []
        for i, guess in enumerate(run(params, frozen, {"ids": token_ids})[2]):
            positions = jnp.broadcast_to(jnp.arange(num_rows) + 2 + i, shape)
            spread = jnp.broadcast_to(seeds[:, None, :], (*shape, 2))
            g = noise.gumbel(spread, positions, draft_ids)
            scale = temperatures[:, None, None] * float(draft_noise)
            best = jnp.argmax(guess.logits[:, :num_rows] + scale * g, axis=-1)
            guessed = jnp.take(draft_ids, best, mode="clip")
            hits.append(guessed == token_ids[:, 2 + i : 2 + i + num_rows])
        return jnp.stack(hits, axis=-1)

    return jax.jit(hits_fn)


def emitted_per_verification(hits: np.ndarray, prompt_lens: np.ndarray) -> list[int]:
    """Return num_emitted of every verification of a plain walk over each row.

    Worked example, S = 2, prompt of 3 tokens: prefill emits x_3 (not counted), so the root is x_3
    and slot t = 2 drafts x_4, x_5. With hits[2] = (True, False) the step emits x_4 and the bonus
    x_5: num_emitted 2, the root is x_5, and slot t = 4 drafts next.
    """
    accepted = np.cumprod(hits, axis=-1).sum(axis=-1)  # [R, T']
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
    run = make_hits(
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
        parts.append(np.asarray(found))
    hits = np.concatenate(parts)
    table = {}
    for temperature in np.unique(prompts.temperatures[: len(hits)]):
        chosen = np.flatnonzero(prompts.temperatures[: len(hits)] == temperature)
        lens = prompts.prompt_lens[chosen]
        emitted = emitted_per_verification(hits[chosen], lens)
        sampled = np.arange(hits.shape[1])[None, :] >= lens[:, None] - 1
        table[f"{temperature:.1f}"] = {
            "mean_emitted": round(float(np.mean(emitted)), 3),
            "num_verifications": len(emitted),
            "agreement": np.round(hits[chosen][sampled].mean(axis=0), 3).tolist(),
        }
    return table
