"""Chunks of prompts through the gated delta rule on an NVIDIA GPU (Pallas-Triton).

`delta_blocks`, a program for each block of 64 tokens and value head, solves the block's system:
all that does not depend on the state. `delta_chunks`, a program for each row, value head and strip
of V, has its part of the state in registers and runs the row's blocks one after the other
(reference.py has the formulas). The convolution and norms before them are XLA's.

A system is inverted in two steps. The 16 x 16 blocks of its diagonal are substituted row by row, in
float32; with X their inverse and L what is left of them, the inverse Y of the system solves
Y = X - X L Y, which four rows of blocks make exact after three rounds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.delta_rule.gpu_tree import CHANNELS, NEVER, Dims
from jspec.pallas_kernels.delta_rule.reference import BlockPlaces, Tokens, most_blocks
from jspec.pallas_kernels.delta_rule.tuning import ChunkTuning, choose_chunks

BLOCK = 64  # tokens of a system
PART = 16  # rows of a system that are substituted one after the other
LEAST_DIM = 16  # K of the smallest tensor core tile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes(Dims):
    repeats: int  # value heads of a key head
    parts: int  # of a state, each with as many channels of keys

    @property
    def some(self) -> int:
        """Channels of keys in a step of a product over them."""
        return min(CHANNELS, self.wide_key)


def serves(state: jax.Array) -> bool:
    """Return whether states [slots, Hv, Dk, Dv] are at least as wide as a tensor core's tile."""
    return min(state.shape[2:]) >= LEAST_DIM


def run_blocks(
    states: Float[Array, "R Hv Dk Dv"],
    tokens: Tokens,
    cu_q_lens: Int[Array, "R1"],
    *,
    tuning: ChunkTuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hv Dv"], Float[Array, "R Hv Dk Dv"]]:
    """Compute `reference.run_blocks`, the states in place if they are donated."""
    _, num_values, key_dim, value_dim = states.shape
    tuning = tuning or choose_chunks()
    sizes = _Sizes(
        repeats=num_values // tokens.k.shape[1],
        key_dim=key_dim,
        value_dim=value_dim,
        parts=max(1, pl.next_power_of_2(key_dim) // tuning.channels),
        interpret=interpret,
    )
    places = BlockPlaces.of(cu_q_lens, BLOCK)
    solved = _solve(tokens, places, sizes, tuning)
    out, states = _run(states, tokens, places, solved, sizes, tuning)
    is_token = jnp.arange(out.shape[0]) < cu_q_lens[-1]
    return jnp.where(is_token[:, None, None], out, 0), states


def _solve(
    tokens: Tokens, places: BlockPlaces, sizes: _Sizes, tuning: ChunkTuning
) -> dict[str, jax.Array]:
    """Return what does not depend on the state, of each block and value head."""
    size, num_values, _ = tokens.v.shape
    num_blocks = most_blocks(size, rows=places.ends.shape[0], block=BLOCK)
    _, first, last = places.at(jnp.arange(num_blocks, dtype=jnp.int32))
    widths = {
        "keys": (BLOCK, sizes.key_dim),  # T (b * e^G * K)
        "given": (BLOCK, sizes.value_dim),  # T (b * V)
        "near": (BLOCK, BLOCK),  # D * Q K^T
        "total": (BLOCK,),  # G
        "system": (BLOCK, BLOCK),  # of this launch alone
    }
    found = pl.pallas_call(
        functools.partial(_solve_block, sizes=sizes),
        grid=(num_blocks, num_values),
        out_shape=[
            jax.ShapeDtypeStruct((num_blocks, num_values, *each), jnp.float32)
            for each in widths.values()
        ],
        compiler_params=plt.CompilerParams(num_warps=tuning.solve_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_blocks",
    )(first, last, tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta)
    return dict(zip(widths, found[:-1], strict=False))


def _solve_block(*refs: Any, sizes: _Sizes) -> None:
    firsts, lasts, queries, keys, values, decay, beta, *outs = refs
    keys_out, given_out, near_out, total_out, system_out = outs
    nth, value = pl.program_id(0), pl.program_id(1)
    first, last = plt.load(firsts.at[nth]), plt.load(lasts.at[nth])

    @pl.when(first < last)
    def _() -> None:
        place = jnp.arange(BLOCK, dtype=jnp.int32)
        own = _Block(nth, value, value // sizes.repeats, first + place, first + place < last, sizes)
        step = plt.load(decay.at[own.token, value], mask=own.valid, other=0.0)
        size = plt.load(beta.at[own.token, value], mask=own.valid, other=0.0)
        is_seen = place[None] <= place[:, None]
        total = jnp.sum(jnp.where(is_seen, step[None], 0.0), axis=1)
        plt.store(total_out.at[nth, value, place], total)
        alike, near = _likeness(queries, keys, own)
        fade = jnp.exp(jnp.where(is_seen, total[:, None] - total[None], NEVER))
        plt.store(near_out.at[nth, value, place[:, None], place[None]], fade * near)
        system = jnp.where(place[None] < place[:, None], size[:, None] * fade * alike, 0.0)
        solve = _inverse(system, system_out, own) * size[None]
        _multiply(solve, keys, own.head, keys_out, own, scale=jnp.exp(total))
        _multiply(solve, values, value, given_out, own, scale=None)


@dataclass(frozen=True, slots=True)
class _Block:
    """A program's block of tokens. token: their places among all, of which some are `valid`."""

    nth: jax.Array
    value: jax.Array
    head: jax.Array  # of keys and queries
    token: jax.Array
    valid: jax.Array
    sizes: _Sizes

    def rows(self, ref: Any, head: jax.Array, channel: jax.Array) -> jax.Array:
        """Load some channels of the tokens' vectors of a head: [64, channels]."""
        mask = self.valid[:, None] & (channel < ref.shape[2])[None]
        return plt.load(ref.at[self.token[:, None], head, channel[None]], mask=mask, other=0.0)

    def columns(self, ref: Any, head: jax.Array, channel: jax.Array) -> jax.Array:
        """Load `rows`, turned."""
        mask = self.valid[None] & (channel < ref.shape[2])[:, None]
        return plt.load(ref.at[self.token[None], head, channel[:, None]], mask=mask, other=0.0)


def _likeness(queries: Any, keys: Any, own: _Block) -> tuple[jax.Array, jax.Array]:
    """Return (K K^T, Q K^T), by a few channels at a time: whole operands would fill registers."""
    sizes = own.sizes

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        channel = step * sizes.some + jnp.arange(sizes.some, dtype=jnp.int32)
        q, k = (own.rows(ref, own.head, channel) for ref in (queries, keys))
        turned = own.columns(keys, own.head, channel)
        return carry[0] + sizes.product(k, turned), carry[1] + sizes.product(q, turned)

    nothing = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    return lax.fori_loop(0, sizes.wide_key // sizes.some, add, (nothing, nothing))


def _inverse(system: jax.Array, memory: Any, own: _Block) -> jax.Array:
    """Return the inverse of I + system. memory: for parts of the system, which are read again."""
    place, sizes = jnp.arange(BLOCK, dtype=jnp.int32), own.sizes
    whole = memory.at[own.nth, own.value, place[:, None], place[None]]
    plt.store(whole, system)
    sizes.barrier()
    step = jnp.arange(PART, dtype=jnp.int32)
    start = PART * jnp.arange(BLOCK // PART, dtype=jnp.int32)
    row, column = step[None, :, None], step[None, None]

    def substitute(nth: jax.Array, found: jax.Array) -> jax.Array:
        """Make row `nth` of each part exact from the rows before it."""
        at = (start + nth)[:, None], start[:, None] + step[None]
        weights = plt.load(memory.at[own.nth, own.value, at[0], at[1]])
        change = jnp.sum(weights[:, :, None] * found, axis=1)
        return found - jnp.where(row == nth, change[:, None], 0.0)

    parts = jnp.broadcast_to(jnp.where(row == column, 1.0, 0.0), (BLOCK // PART, PART, PART))
    parts = lax.fori_loop(1, PART, substitute, parts)
    sizes.barrier()
    at = start[:, None, None] + row, start[:, None, None] + column
    plt.store(memory.at[own.nth, own.value, at[0], at[1]], parts)
    sizes.barrier()
    is_part = place[:, None] // PART == place[None] // PART
    diagonal = plt.load(whole, mask=is_part, other=0.0)
    left = plt.load(whole, mask=jnp.logical_not(is_part), other=0.0)
    step_down = sizes.product(diagonal, left)
    found = diagonal
    for _ in range(BLOCK // PART - 1):
        found = diagonal - sizes.product(step_down, found)
    return found


def _multiply(
    solve: jax.Array, ref: Any, head: jax.Array, out: Any, own: _Block, *, scale: jax.Array | None
) -> None:
    """Store solve @ (scale * the tokens' vectors of a head), by a few channels at a time."""
    place, width = jnp.arange(BLOCK, dtype=jnp.int32), ref.shape[2]
    some = min(CHANNELS, pl.next_power_of_2(width))

    def run(step: jax.Array, _: None) -> None:
        channel = step * some + jnp.arange(some, dtype=jnp.int32)
        x = own.rows(ref, head, channel)
        x = x if scale is None else scale[:, None] * x
        at = out.at[own.nth, own.value, place[:, None], channel[None]]
        mask = jnp.broadcast_to((channel < width)[None], x.shape)
        plt.store(at, own.sizes.product(solve, x), mask=mask)

    lax.fori_loop(0, pl.next_power_of_2(width) // some, run, None)


def _run(
    states: jax.Array,
    tokens: Tokens,
    places: BlockPlaces,
    solved: dict[str, jax.Array],
    sizes: _Sizes,
    tuning: ChunkTuning,
) -> tuple[jax.Array, jax.Array]:
    """Return (outputs, states); outputs of padding tokens are not written."""
    strip = min(tuning.strip, sizes.wide_value)
    starts = places.cu_q_lens
    before = jnp.concatenate((jnp.zeros(1, places.ends.dtype), places.ends))
    operands = (starts, before, tokens.q, tokens.k, *solved.values(), states)
    found: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_run_row, names=tuple(solved), sizes=sizes, strip=strip),
        grid=(*states.shape[:2], sizes.wide_value // strip),
        out_shape=(
            jax.ShapeDtypeStruct(tokens.v.shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=tuning.state_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_chunks",
    )(*operands)
    return found


def _run_row(*refs: Any, names: tuple[str, ...], sizes: _Sizes, strip: int) -> None:
    starts, before, queries, keys, *others, out, states = refs
    solved = dict(zip(names, others, strict=False))
    row, value, part = (pl.program_id(axis) for axis in range(3))
    first, last = plt.load(starts.at[row]), plt.load(starts.at[row + 1])
    begin, end = plt.load(before.at[row]), plt.load(before.at[row + 1])
    column = part * strip + jnp.arange(strip, dtype=jnp.int32)
    is_column = (column < sizes.value_dim)[None]
    place = jnp.arange(BLOCK, dtype=jnp.int32)
    width = sizes.wide_key // sizes.parts
    channels = [nth * width + jnp.arange(width, dtype=jnp.int32) for nth in range(sizes.parts)]
    parts = [
        (
            states.at[row, value, channel[:, None], column[None]],
            (channel < sizes.key_dim)[:, None] & is_column,
        )
        for channel in channels
    ]

    def run(nth: jax.Array, held: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        token = first + (nth - begin) * BLOCK + place
        own = _Block(nth, value, value // sizes.repeats, token, token < last, sizes)
        of_key = of_query = jnp.zeros((BLOCK, strip), jnp.float32)
        for channel, x in zip(channels, held, strict=True):
            mask = jnp.broadcast_to((channel < sizes.key_dim)[None], (BLOCK, width))
            at = solved["keys"].at[nth, value, place[:, None], channel[None]]
            of_key = of_key + sizes.product(plt.load(at, mask=mask, other=0.0), x)
            of_query = of_query + sizes.product(own.rows(queries, own.head, channel), x)
        at = solved["given"].at[nth, value, place[:, None], column[None]]
        mask = jnp.broadcast_to(is_column, (BLOCK, strip))
        update = plt.load(at, mask=mask, other=0.0) - of_key
        near = plt.load(solved["near"].at[nth, value, place[:, None], place[None]])
        total = plt.load(solved["total"].at[nth, value, place])
        whole = plt.load(solved["total"].at[nth, value, nth * 0 + BLOCK - 1])
        found = jnp.exp(total)[:, None] * of_query + sizes.product(near, update)
        at = out.at[token[:, None], value, column[None]]
        plt.store(at, found, mask=own.valid[:, None] & is_column)
        faded = jnp.exp(whole - total)[:, None] * update
        return tuple(
            jnp.exp(whole) * x + sizes.product(own.columns(keys, own.head, channel), faded)
            for channel, x in zip(channels, held, strict=True)
        )

    held = tuple(plt.load(at, mask=mask, other=0.0) for at, mask in parts)
    held = lax.fori_loop(begin, end, run, held)
    for (at, mask), x in zip(parts, held, strict=True):
        plt.store(at, x, mask=mask)
