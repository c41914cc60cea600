"""The PTX of a peer sum: send values to all devices, wait for theirs and add them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

VECTOR = 8  # bfloat16 values of a thread, in one access of 16 bytes
POLLS = 1 << 27  # half a minute or more; after it the peer counts as dead, and a trap ends the wait
# $1: bytes from the buffer's address, $2 and $3. Volatile accesses reach the L2.
_ADDRESS = ".reg .u64 a, b; mov.b64 b, {$2, $3}; cvt.u64.u32 a, $1; add.u64 a, a, b;"
READ = f"{{ {_ADDRESS} ld.volatile.global.u32 $0, [a]; }}"
WRITE = f"{{ {_ADDRESS} st.volatile.global.u32 [a], $4; mov.u32 $0, 0; }}"
SECOND = "xor.b32 $0, $1, $1; add.u32 $0, $0, $2;"  # $2, once $1 is available


def exchange(
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
        of device 0), own address, the devices' addresses, and if is_owned those of `Row._of_owner`
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


def asm(text: str, args: list[jax.Array], *, pack: int = 1, halves: bool = False) -> jax.Array:
    """Run PTX on each `pack` elements of a thread. The result shares no register with an input.
    halves: the result and the first argument are bfloat16, two in a register."""
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


def as_bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.int32:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
