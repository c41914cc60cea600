"""The tokens of each expert: those of the real tokens, whichever devices, chunks and padding."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.registry import table_of
from jspec.spec.expert_shards import on_expert_shards
from tests.speculative.engines import (
    NUM_SLOTS,
    PLAIN,
    Compiled,
    Served,
    ViewRunner,
    build,
    make_request,
    serve_view,
)
from tests.speculative.every_drafter import sharded
from tests.speculative.family_targets import MIXTURE, drawn, target_of
from tests.support.flat_limits import with_limits

FAMILY = "gpt_oss"


def requests_of() -> list[Request]:
    return [
        make_request(i, prompt_len=n, seed=40 + i, max_new_tokens=9, ignore_eos=True)
        for i, n in enumerate((29, 5, 18))
    ]


def engine(ranks: int, experts: int) -> Compiled:
    target = target_of(FAMILY)
    table = table_of(on_expert_shards(target, ranks * experts, data_shards=ranks))
    return build(
        PLAIN,
        page_size=4,
        variants=(StepOptions(),),
        params=(sharded(table, drawn(target), experts), {}),
        target_spec=target,
        shards=experts,
        ranks=ranks,
        experts=experts,
        ranks_share_experts=True,
        counts_experts=True,
    )


def counted(compiled: Compiled, *, chunk_size: int) -> tuple[Served, np.ndarray]:
    """Serve the requests, without a step ahead of the one that is read; return the counts."""
    limits = with_limits(
        compiled.limits,
        prefill_buckets=(chunk_size,),
        overlap_depth=0,
    )
    view = ViewRunner(compiled.runner(), limits)
    served = asyncio.run(serve_view(view, requests_of()))
    return served, view.runner.expert_counts()


@pytest.mark.slow
def test_counts_are_those_of_the_real_tokens() -> None:
    one = engine(1, 1)
    served, counts = counted(one, chunk_size=8)
    assert counts.shape == (2, MIXTURE.num_experts)
    chunks = [chunk for plan, _ in served.steps for chunk in plan.chunks]
    decoded = sum(len(plan.rows) for plan, _ in served.steps if not plan.is_prefill)
    num_prompt = sum(len(chunk.token_ids) for chunk in chunks)
    assert num_prompt == 29 + 5 + 18
    assert decoded < NUM_SLOTS * len(served.steps)  # some rows are padding
    # The last layer runs one token of each chunk, whose output is needed.
    tokens = np.array([num_prompt + decoded, len(chunks) + decoded])
    np.testing.assert_array_equal(counts.sum(axis=1), MIXTURE.top_k * tokens)
    assert (counts.max(axis=1) <= tokens).all()

    other, in_larger_chunks = counted(one, chunk_size=32)
    np.testing.assert_array_equal(in_larger_chunks[0], counts[0])
    assert in_larger_chunks[1].sum() < counts[1].sum()
    found, of_ranks = counted(engine(2, 1), chunk_size=8)
    assert found.ids == other.ids == served.ids
    np.testing.assert_array_equal(of_ranks[0], counts[0])
