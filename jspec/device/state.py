"""Device state between two steps: immutable pytrees, donated from step to step.

Slot 0 and page 0 of every array are dummies, which padding reads and writes; no result depends on
their contents. Arrays begin with slots or pages, sharded over data ranks; a step sees its own
rank's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.parallel import partition_spec
from jspec.device.peers import Peers
from jspec.device.pytree import pytree
from jspec.messages.sampling_rows import SAMPLING_ROWS
from jspec.spec.axes import MESH
from jspec.spec.cache_entry import CacheLayout, axes_of
from jspec.spec.cache_groups import CacheGroup, snapshot_groups

# One per layer: the array of its cache entry, or a dict of several (spec/cache_entry.py).
Caches = tuple[Any, ...]


@pytree
class SamplingBatch:
    """Sampling parameters of each row, by slot inside RowState, by batch row once gathered. They
    are arrays, so no setting causes a compilation; the order is that of SAMPLING_FIELDS."""

    min_new_tokens: jax.Array  # i32[.]
    temperature: jax.Array  # f32[.], >= 0
    top_k: jax.Array  # i32[.], V or more keeps all
    top_p: jax.Array  # f32[.], in (0, 1]
    min_p: jax.Array  # f32[.], in [0, 1]
    frequency_penalty: jax.Array  # f32[.]
    presence_penalty: jax.Array  # f32[.]
    repetition_penalty: jax.Array  # f32[.], > 0
    logit_bias: jax.Array  # i32[., 300, 2], token id and the bits of its bias, padded with V
    seed: jax.Array  # u32[., 2], high and low word
    stop_ids: jax.Array  # i32[., 16], padded with V (no token)
    logprob_start: jax.Array  # i32[.], first prompt position with a log-probability
    logprob_ids: jax.Array  # i32[., 32], padded with V
    speculative: jax.Array  # i32[.], 0: no draft is accepted


@pytree
class Seen:
    output_counts: jax.Array  # i32[slots, V], how often each id was emitted
    prompt_marks: jax.Array  # i8[slots, V], 1 where the prompt has the id


SEEN_SPEC = partition_spec(("units", "vocab"))


@pytree
class RowState:
    root_ids: jax.Array  # i32[slots], last emitted token, whose KV is not yet written
    seq_lens: jax.Array  # i32[slots], L: KV of tokens 0..L-1 is valid, the root is token L
    prompt_lens: jax.Array  # i32[slots], tokens that count as prompt, not output
    page_table: jax.Array  # i32[slots, P] of the full space, 0 = the dummy page
    sampling: SamplingBatch
    seen: Seen
    # Page tables of the window spaces, by window: i32[slots, P]. Entries of freed pages are not
    # cleared. A kernel may load such a page, which then has another row's KV; it is finite
    # (kv_write) and masked, and all writes go to L and after, where every entry is the row's
    # own page or 0.
    window_tables: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    lora_slots: jax.Array | None = None  # i32[slots], 0: no adapter; None: an engine without LoRA


@pytree
class EngineState:
    kv: Caches
    draft_kv: Caches
    draft: Any  # the drafter's own pytree
    rows: RowState
    pending: Any = None  # tokens (speculative/drafters/pending.py), if steps may be plain
    snapshots: Caches = ()  # of the target's recurrent layers, in order
    peers: Peers | None = None  # of the tensor axis, where a kernel adds over it
    # u32[ranks, L, X], real tokens of each expert of each layer, modulo 2 ** 32; None: not counted
    expert_counts: jax.Array | None = None


def empty_caches(
    groups: tuple[CacheGroup, ...],
    *,
    layout: CacheLayout,
    num_units: Callable[[CacheGroup], int],
    mesh: Mesh | None = None,
) -> Caches:
    """Return zeroed caches, one per layer, on `mesh`. num_units: of a group, dummies included."""

    def empty(group: CacheGroup) -> Any:
        arrays = group.entry.arrays(num_units(group), layout)
        places = dict.fromkeys(arrays)
        if mesh is not None:
            places = {n: NamedSharding(mesh, partition_spec(x.axes)) for n, x in arrays.items()}
        return _cache_of(
            {n: jnp.zeros(x.shape, x.dtype, device=places[n]) for n, x in arrays.items()}
        )

    return tuple(empty(group) for group in groups for _ in range(group.num_layers))


def cache_specs(groups: tuple[CacheGroup, ...]) -> tuple[Any, ...]:
    return tuple(
        _cache_of({name: partition_spec(axes) for name, axes in axes_of(g.entry).items()})
        for g in groups
        for _ in range(g.num_layers)
    )


def _cache_of(arrays: dict[str, Any]) -> Any:
    (first, *others) = arrays.values()
    return arrays if others else first


def state_specs(
    state: EngineState, groups: tuple[CacheGroup, ...], draft_groups: tuple[CacheGroup, ...]
) -> EngineState:
    specs = jax.tree.map(lambda _: partition_spec(("units",)), state)  # also of expert_counts
    seen = jax.tree.map(lambda _: SEEN_SPEC, state.rows.seen)
    return dataclasses.replace(
        specs,
        kv=cache_specs(groups),
        draft_kv=cache_specs(draft_groups),
        snapshots=cache_specs(snapshot_groups(groups)) if state.snapshots else (),
        peers=jax.tree.map(lambda _: PartitionSpec(*MESH), state.peers),
        rows=dataclasses.replace(specs.rows, seen=seen),
    )


def empty_sampling(num_slots: int, *, vocab_size: int) -> SamplingBatch:
    """Return greedy rows without stop ids: the neutral values of SAMPLING_FIELDS."""
    neutral = {  # numpy: jnp.full would compile a program per shape and dtype
        name: np.full((num_slots, *row.shape), row.neutral_value(vocab_size), row.dtype)
        for name, row in SAMPLING_ROWS.items()
    }
    return SamplingBatch(**{name: jnp.asarray(value) for name, value in neutral.items()})


def empty_rows(
    num_slots: int,
    *,
    pages_per_row: int,
    vocab_size: int,
    num_columns: int | None = None,
    windows: tuple[int, ...] = (),
    has_loras: bool = False,
) -> RowState:
    """Return the state without requests; num_slots includes slot 0. num_columns: of the logits."""
    seen = (num_slots, vocab_size if num_columns is None else num_columns)
    table = jnp.zeros((num_slots, pages_per_row), jnp.int32)
    return RowState(
        root_ids=jnp.zeros((num_slots,), jnp.int32),
        seq_lens=jnp.zeros((num_slots,), jnp.int32),
        prompt_lens=jnp.zeros((num_slots,), jnp.int32),
        page_table=table,
        window_tables={window: jnp.zeros_like(table) for window in windows},
        sampling=empty_sampling(num_slots, vocab_size=vocab_size),
        seen=Seen(output_counts=jnp.zeros(seen, jnp.int32), prompt_marks=jnp.zeros(seen, jnp.int8)),
        lora_slots=jnp.zeros((num_slots,), jnp.int32) if has_loras else None,
    )


def empty_seen(seen: Seen, slots: jax.Array) -> Seen:
    return jax.tree.map(lambda x: x.at[slots].set(0, mode="promise_in_bounds"), seen)


def take_rows(tree: Any, slots: jax.Array) -> Any:
    """Gather row `slots[b]` of every per-slot array of `tree`."""
    return jax.tree.map(lambda x: x.at[slots].get(mode="promise_in_bounds"), tree)


def put_rows(tree: Any, slots: jax.Array, values: Any) -> Any:
    """Scatter values[b] to row slots[b] of every per-slot array."""
    return jax.tree.map(
        lambda x, v: x.at[slots].set(v.astype(x.dtype), mode="promise_in_bounds"), tree, values
    )
