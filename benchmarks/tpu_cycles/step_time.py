"""The time of a step, operation by operation, from its scheduled program.

An operation takes the longest of: the compiler's cycles, its bytes in HBM at the chip's bandwidth,
and its flops at the peak. The cycles are those of libtpu's evaluator of the scheduled bundles where
it ran, else those of XLA's cost model, which counts with less than the HBM's nominal bandwidth and
has none for gathers and scatters; these cost a fixed time a row. (The evaluator knows a copy's
latency, but not that copies share the memory.) Copies that XLA starts ahead of their use share the
bandwidth that the operations leave; where a copy is not done in time, the step waits. Kernels take
the time that is given for them, collectives that of a model of the links (chips.collective_us), as
the compiler has no figure for either. A collective that is started and awaited apart runs beside
what is between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.tpu_cycles.chips import Chip, collective_us
from benchmarks.tpu_cycles.hlo import (
    Module,
    called,
    collective_kind,
    cycles,
    is_kernel,
    kernel_name,
    padded_bytes,
    trip_count,
)
from tests.engine.compiled_text import Instruction

# No time of their own.
FREE = {
    *("parameter", "bitcast", "get-tuple-element", "tuple", "constant", "after-all"),
    *("partition-id", "replica-id", "opt-barrier"),
}
WEIGHTS = "params['target']['layers']"
# The cost model adds a fixed cost to each small operation, which the evaluator does not find.
COST_MODEL_FIXED_CYCLES = 2100
# It has a product of one row, which becomes a multiplication and a sum, at eight times the cycles
# that the evaluator finds (v6e, 4096 x 7168: 249,484 and 32,129).
REDUCED_PRODUCT = 0.13
# Cycles a row of a gather or scatter by the evaluator on v6e: of rows in HBM, and of numbers.
ROW_CYCLES, NUMBER_CYCLES = 68, 17


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The time of one call of a kernel and the bytes that it reads and writes in HBM."""

    us: float
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One instruction, or one wait for a copy. us: with the repeats of the loop around it."""

    name: str
    kind: str
    us: float
    num_bytes: float = 0.0
    flops: float = 0.0
    source: str = ""
    part: str = "rest"
    weights: frozenset[str] = frozenset()


@dataclass
class _Memory:
    """Copies under way, which share what the operations leave of the HBM."""

    bytes_per_us: float
    left: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, num_bytes: float) -> None:
        if num_bytes > 1.0:
            self.left[name] = num_bytes

    def serve(self, us: float, *, used_bytes: float) -> None:
        rate = max(us * self.bytes_per_us - used_bytes, 0.0) / us if us else 0.0
        while self.left and us > 1e-9 and rate > 0:
            least = min(self.left.values())
            passed = min(us, least * len(self.left) / rate)
            moved = passed * rate / len(self.left)
            self.left = {n: b - moved for n, b in self.left.items() if b - moved > 1.0}
            us -= passed

    def wait_for(self, name: str) -> float:
        waited = 0.0
        while name in self.left:
            us = min(self.left.values()) * len(self.left) / self.bytes_per_us
            self.serve(us, used_bytes=0.0)
            waited += us
        return waited


class StepTime:
    """The costs of one program on one chip of `devices`."""

    def __init__(
        self,
        module: Module,
        *,
        chip: Chip,
        devices: int,
        kernels: Callable[[Instruction], KernelTime | None],
    ) -> None:
        self.module, self.chip, self.devices = module, chip, devices
        self._kernels = kernels
        self.costs: list[Cost] = []
        self.missing: list[str] = []  # operations, kernels and loops without a figure
        self._memory = _Memory(chip.bytes_per_us)
        self._collectives: dict[str, float] = {}  # by name: when it ends
        self._prefetched: set[str] = set()  # by the previous call of the program
        self._now = 0.0
        self._visit(module.entry, repeats=1)
        self.costs = _with_parts(self.costs)

    @property
    def us(self) -> float:
        return sum(cost.us for cost in self.costs)

    def by(self, name: str) -> dict[str, float]:
        """Return the microseconds by "kind" or by "part", the longest first."""
        found: dict[str, float] = {}
        for cost in self.costs:
            key = getattr(cost, name)
            found[key] = found.get(key, 0.0) + cost.us
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def at_depth(self, num_layers: int, *, compiled: int) -> float:
        """Return the microseconds with `num_layers` layers, of which `compiled` were compiled."""
        parts = self.by("part")
        layers = parts.get("layers", 0.0)
        return sum(parts.values()) - layers + layers / compiled * num_layers

    def _visit(self, ops: Sequence[Instruction], *, repeats: int) -> None:
        for op in ops:
            if op.opcode in FREE:
                continue
            if op.opcode in ("while", "conditional", "call"):
                self._enter(op, repeats)
            elif op.opcode.endswith("-start") and self._collective(op) is None:
                self._start(op)
            elif op.opcode.endswith("-done"):
                self._finish(op, repeats)
            else:
                self._run(op, repeats)

    def _enter(self, op: Instruction, repeats: int) -> None:
        trips = trip_count(op)
        if trips is None and op.opcode == "while":
            self.missing.append(f"{op.name}: trips unknown, counted once")
        for name in called(op):
            self._visit(self.module.computations[name], repeats=repeats * (trips or 1))

    def _start(self, op: Instruction) -> None:
        source = op.operands[0] if op.operands else ""
        if "cross_program_prefetch_index" in op.line:
            self._prefetched.add(source)
        elif source in self._prefetched:
            return  # for the next call, whose own copy is then done: counted once
        if op.opcode.startswith("copy"):
            self._memory.start(op.name, padded_bytes(op.types[0]))
        elif op.opcode.startswith(("slice", "dynamic-slice")):
            self._memory.start(op.name, padded_bytes(op.types[1]))
        else:
            self.missing.append(f"{op.name}: no model of {op.opcode}")

    def _finish(self, op: Instruction, repeats: int) -> None:
        started = op.operands[0] if op.operands else ""
        if started in self._collectives:
            waited = max(self._collectives.pop(started) - self._now, 0.0)
            self._memory.serve(waited, used_bytes=0.0)
            kind = "collective"
        else:
            waited, kind = self._memory.wait_for(started), "wait for weights"
        self._now += waited
        if waited > 0.05:
            cost = Cost(name=op.name, kind=kind, us=waited * repeats)
            self.costs.append(replace(cost, weights=frozenset(self.module.parameters(op))))

    def _run(self, op: Instruction, repeats: int) -> None:
        kind, us, num_bytes, flops = self._cost(op)
        self._memory.serve(us, used_bytes=num_bytes)
        self._now += us
        self.costs.append(
            Cost(
                name=op.name,
                kind=kind,
                us=us * repeats,
                num_bytes=num_bytes * repeats,
                flops=flops * repeats,
                source=self.module.source(op),
                weights=frozenset(self.module.parameters(op)),
            )
        )

    def _cost(self, op: Instruction) -> tuple[str, float, float, float]:
        """Return (kind, us, bytes, flops) of one run of an instruction."""
        collective = self._collective(op)
        if collective is not None:
            types = collective.types[-1 if "-start" in collective.opcode else 0 :]
            size = sum(padded_bytes(x) for x in types)
            kind = collective_kind(collective) or ""
            us = collective_us(kind, num_bytes=size, devices=self.devices, chip=self.chip)
            if op.opcode.endswith("-start"):
                self._collectives[op.name] = self._now + us
                us = 0.0
            return "collective", us, 0.0, 0.0
        if is_kernel(op):
            known = self._kernels(op)
            if known is None:
                self.missing.append(f"{kernel_name(op)}: no time is given for the kernel")
                return "kernel", 0.0, 0.0, 0.0
            return "kernel", known.us, known.num_bytes, 0.0
        num_bytes, flops = self.module.hbm_bytes(op), self.module.flops(op)
        us = max(
            self.chip.us(self._cycles(op, num_bytes)),
            num_bytes / self.chip.bytes_per_us,
            flops / self.chip.flops_per_us,
        )
        return _kind(op, self.module.source(op), flops), us, num_bytes, flops

    def _collective(self, op: Instruction) -> Instruction | None:
        """Return the collective that an instruction is, or that it starts on another core."""
        if collective_kind(op) is not None:
            return op
        if op.opcode not in ("call-start", "async-start"):
            return None
        inside = (x for name in called(op) for x in self.module.computations[name])
        return next((x for x in inside if collective_kind(x) is not None), None)

    def _cycles(self, op: Instruction, num_bytes: float) -> float:
        """Return the compiler's cycles of an instruction, 0 if it gives none."""
        found = cycles(op)
        if found is not None:
            return found
        found = cycles(op, by_cost_model=True)
        if found is None and ("gather" in op.name or "scatter" in op.name):
            return self._num_rows(op) * (ROW_CYCLES if num_bytes else NUMBER_CYCLES)
        if found is None:
            self.missing.append(f"{op.name}: no cycles")
            return 0.0
        if "COST_MODEL_TYPE_INVALID" in op.line:
            if any("['kernel']" in path for path in self.module.parameters(op)):
                return found * REDUCED_PRODUCT
            return max(found - COST_MODEL_FIXED_CYCLES, 0)
        return found * (self.chip.cost_model_hbm if num_bytes else 1.0)

    def _num_rows(self, op: Instruction) -> int:
        """Return the rows of a gather's result, or of a scatter's indices and updates."""
        types = op.types
        if "scatter" in op.name:
            known = {x.name: x for x in self.module.computations[op.computation]}
            types = tuple(t for name in op.operands[1:] for t in known[name].types)
        return max((x.shape[0] for x in types if x.shape), default=0)


def _kind(op: Instruction, source: str, flops: float) -> str:
    if flops:
        return "product"
    if "sampling" in source or "speculative/verify" in source or "noise" in source:
        return "sampling"
    if op.opcode in ("copy", "transpose", "reshape") or "copy" in op.name:
        return "layout copy"
    if "attention" in source or "kv_write" in source or "rotation" in source:
        return "around attention"
    if "norm" in source:
        return "norm"
    if any(word in op.name for word in ("gather", "scatter", "dynamic")):
        return "gather or scatter"
    return "other"


def _with_parts(costs: list[Cost]) -> list[Cost]:
    """Name the part of the step: from the first operation that reads a weight of the target's
    layers to the sum after the last one is "layers"."""
    of_layers = [
        i
        for i, cost in enumerate(costs)
        if any(x.startswith(WEIGHTS) and "norm" not in x for x in cost.weights)
    ]
    first, last = (of_layers[0], of_layers[-1]) if of_layers else (0, -1)
    if last + 1 < len(costs) and costs[last + 1].kind == "collective":
        last += 1
    return [
        replace(cost, part="layers" if first <= i <= last else _part(cost))
        for i, cost in enumerate(costs)
    ]


def _part(cost: Cost) -> str:
    weights = " ".join(cost.weights)
    is_head = "lm_head" in weights or ("['embed']" in weights and cost.flops > 0)
    if "params['draft']" in weights and cost.flops:
        return "draft lm_head" if is_head else "draft products"
    if is_head and cost.flops:
        return "lm_head"
    return f"rest: {cost.kind}"
