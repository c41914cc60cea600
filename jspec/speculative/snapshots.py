"""Copies between rows' recurrent states and snapshots; each step outputs a zero."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.device.batch import SnapshotBatch
from jspec.device.state import EngineState
from jspec.spec.cache_entry import Unit
from jspec.spec.cache_groups import groups_of_layers
from jspec.speculative.step import StepProgram
from jspec.speculative.target import Params

Stepped = tuple[EngineState, Int[Array, "1 1"]]


def restore_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: SnapshotBatch
) -> Stepped:
    """Set the state of each row from a snapshot."""
    del params
    kv = list(state.kv)
    for layer, pool in zip(_recurrent_layers(program), state.snapshots, strict=True):
        kv[layer] = program.ops.load_state(
            kv[layer], pool, slots=batch.slots, entries=batch.entries
        )
    return dataclasses.replace(state, kv=tuple(kv)), jnp.zeros((1, 1), jnp.int32)


def save_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: SnapshotBatch
) -> Stepped:
    """Copy the state of each row after its last chunk to a snapshot."""
    del params
    pools = tuple(
        program.ops.save_state(pool, state.kv[layer], slots=batch.slots, entries=batch.entries)
        for layer, pool in zip(_recurrent_layers(program), state.snapshots, strict=True)
    )
    return dataclasses.replace(state, snapshots=pools), jnp.zeros((1, 1), jnp.int32)


def _recurrent_layers(program: StepProgram) -> list[int]:
    groups = groups_of_layers(program.target.cache_groups)
    return [layer for layer, group in enumerate(groups) if group.entry.unit is Unit.SLOT]
