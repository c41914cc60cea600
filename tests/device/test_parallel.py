"""Degrees of parallelism, and the one table from logical axes to mesh axes."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jspec.device.parallel import Parallel, partition_spec
from jspec.device.state import EngineState, empty_rows, state_specs
from jspec.errors import ConfigError
from jspec.spec.axes import DATA, EXPERT, MESH, MESH_AXES, MODEL, TENSOR, Axis
from jspec.spec.cache_entry import KV, Record, State
from jspec.spec.cache_groups import CacheGroup


def test_every_logical_axis_has_a_place() -> None:
    assert set(MESH_AXES) == set(typing.get_args(Axis))
    assert set(MESH_AXES.values()) == {*MESH, MODEL, (DATA, EXPERT), None}


def test_dimensions_are_sharded_by_their_axes() -> None:
    experts = partition_spec(("experts", "embed", "expert_mlp"))
    assert experts == PartitionSpec(EXPERT, None, TENSOR)
    assert partition_spec(("embed", "mlp")) == PartitionSpec(None, (EXPERT, TENSOR))
    assert partition_spec(("rank", None)) == PartitionSpec(DATA, None)
    assert partition_spec(()) == PartitionSpec()


def test_all_state_is_sharded_over_ranks_and_the_pools_heads_and_the_ids_seen_over_shards() -> None:
    groups = (CacheGroup("a", 2, KV(2, 8, 8)),)
    draft = (CacheGroup("b", 1, KV(2, 8, 8)),)
    rows = empty_rows(2, pages_per_row=1, vocab_size=8, windows=(4,))
    state = EngineState(kv=(jnp.zeros(1),) * 2, draft_kv=(jnp.zeros(1),), draft={}, rows=rows)
    specs = state_specs(state, groups, draft)
    pool, by_id = PartitionSpec(DATA, None, MODEL, None), PartitionSpec(DATA, MODEL)
    assert (specs.kv, specs.draft_kv) == ((pool, pool), (pool,))
    assert specs.rows.seen.output_counts == specs.rows.seen.prompt_marks == by_id
    others = {spec for spec in jax.tree.leaves(specs) if spec not in (pool, by_id)}
    assert others == {PartitionSpec(DATA)}


def test_snapshots_are_sharded_as_the_states() -> None:
    record = Record("state", (4, 2), ("heads", None))
    groups = (CacheGroup("a", 1, KV(2, 8, 8)), CacheGroup("b", 2, State((record,), 6)))
    rows = empty_rows(2, pages_per_row=1, vocab_size=8)
    state = EngineState(kv=(), draft_kv=(), draft={}, rows=rows)
    assert state_specs(state, groups, ()).snapshots == ()
    state = dataclasses.replace(state, snapshots=(jnp.zeros(1),) * 2)
    specs = state_specs(state, groups, ())
    assert specs.snapshots == (PartitionSpec(DATA, MODEL, None),) * 2
    assert [own["state"] for own in specs.kv[1:]] == [*specs.snapshots]


def test_a_mesh_has_the_degrees_in_their_order() -> None:
    devices = jax.devices("cpu")[:2]
    mesh = Parallel(1, 1, 2, 1).mesh(devices)
    assert dict(mesh.shape) == {"data": 1, "expert": 1, "tensor": 2}
    assert Parallel.of(mesh) == Parallel(tensor=2)
    assert [Parallel.of(mesh).shards(axis) for axis in ("heads", "experts", "embed")] == [2, 1, 1]
    both = Parallel(expert=2, tensor=3)
    assert [both.shards(axis) for axis in ("heads", "experts", "expert_mlp")] == [6, 2, 3]
    assert both.model == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parallel(tensor=0), "tensor is 0; expected at least 1"),
        (lambda: Parallel(tensor=2, hosts=3), "hosts is 3; expected a divisor of 2"),
        (
            lambda: Parallel(data=2).mesh(jax.devices("cpu")[:1]),
            r"devices is 1; expected data 2 \* expert 1 \* tensor 1",
        ),
        (lambda: Parallel(tensor=2, hosts=2).check_served(), "hosts is 2; expected 1"),
    ],
)
def test_a_wrong_degree_is_named(make: typing.Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_all_axes_of_one_host_are_served() -> None:
    Parallel(4, 2, 2, 1).check_served()
