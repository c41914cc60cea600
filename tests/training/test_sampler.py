"""Sampled rows against the dense forward and the shared noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device import noise
from jspec.training.data.token_stream import TokenStream
from jspec.training.dense import causal_attend, forward, lm_logits
from recipes.bundled_pair.sampler import Prompts, draw_prompts, sample_rows
from tests.training.tiny_pair import V, random_rows, tiny_target

LENGTH = 12


def prompts_of(temperatures: tuple[float, ...]) -> Prompts:
    count = len(temperatures)
    return Prompts(
        token_ids=np.asarray(random_rows(count, LENGTH)),
        prompt_lens=np.asarray([1, 3, 5, LENGTH][:count], np.int32),
        temperatures=np.asarray(temperatures, np.float32),
        seeds=np.arange(2 * count, dtype=np.uint32).reshape(count, 2),
    )


def test_every_token_is_the_argmax_of_logits_plus_noise() -> None:
    config, params = tiny_target()
    prompts = prompts_of((0.0, 0.7, 1.0, 1.0))
    rows = sample_rows(config, params, prompts, batch_size=2, dtype=jnp.float32)
    assert rows.shape == (4, LENGTH)

    @jax.jit
    def logits_of(ids: jax.Array) -> jax.Array:
        attend = causal_attend("xla")
        hidden, _ = forward(config, params, ids, dtype=jnp.float32, attend=attend)
        return lm_logits(params, hidden)

    logits = np.asarray(logits_of(jnp.asarray(rows)))
    for b, prompt_len in enumerate(prompts.prompt_lens):
        np.testing.assert_array_equal(rows[b, :prompt_len], prompts.token_ids[b, :prompt_len])
        for p in range(prompt_len, LENGTH):
            g = noise.gumbel(jnp.asarray(prompts.seeds[b]), jnp.asarray(p), jnp.arange(V))
            expected = np.argmax(logits[b, p - 1] + prompts.temperatures[b] * np.asarray(g))
            assert rows[b, p] == expected


def test_sampling_stops_between_batches_when_told() -> None:
    config, params = tiny_target()
    prompts = prompts_of((0.0, 0.0, 1.0, 1.0))
    rows = sample_rows(
        config, params, prompts, batch_size=1, dtype=jnp.float32, should_stop=lambda: True
    )
    assert len(rows) == 1


def test_a_quarter_of_the_prompts_start_a_document() -> None:
    stream = TokenStream(ids=np.arange(1000) % V, starts=np.asarray([0, 96, 960]))
    prompts = draw_prompts(
        stream,
        count=40,
        length=48,
        shortest=4,
        longest=16,
        temperatures=(0.0, 1.0),
        seed=0,
    )
    assert set(prompts.token_ids[3::4, 0].tolist()) == {0}
    assert set(prompts.prompt_lens.tolist()) <= set(range(4, 17))
    assert prompts.temperatures.tolist() == [0.0, 1.0] * 20
    assert len(np.unique(prompts.seeds, axis=0)) == 40
