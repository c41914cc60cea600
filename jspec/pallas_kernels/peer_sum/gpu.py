"""The sum of rows over the GPUs of one host, in one launch (Triton): each GPU writes its rows into
the memory of all, and adds the rows that it received in the order of the devices.

A received value needs no flag and no fence, since its place held NOTHING before it arrived. All
devices add the same values in the same order, in float32, and get the same bits. With more than two
devices, each of many rows is added by one device, its owner, which returns the sum.

A row has three places that are used in rotation. A device that sends the row's sum n + 3 has
received n + 2 from all others, which they sent after they had read n and emptied its place (in n +
1). So the sums of a row must follow one another, as they do along the residual stream (`Area`); two
at once would mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Int

from jspec.device.peers import HEADER, TURNS, Peers
from jspec.pallas_kernels.peer_sum.gpu_ptx import (
    READ,
    SECOND,
    VECTOR,
    WRITE,
    as_bits,
    asm,
    exchange,
)

LANES, MAX_WARPS = 32, 32
OWNED_FROM = 32  # rows from which they have owners, with more than two devices


def sum_over_peers(x: BFloat16[Array, "T E"], peers: Peers) -> BFloat16[Array, "T E"]:
    """Return the sum of all devices' x, rounded once. peers.serve(x) must hold."""
    (total,) = _launch(_sum_body, "peer_sum_gpu", [x], peers, num_outputs=1)
    return total


def sum_add_and_norm(
    x: BFloat16[Array, "T E"],
    delta: BFloat16[Array, "T E"],
    scale: Float[Array, "E"],
    peers: Peers,
    *,
    eps: float,
) -> tuple[BFloat16[Array, "T E"], BFloat16[Array, "T E"]]:
    """Return `add_and_norm` of x and the sum of all devices' delta, rounded as in two launches."""
    body = partial(_norm_body, eps=eps)
    total, normed = _launch(body, "peer_sum_and_norm_gpu", [delta, x, scale], peers, num_outputs=2)
    return total, normed


def gather_over_peers(words: Int[Array, "n"], peers: Peers) -> Int[Array, "D n"]:
    """Return all devices' words. NOTHING becomes the largest value; n <= peers.most_words."""
    (num,), most = words.shape, peers.width // 2
    width = min(pl.next_power_of_2(max(num, LANES)), most)
    warps = min(MAX_WARPS, width // LANES)
    row = Row(size=min(num, most), width=width, pack=width // (warps * LANES), peers=_Where(peers))
    out = jax.ShapeDtypeStruct((peers.num_devices, num), jnp.int32)
    count = -(-num // most)
    (found,) = _call(
        partial(_gather_body, row), "peer_gather_gpu", [words], peers, [out], count, warps
    )
    return found


def _launch(
    body: Callable[..., None], name: str, arrays: list[jax.Array], peers: Peers, *, num_outputs: int
) -> list[jax.Array]:
    """Run a program per row. The first of `arrays` is summed, and the outputs have its shape."""
    num, size = arrays[0].shape
    outs = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * num_outputs
    if num == 0:
        return [jnp.zeros(out.shape, out.dtype) for out in outs]
    width = pl.next_power_of_2(size)
    warps = min(width // VECTOR // LANES, MAX_WARPS)
    row = Row(
        size=size,
        width=width,
        pack=width // (warps * LANES),
        peers=_Where(peers),
        is_owned=num >= OWNED_FROM and peers.num_devices > 2,
    )
    return _call(partial(body, row), name, arrays, peers, outs, num, warps)


def _call(
    body: Callable[..., None],
    name: str,
    arrays: list[jax.Array],
    peers: Peers,
    outs: list[Any],
    count: int,
    warps: int,
) -> list[jax.Array]:
    def launched(*refs: Any) -> None:
        body(*refs)

    found: Any = pl.pallas_call(
        launched,
        grid=(count,),
        out_shape=(*outs, jax.ShapeDtypeStruct((count,), jnp.int32)),  # keeps the turns' stores
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name=name,
    )(*arrays, peers.table.reshape(-1))
    return list(found[:-1])


@dataclass(frozen=True, slots=True)
class _Where:
    """Byte offsets of an area's places in a buffer: [turn, device, row, value]."""

    peers: Peers

    @property
    def num(self) -> int:
        return self.peers.num_devices

    @property
    def row(self) -> int:
        return 2 * self.peers.width

    @property
    def device(self) -> int:
        return self.peers.area.num_rows * self.row

    def turn_of(self, row: jax.Array) -> jax.Array:
        return 4 * row + self.peers.first_byte

    def place(self, turn: jax.Array, row: jax.Array) -> jax.Array:
        first = self.peers.first_byte + 4 * self.peers.area.num_rows
        return turn * (self.num * self.device) + row * self.row + first


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A program's row: `size` values in `width` lanes, a power of two, `pack` per thread."""

    size: int
    width: int
    pack: int
    peers: _Where
    is_owned: bool = False

    @property
    def lane(self) -> jax.Array:
        return jnp.arange(self.width, dtype=jnp.int32)

    @property
    def mask(self) -> jax.Array | None:
        return None if self.width == self.size else self.lane < self.size

    def load(self, ref: Any, *index: Any) -> jax.Array:
        mask, other = self.mask, None if self.mask is None else 0.0
        loaded: jax.Array = plt.load(ref.at[(*index, self.lane)], mask=mask, other=other)
        return loaded

    def store(self, ref: Any, index: Any, x: jax.Array) -> None:
        plt.store(ref.at[index, self.lane], x, mask=self.mask)

    def exchanged(
        self, x: jax.Array, table_ref: Any, done_ref: Any, *, adds: bool
    ) -> list[jax.Array]:
        """Send x to all devices. Return the sum of all devices' x, or of words each device's."""
        index, zero, where = pl.program_id(0), jnp.zeros_like(self.lane), self.peers
        words = [zero + table_ref[i] for i in range(HEADER + 2 * where.num)]
        rank, own, others = words[0], words[1:HEADER], words[HEADER:]
        last = asm(READ, [zero + where.turn_of(index), *own])
        turn = jnp.where(last >= TURNS - 1, 0, last + 1)
        before = jnp.where(turn == 0, TURNS - 1, turn - 1)
        reads, clears = where.place(turn, index), where.place(before, index)
        sends = reads + rank * where.device
        if self.is_owned:
            others += self._of_owner(index, zero, words)
        found: list[jax.Array] = []
        lane, devices = self.lane, [r * where.device for r in range(where.num)]
        for sources in [devices] if adds else [[device] for device in devices]:
            how: Any = {"halves": adds, "sends": not found, "is_owned": self.is_owned}
            text = exchange(self.pack, devices, sources, **how)
            args = [x, lane, sends, reads, clears, *own, *others]
            found.append(asm(text, args, pack=self.pack, halves=adds))
            lane = asm(SECOND, [as_bits(found[-1]), lane])
        # The reduction over the block makes all threads read the turn before it is written.
        last = jnp.max(asm(SECOND, [lane, turn]))
        one = jnp.zeros((1,), jnp.int32)
        at = [one + where.turn_of(index), *(one + table_ref[i] for i in range(1, HEADER))]
        plt.store(done_ref.at[index], jnp.max(asm(WRITE, [*at, one + last])))
        return found

    def _of_owner(
        self, index: jax.Array, zero: jax.Array, words: list[jax.Array]
    ) -> list[jax.Array]:
        """Return (whether the row's owner is this device, its address, bytes to its place)."""
        owner = index % self.peers.num
        others = words[HEADER:]
        low, high = zero, zero
        for r in range(self.peers.num):
            low = jnp.where(owner == r, others[2 * r], low)
            high = jnp.where(owner == r, others[2 * r + 1], high)
        is_own = jnp.where(words[0] == owner, 1, 0)
        return [is_own, low, high, zero + owner * self.peers.device]


def _sum_body(row: Row, x_ref: Any, table_ref: Any, total_ref: Any, done_ref: Any) -> None:
    index = pl.program_id(0)
    (total,) = row.exchanged(row.load(x_ref, index), table_ref, done_ref, adds=True)
    row.store(total_ref, index, total)


def _norm_body(
    row: Row,
    delta_ref: Any,
    x_ref: Any,
    scale_ref: Any,
    table_ref: Any,
    total_ref: Any,
    normed_ref: Any,
    done_ref: Any,
    *,
    eps: float,
) -> None:
    index = pl.program_id(0)
    x, scale = row.load(x_ref, index), row.load(scale_ref)
    (delta,) = row.exchanged(row.load(delta_ref, index), table_ref, done_ref, adds=True)
    total = x + delta
    row.store(total_ref, index, total)
    wide = total.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide) / row.size
    normed = wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)
    row.store(normed_ref, index, normed.astype(total.dtype))


def _gather_body(row: Row, words_ref: Any, table_ref: Any, found_ref: Any, done_ref: Any) -> None:
    at = pl.program_id(0) * row.size + row.lane
    mask = (row.lane < row.size) & (at < words_ref.shape[0])
    words = plt.load(words_ref.at[at], mask=mask, other=0)
    for i, each in enumerate(row.exchanged(words, table_ref, done_ref, adds=False)):
        plt.store(found_ref.at[i, at], each, mask=mask)
