"""Weights in a kernel's memory order: the same values, shapes and tokens."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format

from jspec.device.parallel import Parallel
from jspec.engine.programs.compilation import lower
from jspec.engine.transfer import shape_of
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.engine.weights.loading import place
from jspec.models.decoder_params import latent_params
from jspec.models.placement import init_params, place_of
from jspec.models.registry import table_of
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import LatentAttentionSpec
from tests.engine.test_program_store import CONFIG, KEY, LIMITS, fresh_state, make_program

LATENT = LatentAttentionSpec(
    num_heads=2, num_kv_heads=2, head_dim=16, v_dim=8, rotary_dim=8, kv_rank=16, q_rank=16
)


def orders(params: Any) -> dict[str, tuple[int, ...]]:
    """Return by path the axes of each matrix, from slowest to fastest."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path): x.format.layout.major_to_minor for path, x in flat if x.ndim > 1
    }


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("made", [False, True])
def test_only_gate_and_up_are_turned_and_no_value_changes(shards: int, made: bool) -> None:
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    tables = {"target": table_of(CONFIG)}
    make = partial(dummy_params, tables, mesh=mesh, vocab_size=CONFIG.vocab_size, dtype=jnp.float32)
    plain = make()
    if made:
        turned = make(column_major=True)
    else:
        turned = place(mesh, tables, jax.tree.map(np.asarray, plain), column_major=True)
    jax.tree.map(np.testing.assert_array_equal, turned, plain)
    jax.tree.map(
        lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim) or 1 / 0, turned, plain
    )
    found = orders(turned)
    assert {order for path, order in found.items() if "gate_up" in path} == {(1, 0)}
    assert {order for path, order in found.items() if "gate_up" not in path} == {(0, 1)}


@pytest.mark.parametrize("column_major", [False, True])
def test_k_up_and_v_up_of_latents_are_turned_on_every_backend(column_major: bool) -> None:
    """A TPU would copy them into this order in each step."""
    mesh = Parallel().mesh(jax.devices("cpu")[:1])
    for spec in latent_params(LATENT, size=32):
        order = order_of(place_of(mesh, spec, column_major=column_major))
        assert order == ((1, 0) if spec.path[-2] in ("k_up", "v_up") else None), spec.path


def order_of(place: Any) -> tuple[int, ...] | None:
    return place.layout.major_to_minor if isinstance(place, Format) else None


@dataclasses.dataclass(frozen=True, slots=True)
class TurnedOps(Ops):
    """XLA's programs over column-major weights."""

    @property
    def column_major(self) -> bool:
        return True


def test_a_step_reads_them_where_they_lie() -> None:
    """The program takes that order, copies no weight into another, and emits the same token."""
    mesh = Parallel().mesh(jax.devices("cpu")[:1])
    weights = init_params(table_of(CONFIG), seed=0)
    program, _ = make_program()
    shape = shape_of(KEY, LIMITS)
    packed = shape.packed
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
    fields["slots"][:] = (1, 2)
    emitted = []
    for ops in (OPS["xla"], TurnedOps()):
        state = fresh_state(program)
        turned = dataclasses.replace(program, target=dataclasses.replace(program.target, ops=ops))
        params = place(
            mesh, program.tables, {"target": weights, "draft": {}}, column_major=ops.column_major
        )
        step = lower(shape, turned, mesh=mesh, params=params, state=state).compile()
        taken = orders(params)
        formats, _ = jax.tree_util.tree_flatten_with_path(step.input_formats[0][0])
        for path, chosen in formats:
            name = jax.tree_util.keystr(path)
            assert name not in taken or chosen.layout.major_to_minor == taken[name]
        _, output = step(params, state, jnp.asarray(packed.pack(fields)[None]))
        emitted.append(np.asarray(output)[0])
    np.testing.assert_array_equal(emitted[0], emitted[1])
    assert emitted[0][:, 0].tolist() == [1, 1]
