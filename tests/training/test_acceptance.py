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
    hits = np.zeros((1, 7, 2), bool)
    hits[0, 2] = (True, False)  # emits 2: next at row 4
    hits[0, 4] = (False, True)  # a miss first: emits 1, next at row 5
    hits[0, 5] = (True, True)  # emits 3: past the end
    hits[0, 3] = (True, True)  # never visited
    assert acceptance.emitted_per_verification(hits, np.asarray([3])) == [2, 1, 3]


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
