"""Every sampling parameter, alone and mixed, against a plainly written sampler.

The reference runs the model densely over the whole text for each token, changes and filters the
logits in numpy as the parameters' documentation specifies, and replays the noise of the position.
Speculation must write the same text.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device import noise
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from tests.speculative.engines import (
    TARGET,
    dense_logits,
    dial_for,
    engine,
    make_request,
    serve,
)

V = TARGET.vocab_size
ALONE: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.2, "temperature": 0.2},
    {"presence_penalty": -1.5, "temperature": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0.3},
    {"repetition_penalty": 0.7, "temperature": 0.0},
    {"logit_bias": ((11, 3.0), (200, 2.5), (40, -100.0))},
    {"min_new_tokens": 9, "stop_token_ids": (11, 60), "logit_bias": ((11, 12.0),)},
    {"top_k": 12},
    {"top_p": 0.7},
    {"min_p": 0.05},
)
MIXED: dict[str, Any] = {
    "frequency_penalty": 0.6,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": ((7, 1.5), (301, -2.0), (150, 2.0)),
    "top_k": 60,
    "top_p": 0.9,
    "min_p": 0.005,
    "temperature": 0.8,
}
NEW_TOKENS = 20


@functools.cache
def requests() -> tuple[Request, ...]:
    return tuple(
        make_request(i, prompt_len=6 + i, seed=500 + i, max_new_tokens=NEW_TOKENS, **own)
        for i, own in enumerate(
            (*ALONE, MIXED, {**MIXED, "temperature": 0.0}, {**MIXED, "speculative": False})
        )
    )


@jax.jit
def noise_at(seed: jax.Array, position: jax.Array) -> jax.Array:
    ids = jnp.arange(V, dtype=jnp.int32)
    return noise.gumbel(seed[None, None], position[None, None], ids)[0, 0]


def changed(logits: np.ndarray, request: Request, output: list[int]) -> np.ndarray:
    """Return the logits after penalties, bias and minimum length."""
    sampling = request.sampling
    x = logits.astype(np.float32).copy()
    for v in {*request.prompt_ids, *output}:
        x[v] = (
            x[v] / sampling.repetition_penalty if x[v] > 0 else x[v] * sampling.repetition_penalty
        )
    for v in set(output):
        x[v] -= sampling.frequency_penalty * output.count(v) + sampling.presence_penalty
    for v, bias in sampling.logit_bias:
        x[v] += bias
    if len(output) < sampling.min_new_tokens:
        x[list(request.stop_ids)] = -np.inf
    return x


def kept(x: np.ndarray, request: Request) -> np.ndarray:
    """Return the tokens that top-k, top-p and min-p keep, all of one distribution."""
    sampling = request.sampling
    scaled = x.astype(np.float64) / (sampling.temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-scaled, kind="stable")
    before = np.empty(V)  # mass of more likely tokens
    before[order] = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    rank = np.empty(V, int)
    rank[order] = np.arange(V)
    most = sampling.top_k if sampling.top_k > 0 else V
    return (rank < most) & (before < sampling.top_p) & (p >= sampling.min_p * p.max())


@functools.cache
def replayed(request: Request) -> tuple[int, ...]:
    """Return the text of a sampler without speculation."""
    sampling = request.sampling
    seed = jnp.asarray([request.seed >> 32, request.seed & 0xFFFFFFFF], jnp.uint32)
    output: list[int] = []
    while len(output) < sampling.wanted_tokens:
        ids = request.prompt_ids + tuple(output)
        x = changed(dense_logits(ids)[-1], request, output)
        g = np.asarray(noise_at(seed, jnp.int32(len(ids))))
        perturbed = x + np.float32(sampling.temperature) * g
        if sampling.temperature:
            perturbed = np.where(kept(x, request), perturbed, -np.inf)
        output.append(int(np.argmax(perturbed)))
        if output[-1] in request.stop_ids and len(output) > sampling.min_new_tokens:
            break
    return tuple(output)


def test_the_text_is_the_plain_samplers() -> None:
    asked = list(requests())
    expected = [replayed(request) for request in asked]
    compiled = engine((3, 2, 7), 16, options=SAMPLING)
    served = serve(compiled, asked[:8], dial=dial_for(asked[:8], expected[:8]))
    for i, request in enumerate(asked[:8]):
        assert served.ids[i] == expected[i], request.sampling
    again = serve(compiled, asked[8:], dial=dial_for(asked[8:], expected[8:]))
    assert list(again.ids) == expected[8:]
    assert set(again.accepted[-1]) == {0}  # the request with speculation off
    assert again.per_request[-1].verify_ct == 0
    assert max(max(row) for row in (*served.accepted, *again.accepted)) >= 2


def test_what_is_asked_for_changes_the_text() -> None:
    """Each parameter matters here, so that leaving one out would show."""
    for request in requests():
        neutral = make_request(
            0,
            prompt_len=len(request.prompt_ids),
            seed=request.seed,
            max_new_tokens=NEW_TOKENS,
            temperature=request.sampling.temperature,
        )
        assert neutral.prompt_ids == request.prompt_ids
        assert replayed(neutral) != replayed(request), request.sampling
