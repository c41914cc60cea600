"""A decode or tree step of the gated delta rule on a TPU: one launch reads and writes the states.

A grid step copies the states of one row and a block of value heads from HBM to VMEM and back, in
place. XLA computes what is as small as a step's tokens (reference.py has the formulas). Products
are float32's, six passes of the MXU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jspec.device.state import put_rows, take_rows
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule import reference
from jspec.pallas_kernels.delta_rule.reference import Cache

LANES = 128
BLOCK_HEADS = 8  # 512 KiB of states of 128 x 128: more than HBM delivers in one copy's latency


def serves(state: jax.Array) -> bool:
    """Return whether states [slots, Hv, Dk, Dv] are whole vectors."""
    return state.shape[2] % LANES == 0 and state.shape[3] % LANES == 0


def run_rows(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    cache: Cache,
    rows: AttentionMetadata,
    *,
    nodes: int,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hv Dv"], Cache]:
    """Compute `reference.run_rows`, the states in place if they are donated."""
    if rows.slots is None:
        raise ValueError("slots is None; expected the slot of each row, for a recurrent layer")
    state, is_fresh = cache["state"], rows.prefix_lens == 0
    own = take_rows({name: cache[name] for name in ("conv", "pending", "path")}, rows.slots)
    last = reference.accepted({**own, "state": state}, is_fresh=is_fresh)
    given = (inputs, decay, beta, conv, last.tail, rows)
    tokens, sees, new = reference.tokens_of_rows(*given, like=state)
    system = reference.system_of(tokens, sees)
    solve = jax.scipy.linalg.solve_triangular(
        system.matrix,
        jnp.eye(nodes) * jnp.moveaxis(tokens.beta, -1, -2)[..., None, :],
        lower=True,
        unit_diagonal=True,
    )
    grown = jnp.exp(system.total)[..., None]
    repeats = tokens.v.shape[2] // tokens.k.shape[2]
    fading = jnp.exp(last.total[:, None] - last.decays)[..., None]
    small = {
        "k": jnp.swapaxes(grown * system.keys, 1, 2),
        "q": jnp.swapaxes(grown * system.queries, 1, 2),
        "v": jnp.swapaxes(tokens.v, 1, 2),
        "solve": solve,
        "near": system.near,
        "old_k": jnp.swapaxes(jnp.repeat(last.keys, repeats, axis=2), 1, 2),
        "old_u": jnp.swapaxes(last.updates * fading, 1, 2),
        "carried": jnp.broadcast_to(
            jnp.exp(last.total)[..., None, None], (*last.total.shape, 1, state.shape[3])
        ),
    }
    out, updates, state = _launch(rows.slots, is_fresh, small, state, interpret=interpret)
    flat = reference.flat_pending(tokens, jnp.swapaxes(updates, 1, 2), system.total, new)
    pending = own["pending"].at[:, :nodes].set(flat, mode="promise_in_bounds")
    after = {"conv": last.tail, "pending": pending}
    stored = put_rows({name: cache[name] for name in after}, rows.slots, after)
    out = jnp.swapaxes(out, 1, 2)
    return out.reshape(-1, *out.shape[2:]), {**cache, **stored, "state": state}


def _launch(
    slots: jax.Array,
    is_fresh: jax.Array,
    small: dict[str, jax.Array],
    state: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (outputs, updates), both [B, Hv, N, Dv], and the states."""
    batch, num_heads, nodes, value_dim = small["v"].shape
    block = next(n for n in range(min(BLOCK_HEADS, num_heads), 0, -1) if num_heads % n == 0)

    def of_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, *x.shape[2:]), lambda b, h, *_: (b, h, 0, 0))

    of_slot = pl.BlockSpec((1, block, *state.shape[2:]), lambda b, h, slots, _: (slots[b], h, 0, 0))
    result = jax.ShapeDtypeStruct((batch, num_heads, nodes, value_dim), jnp.float32)
    found: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        partial(_run_heads, names=tuple(small)),
        out_shape=(result, result, jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_heads // block),
            in_specs=[*(of_row(x) for x in small.values()), of_slot],
            out_specs=[of_row(result), of_row(result), of_slot],
        ),
        input_output_aliases={2 + len(small): 2},
        interpret=pltpu.InterpretParams() if interpret else False,
        name="delta_states",
    )(slots, is_fresh.astype(jnp.int32), *small.values(), state)
    return found


def _run_heads(_: Any, fresh: Any, *refs: Any, names: tuple[str, ...]) -> None:
    given = dict(zip(names, refs, strict=False))
    before, out, updates, after = refs[len(names) :]
    is_fresh = fresh[pl.program_id(0)] > 0

    def product(a: jax.Array, b: jax.Array, *, turned: bool = False) -> jax.Array:
        axes = (((0 if turned else 1,), (0,)), ((), ()))
        exact = lax.Precision.HIGHEST
        return lax.dot_general(a, b, axes, precision=exact, preferred_element_type=jnp.float32)

    for head in range(before.shape[1]):
        of_head = {name: ref[0, head] for name, ref in given.items()}
        state = jnp.where(is_fresh, 0.0, before[0, head] * of_head["carried"])
        state = state + product(of_head["old_k"], of_head["old_u"], turned=True)
        after[0, head] = state
        update = product(of_head["solve"], of_head["v"] - product(of_head["k"], state))
        updates[0, head] = update
        out[0, head] = product(of_head["q"], state) + product(of_head["near"], update)
