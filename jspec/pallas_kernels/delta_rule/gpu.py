"""A decode or tree step of the gated delta rule on an NVIDIA GPU (Pallas-Triton).

`delta_inputs` reads what the last step left pending and this step's inputs, and `delta_states`
computes all outputs (reference.py has the formulas), for a few nodes by substitution. For many,
`delta_pairs` first solves the triangular system of each value head.

No program reads what another one writes to `pending`; a barrier separates a program's own reads and
writes. Rows of slot 0 are padding.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.gpu_inputs import run_inputs
from jspec.pallas_kernels.delta_rule.gpu_pairs import run_pairs
from jspec.pallas_kernels.delta_rule.gpu_states import run_states
from jspec.pallas_kernels.delta_rule.gpu_tree import Sizes
from jspec.pallas_kernels.delta_rule.reference import Cache
from jspec.pallas_kernels.delta_rule.tuning import FEW_NODES, Tuning, choose_tuning

LEAST_NODES = 16  # M of the smallest tensor core tile
MOST_NODES = 64


def serves(*, queries_per_row: int | None) -> bool:
    return queries_per_row is not None and queries_per_row <= MOST_NODES


def run_rows(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    cache: Cache,
    rows: AttentionMetadata,
    *,
    nodes: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hv Dv"], Cache]:
    """Compute `reference.run_rows`, the caches in place if they are donated."""
    if rows.slots is None:
        raise ValueError("slots is None; expected the slot of each row, for a recurrent layer")
    state, window = cache["state"], conv.shape[0]
    _, num_values, key_dim, value_dim = state.shape
    sizes = Sizes(
        num_keys=(inputs.shape[1] - num_values * value_dim) // (2 * key_dim),
        num_values=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        window=window,
        nodes=nodes,
        padded=pl.next_power_of_2(nodes if nodes <= FEW_NODES else max(nodes, LEAST_NODES)),
        path=cache["path"].shape[1],
        is_chain=rows.tail_mask is None,
        interpret=interpret,
    )
    tuning = tuning or choose_tuning(rows=rows.prefix_lens.shape[0], nodes=nodes)
    small, tail, pending = run_inputs(inputs, decay, conv, cache, rows, sizes, tuning)
    small |= {"decay": decay, "beta": beta}
    if not sizes.are_few:
        small |= run_pairs(small, rows, cache, sizes, tuning)
    out, state, pending = run_states(small, cache, pending, rows, sizes, tuning)
    return out, {**cache, "state": state, "conv": tail, "pending": pending}
