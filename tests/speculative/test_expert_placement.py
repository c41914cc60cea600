"""Experts placed by a map, some replicated, write the text of the model's own order."""

from __future__ import annotations

import numpy as np
import pytest

from jspec.config.expert_placement import ExpertMap, balanced
from jspec.messages.step_options import StepOptions
from jspec.models.heads.head_params import head_params
from jspec.models.params import with_expert_map
from jspec.models.registry import table_of
from jspec.spec.expert_shards import experts_by_layer, on_expert_shards
from tests.speculative.engines import (
    DRAFT,
    PLAIN,
    Compiled,
    build,
    dial_for,
    serve,
    spares_of,
    spec_of,
    tiny_params,
)
from tests.speculative.every_drafter import sharded
from tests.speculative.family_targets import drawn, target_of
from tests.speculative.test_expert_parallel import CHAIN, NONE, TREE, plain_texts, requests_of

# (ranks, experts), of which each of the first has all experts or shares them
MESHES = ((1, 2), (1, 4), (2, 2))
IN_CI = {("qwen3_moe", (1, 4), TREE)}


def map_of(family: str, num_devices: int) -> ExpertMap:
    """Return a map with as many spares as devices, of another use in each layer."""
    uses = ([1, 9, 2, 4], [7, 1, 1, 8], [3, 5, 1, 2])
    experts = experts_by_layer(target_of(family))
    found = tuple(
        balanced(use, num_spares=num_devices, num_devices=num_devices) if count else ()
        for use, count in zip(uses, experts, strict=False)
    )
    for placed in filter(None, found):
        assert list(placed) != sorted(placed)
    return found


def engine(family: str, shape: tuple[int, int, int], mesh: tuple[int, int]) -> Compiled:
    ranks, experts = mesh
    target, placed = target_of(family), map_of(family, ranks * experts)
    spares = spares_of(placed, target)
    split = on_expert_shards(target, ranks * experts, data_shards=ranks, spares=spares)
    table = with_expert_map(table_of(split), placed)
    params = sharded(table, drawn(target), experts, stored=table_of(target))
    head = {} if shape == NONE else sharded(head_params(DRAFT), tiny_params()[1], experts)
    return build(
        PLAIN if shape == NONE else spec_of(*shape),
        page_size=4,
        variants=(StepOptions(),),
        params=(params, head),
        target_spec=target,
        shards=experts,
        ranks=ranks,
        experts=experts,
        ranks_share_experts=True,
        expert_map=placed,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "shape"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.exhaustive)
        for family in ("qwen3_moe", "gpt_oss", "gemma4")
        for mesh in MESHES
        for shape in (CHAIN, TREE)
        for case in [(family, mesh, shape)]
    ],
)
def test_placed_experts_write_the_text_of_one_device(
    family: str, mesh: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    requests, expected = requests_of(), plain_texts(family)
    assert len(set(expected)) == len(requests)
    served = serve(
        engine(family, shape, mesh), requests, chunk_size=8, dial=dial_for(requests, expected)
    )
    assert list(served.ids) == expected
    assert np.all(served.counters.accept_histogram)
