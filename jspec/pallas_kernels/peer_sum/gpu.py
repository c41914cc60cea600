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

LANES, MAX_WARPS = 32, 32
OWNED_FROM = 32  # rows from which they have owners, with more than two devices
VECTOR = 8  # bfloat16 values of a thread, in one access of 16 bytes
POLLS = 1 << 27  # half a minute or more; after it the peer counts as dead, and a trap ends the wait

# $1: bytes from the buffer's address, $2 and $3. Volatile accesses reach the L2.
_ADDRESS = ".reg .u64 a, b; mov.b64 b, {$2, $3}; cvt.u64.u32 a, $1; add.u64 a, a, b;"
_READ = f"{{ {_ADDRESS} ld.volatile.global.u32 $0, [a]; }}"
_WRITE = f"{{ {_ADDRESS} st.volatile.global.u32 [a], $4; mov.u32 $0, 0; }}"
_SECOND = "xor.b32 $0, $1, $1; add.u32 $0, $0, $2;"  # $2, once $1 is available


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
        last = _asm(_READ, [zero + where.turn_of(index), *own])
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
            text = _exchange(self.pack, devices, sources, **how)
            args = [x, lane, sends, reads, clears, *own, *others]
            found.append(_asm(text, args, pack=self.pack, halves=adds))
            lane = _asm(_SECOND, [_bits(found[-1]), lane])
        # The reduction over the block makes all threads read the turn before it is written.
        last = jnp.max(_asm(_SECOND, [lane, turn]))
        one = jnp.zeros((1,), jnp.int32)
        at = [one + where.turn_of(index), *(one + table_ref[i] for i in range(1, HEADER))]
        plt.store(done_ref.at[index], jnp.max(_asm(_WRITE, [*at, one + last])))
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


def _exchange(
    pack: int,
    devices: list[int],
    sources: list[int],
    *,
    halves: bool,
    sends: bool,
    is_owned: bool = False,
) -> str:
    """Return PTX for `pack` values of a thread: send them to all devices and empty the places of
    the turn before (unless an earlier call did), wait for those of `sources`, and add these.

    Arguments: values, their lanes, bytes to the places to write, to read and to empty (the last two
        of device 0), own address, the devices' addresses, and if is_owned those of `_of_owner`
    devices, sources: bytes from device 0's places to others
    halves: the values are bfloat16, VECTOR of them in one access, which must be neighbours; else
        they are words, of which a single source's are returned
    """
    ptx = _Ptx(pack=pack, halves=halves)
    first = 6 + 2 * len(devices)  # of the owner's arguments
    targets = [first + 1] if is_owned else [6 + 2 * i for i in range(len(devices))]
    lines = ptx.begin(len(sources))
    for target in targets if sends else []:
        lines += ptx.send(target, "s")
    if sends:
        lines += [f"{ptx.address(4)} cvt.u64.u32 a, {ptx.arg(3)}; add.u64 a, a, b;"]
        lines += ptx.empty(devices)
    lines += [f"{ptx.address(4)} cvt.u64.u32 a, {ptx.arg(2)}; add.u64 a, a, b;"]
    if not is_owned:
        return "\n".join([*lines, *ptx.wait(sources, "ALL"), *ptx.results(len(sources)), "}"])
    lines += [f"setp.eq.u32 q, {ptx.arg(first)}, 0;", "@q bra OTHER;"]
    lines += [*ptx.wait(sources, "OWN"), *ptx.results(len(sources)), *ptx.copy_results()]
    for i in range(len(devices)):
        lines += ptx.send(6 + 2 * i, "s")
    lines += ["bra DONE;", "OTHER:", f"cvt.u64.u32 b, {ptx.arg(first + 3)}; add.u64 a, a, b;"]
    return "\n".join([*lines, *ptx.wait([0], "SUM"), *ptx.results(1), "DONE:", "}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ptx:
    """Pieces of PTX. Registers: s the values to send, w those received; a, b, at addresses."""

    pack: int
    halves: bool

    @property
    def count(self) -> int:
        return self.pack // (2 if self.halves else 1)

    @property
    def words(self) -> int:
        return VECTOR // 2 if self.halves else 1

    @property
    def starts(self) -> range:
        return range(0, self.pack, VECTOR if self.halves else 1)

    @property
    def kind(self) -> str:
        return "v4.u32" if self.halves else "u32"

    @property
    def outs(self) -> list[tuple[int, int, str]]:
        each = [(g, j) for g in self.starts for j in range(self.words)]
        return [(g, j, f"${i}") for i, (g, j) in enumerate(each)]

    def arg(self, number: int, j: int = 0) -> str:
        return f"${2 * self.count + number * self.pack + j}"

    def address(self, number: int) -> str:
        return f"mov.b64 b, {{{self.arg(number)}, {self.arg(number + 1)}}};"

    def group(self, name: str) -> str:
        named = [f"{name}_{j}" for j in range(self.words)]
        return f"{{{', '.join(named)}}}" if self.halves else named[0]

    def begin(self, num_sources: int) -> list[str]:
        size = 2 if self.halves else 4
        lines = ["{", ".reg .pred p, q;", ".reg .u32 polls, none, t;", ".reg .u64 a, b;"]
        lines += [".reg .f32 x, low, high;", "mov.u32 none, 0xffffffff;"]
        for g in self.starts:
            lines.append(
                f".reg .u64 from{g}, at{g}; mul.wide.u32 from{g}, {self.arg(0, g)}, {size};"
            )
            names = [f"s{g}", *(f"w{g}_{r}" for r in range(num_sources))]
            lines += [f".reg .u32 {name}_{j};" for name in names for j in range(self.words)]
            if self.halves:
                lines.append(f"sub.u32 t, {self.arg(0, g + VECTOR - 1)}, {self.arg(0, g)};")
                lines.append(f"setp.ne.u32 p, t, {VECTOR - 1}; @p trap;")
        for (g, j, _), i in zip(self.outs, range(self.count), strict=True):
            own = f"${self.count + i}"
            lines.append(f"setp.eq.u32 p, {own}, none; selp.b32 s{g}_{j}, 0x7fffffff, {own}, p;")
        return lines

    def send(self, target: int, name: str) -> list[str]:
        lines = [f"{self.address(target)} cvt.u64.u32 a, {self.arg(1)}; add.u64 b, b, a;"]
        for g in self.starts:
            lines.append(f"add.u64 a, b, from{g};")
            lines.append(f"st.volatile.global.{self.kind} [a], {self.group(f'{name}{g}')};")
        return lines

    def empty(self, devices: list[int]) -> list[str]:
        nothing = "{none, none, none, none}" if self.halves else "none"
        lines = []
        for g in self.starts:
            lines.append(f"add.u64 at{g}, a, from{g};")
            lines += [f"st.global.{self.kind} [at{g} + {i}], {nothing};" for i in devices]
        return lines

    def wait(self, sources: list[int], label: str) -> list[str]:
        pairs = [(g, r) for g in self.starts for r in range(len(sources))]
        lines = [f"add.u64 at{g}, a, from{g};" for g in self.starts]
        lines += ["mov.u32 polls, 0;", f"WAIT_{label}:"]
        for g, r in pairs:
            received, at = self.group(f"w{g}_{r}"), f"[at{g} + {sources[r]}]"
            lines.append(f"ld.volatile.global.{self.kind} {received}, {at};")
        lines.append("setp.ne.u32 p, polls, polls;")
        every = [f"w{g}_{r}_{j}" for g, r in pairs for j in range(self.words)]
        lines += [f"setp.eq.or.u32 p, {word}, none, p;" for word in every]
        lines.append(f"@!p bra {label}; add.u32 polls, polls, 1; setp.lt.u32 p, polls, {POLLS};")
        return [*lines, f"@p bra WAIT_{label};", "trap;", f"{label}:"]

    def results(self, num_sources: int) -> list[str]:
        lines = []
        for g, j, out in self.outs:
            received = [f"w{g}_{r}_{j}" for r in range(num_sources)]
            is_sum = num_sources > 1
            lines += _sum_of_pairs(out, received) if is_sum else [f"mov.u32 {out}, {received[0]};"]
        return lines

    def copy_results(self) -> list[str]:
        return [f"mov.u32 s{g}_{j}, {out};" for g, j, out in self.outs]


def _sum_of_pairs(out: str, words: list[str]) -> list[str]:
    """Add two bfloat16 values per word in float32, in order, and round the sums once."""
    lines = ["mov.f32 low, 0f80000000; mov.f32 high, 0f80000000;"]  # -0 + x is x
    for word in words:
        lines.append(f"and.b32 t, {word}, 0xffff0000; mov.b32 x, t; add.rn.f32 high, high, x;")
        lines.append(f"shl.b32 t, {word}, 16; mov.b32 x, t; add.rn.f32 low, low, x;")
    return [*lines, f"cvt.rn.bf16x2.f32 {out}, high, low;"]


def _asm(text: str, args: list[jax.Array], *, pack: int = 1, halves: bool = False) -> jax.Array:
    """Run PTX on each `pack` elements of a thread. The result shares no register with an input.

    halves: the result and the first argument are bfloat16, two in a register; all else has 32 bits.
    """
    count = pack // 2 if halves else pack
    inputs = count + pack * (len(args) - 1)
    dtype = jnp.bfloat16 if halves else jnp.int32
    (result,) = plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(["=&r"] * count + ["r"] * inputs),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    found: jax.Array = result
    return found


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.int32:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
