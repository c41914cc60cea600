"""Estimates of whole steps on TPUs, each with its roofline.

Two layers of a model are compiled at full width and the rest is scaled; rows have 512 to 1,536
committed tokens. The roofline of a step is the time to read its weights, experts and KV once at the
HBM's bandwidth, or that of its products at the peak if that is longer, on each of the devices.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.floors import (
    Floor,
    Rows,
    draft_floor,
    experts_touched,
    matrices,
    products,
    read_bytes,
    target_floor,
)
from benchmarks.timing import FLOPS_PER_SECOND, READ_BYTES_PER_SECOND
from benchmarks.tpu_cycles.chips import Chip, chip_of
from benchmarks.tpu_cycles.hlo import Module, kernel_name, padded_bytes
from benchmarks.tpu_cycles.kernels import MIXED, MIXED_CONTEXTS, ROWS
from benchmarks.tpu_cycles.step_time import KernelTime, StepTime
from benchmarks.tpu_programs import ROOT, SHAPES, SLICES, Job
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.layers.feed_forward import MoESpec
from jspec.speculative.drafter import NoDrafter
from tests.engine import step_compile
from tests.engine.compiled_text import Instruction

MEAN_CONTEXT = round(sum(MIXED_CONTEXTS) / len(MIXED_CONTEXTS))
LAYERS, TIMEOUT = 2, 1800.0
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the compiler needs no chip: it may run beside another
}
# Where a kernel was not simulated: the share of the HBM's bandwidth that attention reaches.
ASSUMED_SHARE = 0.9
# Compaction: KV slots that a row moves, and bundles to start and await one copy.
MOVES, COPY_CYCLES = 2, 4


def jobs() -> list[Job]:
    """Return the steps of the table, the most important first."""
    decode, prefill = "decode B=64", "prefill T=1920 sampling"
    make = partial(Job, layers=LAYERS)
    chips = {slice_.partition(":")[0]: slice_ for slice_ in SLICES["llama-3.1-8b"]}
    order = [chips[name] for name in ("v6e", "tpu7x", "v5e", "v5p")]
    dense = [
        make(model="llama-3.1-8b", topology=topology, shape=shape, program=decode)
        for topology in order
        for shape in SHAPES
    ]
    prompts = [
        make(model="llama-3.1-8b", topology=topology, shape=SHAPES[0], program=prefill)
        for topology in order
    ]
    moe = [
        make(model=model, topology=chips["v6e"], shape=shape, program=decode)
        for model in ("qwen3-30b-a3b", "gpt-oss-20b")
        for shape in SHAPES[:2]
    ]
    return [*dense[:3], prompts[0], *dense[3:], *moe, *prompts[1:]]


def slug(job: Job) -> str:
    rows = "" if job.rows == 64 else f"_rows_{job.rows}"
    return re.sub(r"\W+", "_", str(job)) + rows


def dump(job: Job, directory: Path, *, evaluate: bool) -> None:
    """Compile a step into `directory`, unless it is there. Raises RuntimeError."""
    if (directory / "step.json").exists():
        return
    words = [str(directory), job.model, job.topology, job.shape, job.program]
    words += ["--layers", str(job.layers), "--rows", str(job.rows), "--drafter", job.drafter]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu_cycles.dump_step", *words]
        + (["--evaluate"] if evaluate else []),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
        cwd=ROOT,
        env={**os.environ, **WITHOUT_TPU},
    )
    if done.returncode:
        raise RuntimeError(f"{job}: {done.stderr.strip()[-2000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    hbm_ms: float
    mxu_ms: float

    @property
    def ms(self) -> float:
        return max(self.hbm_ms, self.mxu_ms)


def roofline(job: Job, chip: Chip, *, devices: int) -> Roofline:
    """Return the least time of a decode step, or of a prefill of one prompt; of an MoE's target
    its bytes alone."""
    spec, ops = step_compile.MODELS[job.model], OPS["tpu"]
    program, _ = step_compile.make_program(
        spec, job.shape, shards=devices, ops=ops, drafter=job.drafter
    )
    prompt = re.findall(r"T=(\d+)", job.program)
    batch = 1 if prompt else job.rows
    nodes = int(prompt[0]) if prompt else program.draft_shape.num_draft_tokens
    rows = Rows(batch=batch, context=0 if prompt else MEAN_CONTEXT, itemsize=2)
    if any(isinstance(layer.ffn, MoESpec) for layer in spec.layers):
        read = read_bytes(spec, batch=batch, nodes=nodes, context=rows.context, dtype="bfloat16")
        floor = Floor(bytes_ms=1e3 * read / READ_BYTES_PER_SECOND)
    elif prompt:
        head = [x for x in matrices(program.target.table) if "lm_head" in x.path]
        body = matrices(program.target.table, skip=("lm_head",))
        floor = products(rows, body, tokens=nodes) + products(rows, head, tokens=batch)
    else:
        floor = target_floor(program.target, rows, nodes=nodes)
    if not prompt and not isinstance(program.drafter, NoDrafter):
        floor += draft_floor(program.drafter, program.draft_shape, rows)
    # The floors are at the rates of an H200.
    hbm = floor.bytes_ms * READ_BYTES_PER_SECOND / (devices * chip.hbm_gb_s * 1e9)
    mxu = floor.flops_ms * FLOPS_PER_SECOND / (devices * chip.bf16_tflop_s * 1e12)
    return Roofline(hbm_ms=hbm, mxu_ms=mxu)


class KernelTimes:
    """The time of each kernel in a step: simulated where a report has its shape, else modelled.

    reports: those of `kernels` for the step's chip, by kernel. used: how each time was found.
    """

    def __init__(
        self, job: Job, chip: Chip, module: Module, reports: dict[str, Any], *, devices: int
    ) -> None:
        self._job, self._chip, self._devices = job, chip, devices
        # The reports have the shapes of Llama-3.1-8B over four and eight devices.
        other = "tp8" if devices == 4 else "tp4"
        self._reports = {
            report["kernel"]: report["simulated"]
            for name, report in reports.items()
            if job.model == "llama-3.1-8b" and other not in name
        }
        self.used: dict[str, dict[str, Any]] = {}
        self._types = {op.name: op.types for op in module.entry}

    def __call__(self, op: Instruction) -> KernelTime | None:
        name = kernel_name(op)
        found = self._simulated(name) or self._modelled(name, op)
        if found is None:
            return None
        how, time = found
        self.used.setdefault(name, {"us": round(time.us, 2), "how": how})
        return time

    def _simulated(self, name: str) -> tuple[str, KernelTime] | None:
        runs = self._reports.get(name, {})
        for scenario, run in runs.items():
            if scenario == MIXED and self._job.rows == ROWS and not run["faults"]:
                return "simulated", KernelTime(us=run["us"], num_bytes=run["hbm_bytes"])
        if name == "paged_prefill" and runs:
            # One prompt's pairs of tokens grow with the square of its length.
            scenario, run = next(iter(runs.items()))
            tokens = int(scenario.split(" ")[0].replace(",", ""))
            times = (_prompt(self._job) / tokens) ** 2
            return "scaled", KernelTime(us=run["us"] * times, num_bytes=run["hbm_bytes"] * times)
        return None

    def _modelled(self, name: str, op: Instruction) -> tuple[str, KernelTime] | None:
        bytes_per_us = self._chip.bytes_per_us
        spec = step_compile.MODELS[self._job.model]
        if name.startswith("paged_attention_rows"):
            heads = spec.layers[0].softmax_attention
            shard = max(heads.num_kv_heads // self._devices, 1) * max(heads.head_dim, 128)
            windows = [layer.attention.window or MEAN_CONTEXT for layer in spec.layers]
            seen = sum(min(window, MEAN_CONTEXT) for window in windows) / len(windows)
            num_bytes = self._job.rows * seen * 2 * shard * 2
            us = num_bytes / bytes_per_us / ASSUMED_SHARE + self._chip.latency_us
            return "modelled", KernelTime(us=us, num_bytes=num_bytes)
        if name.startswith("experts_product"):
            weights = max((padded_bytes(x) for x in self._operands(op)), default=0.0)
            moe = spec.layers[0].ffn
            assert isinstance(moe, MoESpec)
            nodes = int(self._job.shape.rpartition("/")[2])
            touched = experts_touched(moe, tokens=self._job.rows * nodes) / moe.num_experts
            return "modelled", KernelTime(
                us=weights * touched / bytes_per_us, num_bytes=weights * touched
            )
        if name == "compact_paths":  # of all layers, whatever was compiled
            copies = 2 * MOVES * self._job.rows * spec.num_layers
            us = self._chip.us(COPY_CYCLES * copies) + 2 * self._chip.latency_us
            return "modelled", KernelTime(us=us, num_bytes=0.0)
        if name == "gather_emitted":
            written = sum(padded_bytes(x) for x in op.types if len(x.shape) == 3)
            num_bytes = 2 * written
            return "modelled", KernelTime(us=num_bytes / bytes_per_us + 2.0, num_bytes=num_bytes)
        return None

    def _operands(self, op: Instruction) -> list[Any]:
        return [x for name in op.operands for x in self._types.get(name, ())]


def _prompt(job: Job) -> int:
    return int(re.findall(r"T=(\d+)", job.program)[0])


def estimate(job: Job, directory: Path, reports: dict[str, Any]) -> dict[str, Any]:
    """Return the estimate of a step that was compiled into `directory`."""
    step = json.loads((directory / "step.json").read_text("utf-8"))
    module = Module((directory / "hlo.txt").read_text("utf-8"))
    chip, devices = chip_of(job.topology), step["devices"]
    kernels = KernelTimes(job, chip, module, reports, devices=devices)
    time = StepTime(module, chip=chip, devices=devices, kernels=kernels)
    depth = step_compile.MODELS[job.model].num_layers
    whole = time.at_depth(depth, compiled=step["layers"]) / 1e3
    floor = roofline(job, chip, devices=devices)
    return {
        "ms": round(whole, 3),
        "roofline_ms": {"hbm": round(floor.hbm_ms, 3), "mxu": round(floor.mxu_ms, 3)},
        "share": round(floor.ms / whole, 3),
        "us_a_layer": round(time.by("part").get("layers", 0.0) / step["layers"], 1),
        "us_outside_layers": _rounded(
            {part: us for part, us in time.by("part").items() if part != "layers"}
        ),
        "us_by_kind_of_two_layers_and_the_rest": _rounded(time.by("kind")),
        "longest": [
            f"{cost.us:.1f} us {cost.kind}, {cost.name}: {cost.source}"
            for cost in sorted(time.costs, key=lambda x: -x.us)[:12]
        ],
        "cycles": "libtpu's evaluator" if step.get("evaluated") else "XLA's cost model",
        "kernels": kernels.used,
        "without_figure": len(time.missing),
        "compiled": {name: step[name] for name in ("layers", "devices", "seconds", "versions")},
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items() if value >= 0.05}
