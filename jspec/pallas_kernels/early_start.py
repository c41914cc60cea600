"""Letting the launch after a Triton kernel begin before that kernel has ended.

XLA launches its kernels, Pallas's Triton ones too, as programmatic dependents, and makes each wait
at its first instruction for all launches before it (`griddepcontrol.wait`, seen with jax 0.11.2).
Without a word from the kernel before, that launch only begins when the kernel has ended.

Who may be launched early must not read what this kernel writes by non-coherent loads, which the
wait does not order. XLA's own fusions do, Triton's kernels and XLA's Triton products do not; so a
kernel says the word only where such a one comes next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

# Heard once all programs of the grid have said it, or ended.
_ASM = "griddepcontrol.launch_dependents;\nmov.b32 $0, $1;"


def let_next_start(index: jax.Array) -> jax.Array:
    """`index`, an i32 scalar, unchanged; from where it is used on the next launch may begin.

    For a GPU alone: no interpreter knows assembly.
    """
    one = jax.lax.broadcast(index, (1,))  # the assembly takes arrays
    (same,) = plt.elementwise_inline_asm(
        _ASM,
        args=[one],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return jnp.sum(same)
