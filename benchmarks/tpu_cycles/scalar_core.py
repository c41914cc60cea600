"""A simulator of a TPU core that executes the scalar half of a kernel's final bundles.

A core issues one bundle a cycle, in order. Scalar instructions, predicates, branches (with their
four delay slots), scalar memory and copies are executed, vector instructions are only counted, and
the result is the least cycles for given row lengths and page tables. A copy has a latency and
shares the HBM's bandwidth with the others. What it does not see: waits for the results of products,
reductions and permutations (attention_block.py), copies of XLA around the kernel, an HBM that
delivers less than its nominal bandwidth, the cost of a copy's descriptor, bank conflicts.

A check of the simulator itself: bytes and number of copies are exactly those of the page table, and
no wait is for bytes that are not sent (`Run.faults`).
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.tpu_cycles.bundles import Bundle, depths, is_vector
from benchmarks.tpu_cycles.chips import Chip

GRANULE_BYTES, GRANULE_WORDS, DELAY_SLOTS = 32, 8, 4
INSIDE_LATENCY = 0.3  # of a copy within the core, relative to one from HBM
MOST_BUNDLES = 20_000_000
# Addresses are numbers without overlap: 2**24 words for each allocation, and far above for each
# operand of the kernel.
_ALLOCATION, _OPERAND, _POINTER = 24, 44, 1 << 40

# Words of a scalar-prefetched or copied operand: all of them, or one value for every word.
Words = Sequence[int] | int


def _signed(x: int) -> int:
    if abs(x) >= _POINTER:
        return x
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _unsigned(x: int) -> int:
    return x & 0xFFFFFFFF if abs(x) < _POINTER else x


def _shift_left(a: int, b: int) -> int:
    return a << b  # a pointer may leave 32 bits


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    **{"sadd": operator.add, "scalar_lea": operator.add, "ssub": operator.sub},
    **{"smul": operator.mul, "sshll": _shift_left, "sshra": operator.rshift},
    "sand": lambda a, b: _unsigned(a) & _unsigned(b),
    "sor": lambda a, b: _unsigned(a) | _unsigned(b),
    "sxor": lambda a, b: _unsigned(a) ^ _unsigned(b),
    "sshrl": lambda a, b: _unsigned(a) >> b,
    "smin": min,
    "smax": max,
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "por": lambda a, b: int(bool(a) or bool(b)),
    "pand": lambda a, b: int(bool(a) and bool(b)),
    "pnand": lambda a, b: int(not (a and b)),
    "pxor": lambda a, b: int(bool(a) != bool(b)),
}
_NO_EFFECT = {"sfence", "shalt", "snop", "strace", "vtrace"}
_PREDICATE = re.compile(r"\((!?)%(p\w+)(?:,\s*([^)]+))?\)")
_TOKEN = re.compile(r"!?%[\w.]+|#\w+|-?(?:0x[0-9a-f]+|\d+)")


@dataclass(frozen=True, slots=True)
class _Term:
    """A sum of registers and a number: an operand or an address. negated: of one predicate."""

    number: int
    registers: tuple[str, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Op:
    kind: str
    name: str  # with its suffixes, as `scmp.lt.s32.totalorder`
    result: str
    terms: tuple[_Term, ...]
    predicate: tuple[bool, str, _Term | None] | None = None  # (negated, register, value if off)
    region: str = ""  # of a branch
    operand: int = -1  # of inlined_call_operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a kernel. waits: cycles that it waited for copies."""

    cycles: float
    bundles: int
    waits: float
    hbm_bytes: int
    copies: Mapping[str, int]
    lines: Mapping[str, float]  # cycles by Python line
    faults: Mapping[str, int]  # unknown registers, operations and waits that nothing ends

    def us(self, chip: Chip) -> float:
        return chip.us(self.cycles)


class Program:
    """A kernel's bundles, decoded."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self.bundles, self.depths = bundles, depths(bundles)
        self._allocations: dict[str, int] = {}
        self.ops = [[self._decode(x) for x in b.instructions if _is_scalar(x)] for b in bundles]
        self._starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        for at, bundle in enumerate(bundles):
            for region in bundle.starts:
                self._starts.setdefault(region, at)
            for region in bundle.ends:
                self._ends[region] = at
        # v7x's listing folds runs of empty bundles, so a branch has fewer than four after it.
        labels = [at for at, x in enumerate(bundles) if x.label]
        branches = [at for at, x in enumerate(bundles) if x.has_branch]
        gaps = [min((x for x in labels if x > at), default=at + 99) - at - 1 for at in branches]
        self.is_folded = min(gaps, default=DELAY_SLOTS) < DELAY_SLOTS

    def target(self, region: str, at: int) -> int:
        """Return where a branch goes. A loop's exit has no label: the first bundle after it."""
        if region not in self._starts:
            to = at + 1 + DELAY_SLOTS
            while to < len(self.bundles) and not (
                self.bundles[to].label in ("PF", "CT", "LE") and self.depths[to] <= self.depths[at]
            ):
                to += 1
            self._starts[region] = to
        return self._starts[region]

    def slots(self, region: str, at: int, to: int) -> tuple[int, int]:
        """Return how many bundles after a branch run before it jumps, and their cycles."""
        if not self.is_folded:
            return DELAY_SLOTS, DELAY_SLOTS
        if to <= at < self._ends.get(region, 0):
            count = self._ends[region] - at
        else:
            count = 1
            while (
                count < DELAY_SLOTS
                and self.bundles[at + 1].instructions
                and self.bundles[at + count].instructions
                and not self.bundles[at + count + 1].label
                and not self.bundles[at + count + 1].has_branch
            ):
                count += 1
        return count, max(count, DELAY_SLOTS + 1)

    def _decode(self, text: str) -> _Op:
        found = re.match(r"%(\S+) = (.*)$", text)
        result, text = (found[1], found[2]) if found else ("", text)
        name, _, rest = text.partition(" ")
        kind = name.partition(".")[0]
        if kind == "inlined_call_operand":
            index = re.search(r"index: (-?\d+)", rest)
            assert index is not None, text
            return _Op(kind, name, result, (), operand=int(index[1]))
        if kind in ("sphi", "pphi"):
            return _Op(kind, name, result, ())
        predicate = None
        if found := _PREDICATE.search(rest):
            otherwise = self._term(found[3]) if found[3] else None
            predicate = (found[1] == "!", found[2], otherwise)
            rest = rest[: found.start()] + rest[found.end() :]
        rest = re.sub(r"\[(thread|resolvable):[^\]]*\]", "", rest)
        if kind == "sbr":
            region = re.search(r"\$region(\d+)", rest)
            assert region is not None, text
            return _Op(kind, name, result, (), predicate, region=region[1])
        parts = [x for x in re.split(r",(?![^\[]*\])", rest) if x.strip()]
        if kind == "sst":  # the address and the value, with or without a comma
            address, value = re.findall(r"\[.*\]|%\S+|-?\w+", rest)[:2]
            parts = [address, value]
        return _Op(kind, name, result, tuple(self._term(x) for x in parts), predicate)

    def _term(self, text: str) -> _Term:
        number, registers, negated = 0, [], False
        for token in _TOKEN.findall(text):
            if token.startswith("#"):
                base = self._allocations.setdefault(token, len(self._allocations) + 1)
                number += base << _ALLOCATION
            elif "%" in token:
                negated = token.startswith("!")
                registers.append(token.lstrip("!%"))
            else:
                number += int(token, 0)
        return _Term(number, tuple(registers), negated)


def _is_scalar(text: str) -> bool:
    return bool(text) and (text.startswith("%s") or "vsyncadd" in text or not is_vector(text))


class Core:
    """A core on `chip` that runs a program once. operands: the words of scalar operands and of
    those that are copied into scalar memory, by their index among the kernel's operands."""

    def __init__(self, program: Program, chip: Chip, operands: Mapping[int, Words]) -> None:
        self._program, self._operands = program, operands
        self._bytes_per_cycle = chip.hbm_gb_s / chip.ghz
        self._latency = chip.latency_us * chip.ghz * 1e3
        self._registers: dict[str, int] = {}  # by name, and by its last part: the physical one
        self._memory: dict[int, int] = {}
        self._fill: dict[int, int] = {}  # allocation: the value of words that were not written
        self._sent: dict[int, list[tuple[float, int]]] = defaultdict(
            list
        )  # semaphore: (when, size)
        self._now = self._channel_free = self._waits = 0.0
        self._hbm_bytes = self._num_bundles = 0
        self._copies: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def run(self) -> Run:
        program, at, line = self._program, 0, ""
        jump: list[int] | None = None  # [bundles left, target]
        while at < len(program.bundles):
            before = self._now
            branch = self._issue(program.ops[at])
            self._now += 1
            self._num_bundles += 1
            line = program.bundles[at].location or line
            self._lines[line] += self._now - before
            if self._num_bundles > MOST_BUNDLES:
                raise RuntimeError(f"the kernel ran {MOST_BUNDLES} bundles without an end")
            if branch is not None:
                to = program.target(branch, at)
                count, cycles = program.slots(branch, at, to)
                self._now += cycles - count
                self._num_bundles += cycles - count
                jump = [count, to]
            elif jump is not None:
                jump[0] -= 1
                if jump[0] == 0:
                    at, jump = jump[1], None
                    continue
            at += 1
        return Run(
            cycles=self._now,
            bundles=self._num_bundles,
            waits=self._waits,
            hbm_bytes=self._hbm_bytes,
            copies=dict(self._copies),
            lines=dict(self._lines.most_common()),
            faults=dict(self._faults),
        )

    def _issue(self, ops: Sequence[_Op]) -> str | None:
        """Execute a bundle: all reads before all writes. Return the region of a taken branch."""
        writes: list[tuple[str, int]] = []
        stores: list[tuple[int, int]] = []
        branch = None
        for op in ops:  # these stand for no instruction: they are seen in their own bundle
            if op.kind in ("sphi", "pphi"):
                self._set(op.result, self._registers.get(_physical(op.result), 0))
            elif op.kind == "inlined_call_operand":
                self._set(op.result, self._operand(op))
        for op in ops:
            if op.kind in ("sphi", "pphi", "inlined_call_operand", "int_to_ptr"):
                continue
            if op.predicate is not None:
                negated, name, otherwise = op.predicate
                if bool(self._registers.get(name, 0)) == negated:
                    if otherwise is not None:
                        writes.append((op.result, self._value(otherwise)))
                    continue
            if op.kind == "sbr":
                branch = op.region
            elif op.kind == "sst":
                stores.append((self._value(op.terms[0]), self._value(op.terms[1])))
            elif op.kind == "dma":
                self._copy_or_wait(op)
            elif op.kind == "vsyncadd":
                self._signal(self._value(op.terms[0]), self._value(op.terms[1]))
            elif op.kind not in _NO_EFFECT:
                value = self._compute(op)
                if value is not None and op.result:
                    writes.append((op.result, value))
        self._memory.update(stores)
        for name, value in writes:
            self._set(name, value)
        for op in ops:
            if op.kind == "int_to_ptr":
                self._set(op.result, self._value(op.terms[-1]))
        return branch

    def _set(self, name: str, value: int) -> None:
        self._registers[name] = self._registers[_physical(name)] = value

    def _operand(self, op: _Op) -> int:
        if op.name.partition(".")[2].startswith("<no"):  # in no memory: the value itself
            words = self._operands[op.operand]
            return words if isinstance(words, int) else words[0]
        return (2 * op.operand + 3) << _OPERAND

    def _value(self, term: _Term) -> int:
        total = term.number
        for name in term.registers:
            if name not in self._registers:
                self._faults[f"register {name}"] += 1
            total += self._registers.get(name, 0)
        return int(not total) if term.negated else total

    def _compute(self, op: _Op) -> int | None:
        if op.kind in ("vpop", "spop"):  # from the vector units, whose values are not known
            return 0
        values = [self._value(x) for x in op.terms]
        if op.kind in ("smov", "pmov"):
            return values[0]
        if op.kind == "pneg":
            return int(not values[0])
        if op.kind == "sld":
            return self._word(values[0])
        if op.kind == "scalar_select":
            return values[1] if values[0] else values[2]
        name = op.name.split(".")[1] if op.kind == "scmp" else op.kind
        if name not in _BINARY:
            self._faults[f"operation {op.name}"] += 1
            return None
        a, b = values[0], values[1]
        if ".u32" in op.name and name not in ("sadd", "ssub", "smul", "sshll"):
            a, b = _unsigned(a), _unsigned(b)
        if op.kind == "scalar_lea":
            return a + _signed(b)
        value = int(_BINARY[name](a, b))
        is_pointer = op.kind == "sshll" and abs(a) >= 1 << 30
        return value if is_pointer else _signed(value)

    def _word(self, address: int) -> int:
        if address >= _POINTER:
            return 0
        return self._memory.get(address, self._fill.get(address >> _ALLOCATION, 0))

    def _copy_or_wait(self, op: _Op) -> None:
        if op.name.startswith("dma.done"):
            self._wait(self._value(op.terms[0]), self._value(op.terms[1]))
            return
        way = op.name.split(".")[1]
        source, size, to, semaphore = (self._value(x) for x in op.terms[:4])
        if size <= 0:
            return
        self._copies[way] += 1
        if way.endswith("smem"):
            self._fill_scalars(source, size, to)
        if "hbm" in way and "smem" not in way:
            start = max(self._channel_free, self._now)
            self._channel_free = start + size * GRANULE_BYTES / self._bytes_per_cycle
            done = self._channel_free + self._latency
            self._hbm_bytes += size * GRANULE_BYTES
        else:
            done = self._now + INSIDE_LATENCY * self._latency
        self._sent[semaphore].append((done, size))

    def _fill_scalars(self, source: int, size: int, to: int) -> None:
        pointer = source >> _OPERAND
        while pointer and not pointer & 1:  # the bases are odd; an offset may have shifted them
            pointer >>= 1
        words = self._operands.get((pointer - 3) // 2)
        if words is None:
            self._faults[f"no words for operand {(pointer - 3) // 2}"] += 1
        elif isinstance(words, int):
            self._fill[to >> _ALLOCATION] = words
        else:
            self._memory.update((to + i, x) for i, x in enumerate(words[: size * GRANULE_WORDS]))

    def _signal(self, semaphore: int, size: int) -> None:
        """Add to a semaphore: a copy that was made by loads and stores. A wait subtracts itself."""
        if _signed(size) > 0:
            self._sent[semaphore].append((self._now, size))

    def _wait(self, semaphore: int, size: int) -> None:
        queue = sorted(self._sent[semaphore])
        until = self._now
        while size > 0 and queue:
            done, sent = queue.pop(0)
            until = max(until, done)
            if sent > size:
                queue.insert(0, (done, sent - size))
            size -= sent
        if size > 0:
            self._faults["wait for a copy that nothing starts"] += 1
        self._sent[semaphore] = queue
        self._waits += until - self._now
        self._now = until


def _physical(name: str) -> str:
    return name.rpartition("_")[2]
