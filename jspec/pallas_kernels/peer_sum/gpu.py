"""The sum of rows over the GPUs of one host, in one launch (Triton): each writes its rows into the
memory of all, and adds what it received in the order of the devices.

Two bfloat16 numbers travel with a flag in one store of 8 bytes, so a number that has arrived is
known without a fence: one crossing of the link. A row's flag counts its sums. Every device adds the
same numbers in the same order, so all have the same bits.

A row's two slots take turns: who sends the sum n + 2 has received n + 1 from all, which they sent
after they had read n. So the sums of a row must follow one another, as they do along the residual
stream; two at once would mix.
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

from jspec.device.peers import HEADER, MAX_ROWS, Peers

LANES = 32
FEW_ROWS, WARPS_OF_FEW, WARPS_OF_MANY = 64, 32, 8  # a row of a few shall arrive at once
POLLS = 1 << 27  # half a minute or more; then the peer is dead, and a trap ends the wait

# $1: unit of 8 bytes; $2, $3: the buffer's address. Volatile loads and stores reach the L2.
_ADDRESS = ".reg .u64 a, b; mov.b64 b, {$2, $3}; mul.wide.u32 a, $1, 8; add.u64 a, a, b;"
_READ = f"{{ {_ADDRESS} ld.volatile.global.u32 $0, [a]; }}"
_WRITE = f"{{ {_ADDRESS} st.volatile.global.u32 [a], $4; mov.u32 $0, 0; }}"
_SECOND = "xor.b32 $0, $1, $1; add.u32 $0, $0, $2;"  # $2, once $1 is there


def sum_over_peers(x: BFloat16[Array, "T E"], peers: Peers) -> BFloat16[Array, "T E"]:
    """Return the sum of all devices' x, rounded once. T <= MAX_ROWS, E <= peers.width, even."""
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
    """Return all devices' numbers of 32 bits. n <= MAX_ROWS * peers.width / 2."""
    (num,), most = words.shape, peers.width // 2
    count = -(-num // most)
    width = min(pl.next_power_of_2(max(num, LANES)), pl.next_power_of_2(most))
    warps = min(WARPS_OF_MANY, width // LANES)
    row = Row(
        size=2 * min(num, most),
        width=width,
        stride=most,
        pack=width // (warps * LANES),
        num_peers=peers.num_devices,
        first_unit=peers.first_unit,
    )

    def launched(*refs: Any) -> None:
        _gather_body(row, *refs)

    found: Any = pl.pallas_call(
        launched,
        grid=(count,),
        out_shape=(
            jax.ShapeDtypeStruct((peers.num_devices, num), jnp.int32),
            jax.ShapeDtypeStruct((count,), jnp.int32),  # of the counters' stores
        ),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name="peer_gather_gpu",
    )(words, peers.table.reshape(-1))
    gathered: jax.Array = found[0]
    return gathered


def _launch(
    body: Callable[..., None], name: str, arrays: list[jax.Array], peers: Peers, *, num_outputs: int
) -> list[jax.Array]:
    """Run a program a row. arrays: the first is summed, and the outputs have its shape."""
    num, size = arrays[0].shape
    outs = [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * num_outputs
    if num == 0:
        return [jnp.zeros(out.shape, out.dtype) for out in outs]
    width = pl.next_power_of_2(size // 2)
    warps = WARPS_OF_FEW if num <= FEW_ROWS else WARPS_OF_MANY
    warps = min(warps, max(width // LANES, 1))
    row = Row(
        size=size,
        width=width,
        stride=peers.width // 2,
        pack=max(width // (warps * LANES), 1),
        num_peers=peers.num_devices,
        first_unit=peers.first_unit,
    )

    def launched(*refs: Any) -> None:
        body(row, *refs)

    found: Any = pl.pallas_call(
        launched,
        grid=(num,),
        out_shape=(*outs, jax.ShapeDtypeStruct((num,), jnp.int32)),  # of the counters' stores
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        name=name,
    )(*arrays, peers.table.reshape(-1))
    return list(found[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A program's row: E numbers, as `width` pairs, a power of two, `pack` of them a thread."""

    size: int
    width: int
    stride: int  # pairs from one row of a buffer to the next
    pack: int
    num_peers: int
    first_unit: int  # of the area

    @property
    def pair(self) -> jax.Array:
        return jnp.arange(self.width, dtype=jnp.int32)

    @property
    def mask(self) -> jax.Array | None:
        return None if 2 * self.width == self.size else 2 * self.pair < self.size

    def load(self, ref: Any, *index: Any) -> list[jax.Array]:
        """Return the first numbers of all pairs, and the second ones."""
        mask, other = self.mask, None if self.mask is None else 0.0
        columns = (2 * self.pair, 2 * self.pair + 1)
        return [plt.load(ref.at[(*index, at)], mask=mask, other=other) for at in columns]

    def store(self, ref: Any, index: Any, pairs: list[jax.Array]) -> None:
        for column, x in zip((2 * self.pair, 2 * self.pair + 1), pairs, strict=True):
            plt.store(ref.at[index, column], x, mask=self.mask)

    def summed(self, ref: Any, table_ref: Any, done_ref: Any) -> list[jax.Array]:
        number = _joined(*self.load(ref, pl.program_id(0)))
        (total,) = self.exchanged(number, table_ref, done_ref, adds=True)
        return _parts(total)

    def exchanged(
        self, number: jax.Array, table_ref: Any, done_ref: Any, *, adds: bool
    ) -> list[jax.Array]:
        """Send numbers to all, and return those of every device or their sum; count the turn."""
        index, zero = pl.program_id(0), jnp.zeros_like(self.pair)
        words = [zero + table_ref[i] for i in range(HEADER + 2 * self.num_peers)]
        rank, own, others = words[0], words[1:HEADER], words[HEADER:]
        counter = self.first_unit + index
        count = _asm(_READ, [zero + counter, *own]) + 1
        turn = (count & 1) * self.num_peers
        first = self.first_unit + MAX_ROWS
        reads = first + (turn * MAX_ROWS + index) * self.stride + self.pair
        sends = reads + rank * (MAX_ROWS * self.stride)
        text = partial(_exchange, self.pack, num_peers=self.num_peers)
        step, flag = 8 * MAX_ROWS * self.stride, count
        found: list[jax.Array] = []
        for sources in [range(self.num_peers)] if adds else [[r] for r in range(self.num_peers)]:
            asm = text(sources=[r * step for r in sources], sends=not found)
            args = [number, sends, reads, flag, *own, *others]
            found.append(_asm(asm, args, pack=self.pack))
            flag = _asm(_SECOND, [found[-1], flag])
        # A reduction over the block: all of its threads have read the counter before it is written.
        count = jnp.max(flag)
        one = jnp.zeros((1,), jnp.int32)
        at = [one + counter, *(one + table_ref[i] for i in range(1, HEADER))]
        plt.store(done_ref.at[index], jnp.max(_asm(_WRITE, [*at, one + count])))
        return found


def _sum_body(row: Row, x_ref: Any, table_ref: Any, total_ref: Any, done_ref: Any) -> None:
    row.store(total_ref, pl.program_id(0), row.summed(x_ref, table_ref, done_ref))


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
    x, scales = row.load(x_ref, index), row.load(scale_ref)
    delta = row.summed(delta_ref, table_ref, done_ref)
    total = [a + b for a, b in zip(x, delta, strict=True)]
    row.store(total_ref, index, total)
    wide = [a.astype(jnp.float32) for a in total]
    mean_square = jnp.sum(wide[0] * wide[0] + wide[1] * wide[1]) / row.size
    factor = jax.lax.rsqrt(mean_square + eps)
    normed = [a * factor * b.astype(jnp.float32) for a, b in zip(wide, scales, strict=True)]
    row.store(normed_ref, index, [a.astype(jnp.bfloat16) for a in normed])


def _gather_body(row: Row, words_ref: Any, table_ref: Any, found_ref: Any, done_ref: Any) -> None:
    at = pl.program_id(0) * row.stride + row.pair
    mask = (row.pair < row.stride) & (at < words_ref.shape[0])
    number = plt.load(words_ref.at[at], mask=mask, other=0)
    for i, each in enumerate(row.exchanged(number, table_ref, done_ref, adds=False)):
        plt.store(found_ref.at[i, at], each, mask=mask)


def _exchange(pack: int, *, num_peers: int, sources: list[int], sends: bool) -> str:
    """Return PTX that sends `pack` units of a thread to all devices, waits for others, adds these.

    Arguments: numbers, units to write, units to read of device 0, flag, own address, the devices'
    addresses. sources: bytes from device 0's rows to those to wait for; a single one's numbers are
    returned as they are. sends: False if an earlier call did.
    """

    def arg(number: int, j: int = 0) -> str:
        return f"${(1 + number) * pack + j}"

    each, waits = range(pack), range(len(sources))
    lines = ["{", ".reg .pred p;", ".reg .u32 polls;", ".reg .u64 a, b;", ".reg .f32 x, low, high;"]
    lines += [f".reg .u32 w{j}_{r}, f{j}_{r};" for j in each for r in waits]
    lines += [f".reg .u64 at{j};" for j in each]
    for r in range(num_peers if sends else 0):
        lines.append(f"mov.b64 b, {{{arg(6 + 2 * r)}, {arg(7 + 2 * r)}}};")
        for j in each:
            lines.append(f"mul.wide.u32 a, {arg(1, j)}, 8; add.u64 a, a, b;")
            lines.append(f"st.volatile.global.v2.u32 [a], {{{arg(0, j)}, {arg(3, j)}}};")
    lines.append(f"mov.b64 b, {{{arg(4)}, {arg(5)}}}; mov.u32 polls, 0;")
    lines += [f"mul.wide.u32 at{j}, {arg(2, j)}, 8; add.u64 at{j}, at{j}, b;" for j in each]
    lines.append("WAIT:")
    lines += [
        f"ld.volatile.global.v2.u32 {{w{j}_{r}, f{j}_{r}}}, [at{j} + {sources[r]}];"
        for j in each
        for r in waits
    ]
    lines.append("setp.ne.u32 p, polls, polls;")
    lines += [f"setp.ne.or.u32 p, f{j}_{r}, {arg(3, j)}, p;" for j in each for r in waits]
    lines.append(f"@!p bra ALL; add.u32 polls, polls, 1; setp.lt.u32 p, polls, {POLLS};")
    lines += ["@p bra WAIT;", "trap;", "ALL:"]
    for j in each:
        if len(sources) == 1:
            lines.append(f"mov.u32 ${j}, w{j}_0;")
            continue
        lines.append("mov.f32 low, 0f80000000; mov.f32 high, 0f80000000;")  # -0 + x is x
        for r in waits:
            lines.append(f"and.b32 f{j}_{r}, w{j}_{r}, 0xffff0000; shl.b32 w{j}_{r}, w{j}_{r}, 16;")
            lines.append(f"mov.b32 x, w{j}_{r}; add.rn.f32 low, low, x;")
            lines.append(f"mov.b32 x, f{j}_{r}; add.rn.f32 high, high, x;")
        lines.append(f"cvt.rn.bf16x2.f32 ${j}, high, low;")
    return "\n".join([*lines, "}"])


def _asm(text: str, args: list[jax.Array], *, pack: int = 1) -> jax.Array:
    """Run PTX on each `pack` elements of a thread. The result shares no register with an input."""
    (result,) = plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(["=&r"] * pack + ["r"] * pack * len(args)),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.int32)],
    )
    found: jax.Array = result
    return found


def _joined(low: jax.Array, high: jax.Array) -> jax.Array:
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (low, high)]
    return jax.lax.bitcast_convert_type(bits[0] | (bits[1] << 16), jnp.int32)


def _parts(words: jax.Array) -> list[jax.Array]:
    bits = jax.lax.bitcast_convert_type(words, jnp.uint32)
    low, high = (x.astype(jnp.uint16) for x in (bits & 0xFFFF, bits >> 16))
    return [jax.lax.bitcast_convert_type(x, jnp.bfloat16) for x in (low, high)]
