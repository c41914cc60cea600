"""The offline simulator counts what drafting token by token would be accepted for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device import noise
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.ops import Ops
from jspec.training.dense import causal_attend, forward
from jspec.training.draft_loss import make_frozen
from recipes.bundled_pair import acceptance
from recipes.bundled_pair.sampler import Prompts, sample_rows
from tests.models.head_laws import PagedHead
from tests.training.tiny_pair import tiny_head, tiny_target

LENGTH, STEPS = 12, 2


def test_a_walk_counts_the_bonus_and_jumps_by_what_it_emitted() -> None:
    ranks = np.full((1, 7, 2), acceptance.MISS)
    ranks[0, 2] = (0, 1)  # emits 2, or 3 with a second leaf: next at row 4 or 5
    ranks[0, 4] = (1, 0)  # a miss first: emits 1, next at row 5
    ranks[0, 5] = (0, 0)  # emits 3: past the end
    ranks[0, 3] = (0, 0)  # never visited
    chain, caterpillar = (
        acceptance.emitted_per_verification(accepted(ranks), np.asarray([3]))
        for accepted in (acceptance.accepted_of_chain, acceptance.accepted_of_caterpillar)
    )
    assert chain == [2, 1, 3]
    assert caterpillar == [3, 3]


def test_rejection_sampling_is_averaged_over_every_course() -> None:
    ratios = np.random.default_rng(0).random((6, 2))

    def from_slot(t: int) -> np.ndarray:
        """Return the expected (tokens, verifications) from a verified slot on, course by course."""
        if t >= len(ratios):
            return np.zeros(2)
        first, second = ratios[t]
        chances = (1 - first, first * (1 - second), first * second)
        return np.sum(
            [
                chance * (np.asarray((k + 1, 1)) + from_slot(t + k + 1))
                for k, chance in enumerate(chances)
            ],
            axis=0,
        )

    np.testing.assert_allclose(acceptance.emitted_by_rejection(ratios, 1), from_slot(1))


@pytest.mark.slow
def test_the_simulator_equals_served_drafting() -> None:
    temperature = 1.0
    target, target_params = tiny_target()
    head, params, draft_ids = tiny_head(target, target_params)
    prompts = Prompts(
        token_ids=np.full((2, LENGTH), 7, np.int32),
        prompt_lens=np.asarray([4, 6], np.int32),
        temperatures=np.full(2, temperature, np.float32),
        seeds=np.asarray([[1, 2], [3, 4]], np.uint32),
    )
    rows = sample_rows(target, target_params, prompts, batch_size=2, dtype=jnp.float32)
    frozen = make_frozen(target_params, draft_ids)
    table = acceptance.measure_acceptance(
        target,
        head,
        params,
        frozen,
        samples=rows,
        prompts=prompts,
        num_steps=STEPS,
        batch_size=2,
        dtype=jnp.float32,
    )
    expected: list[int] = []
    _, aux = forward(
        target,
        target_params,
        jnp.asarray(rows),
        dtype=jnp.float32,
        attend=causal_attend("xla"),
        aux_layer_ids=head.aux_layer_ids,
    )
    whole = head.whole(params, target_params, jnp.asarray(draft_ids))
    paged = PagedHead(FeatureHead(head.spec, Ops()), whole)
    for b, prompt_len in enumerate(prompts.prompt_lens):
        root = int(prompt_len)
        while root - 1 < LENGTH - 1 - STEPS:
            drafts: list[int] = []
            fused = np.asarray(paged.fuse(aux[b]))
            kv, hidden, logits = paged.run(
                paged.empty(), rows[b, 1:], fused[:-1], start=0, count=root, is_prompt=True
            )
            for depth in range(STEPS):
                if depth:
                    kv, hidden, logits = paged.run(
                        kv, drafts[-1:], hidden[-1:], start=root + depth - 1
                    )
                position = jnp.asarray(root + 1 + depth)
                g = noise.gumbel(jnp.asarray(prompts.seeds[b]), position, jnp.asarray(draft_ids))
                best = int(np.argmax(np.asarray(logits[-1] + temperature * g)))
                drafts.append(int(draft_ids[best]))
            matches = np.cumprod(np.asarray(drafts) == rows[b, root + 1 : root + 1 + STEPS])
            expected.append(int(matches.sum()) + 1)
            root += expected[-1]
    row = table[f"{temperature:.1f}"]
    assert row["num_verifications"] == len(expected)
    assert row["mean_emitted"] == pytest.approx(np.mean(expected), abs=1e-3)
