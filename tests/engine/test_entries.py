"""Entries inside a shard_map: each data rank has its own packed batch and its own output."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec.device.parallel import Parallel
from jspec.engine.programs.compilation import of_rank
from jspec.engine.steps.step_def import BY_RANK
from jspec.messages.layout import PackedLayout

PACKED = PackedLayout((("slots", (2,)), ("grants", (1, 3))))


def first_page_of_each_row(page: jax.Array, state: jax.Array, flat: jax.Array) -> Any:
    fields = PACKED.unpack(flat)
    return state, {"slots": fields["slots"], "pages": page + fields["grants"][:, 2]}


@pytest.mark.parametrize("degrees", [Parallel(), Parallel(data=2), Parallel(tensor=2)], ids=str)
def test_a_packed_batch_goes_to_its_rank_and_its_output_comes_back(degrees: Parallel) -> None:
    count = degrees.data * degrees.tensor
    mesh = degrees.mesh(jax.devices("cpu")[:count])
    whole, own = PartitionSpec(), BY_RANK
    run = jax.jit(
        jax.shard_map(
            of_rank(first_page_of_each_row),
            mesh=mesh,
            in_specs=(whole, whole, own),
            out_specs=(whole, own),
            check_vma=False,
        )
    )
    slots, grants = np.arange(8, dtype=np.int32), np.arange(24, dtype=np.int32)
    batches = [
        PACKED.pack({"slots": slots[2 * r :][:2], "grants": grants[3 * r :][:3].reshape(1, 3)})
        for r in range(degrees.data)
    ]
    state, output = run(100, 7, jax.device_put(np.stack(batches), NamedSharding(mesh, BY_RANK)))
    assert int(state) == 7
    assert np.asarray(output["slots"]).tolist() == [[0, 1], [2, 3]][: degrees.data]
    assert np.asarray(output["pages"]).tolist() == [[102], [105]][: degrees.data]
