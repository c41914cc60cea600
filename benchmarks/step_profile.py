"""The time of one decode step, part by part, compared with the least time of each part.

    python -m benchmarks.step_profile [--cells chain/1 tree/64] [--trace]
    python -m benchmarks.step_profile --model tiny         (a smoke test on a CPU)

Each part is timed alone, at the step's real shapes, as a loop inside one compiled program; the
whole step by dispatching its own program back to back; the host gap is the additional time of a
step through scheduler and loop. Parts timed alone do not overlap and share no cache, so their sum
may differ from the whole; the difference is printed. A profiler's trace (`--trace`) lists the
largest operations of the real program, but one fusion may contain two parts, and operations inside
a CUDA graph have no name.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.messages.plan import StepKind
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import PLAIN, SAMPLING, StepOptions

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.h200_table import describe_error, engine_arguments
from benchmarks.step_parts import (
    ATTENTION,
    ATTENTION_AND_WRITES,
    KV_WRITES,
    Step,
    floors_ms,
    parts,
    rows_of,
)
from benchmarks.step_timing import largest_operations, on_mesh, part_ms, randomized
from benchmarks.workloads import MODES, WORKLOADS, Workload
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.device.parallel import Parallel
from jspec.device.peers import Exchange
from jspec.device.state import EngineState, take_rows
from jspec.engine.memory.pool_sizes import size_pool
from jspec.engine.programs.compilation import compile_all, compiler_options, enable_persistent_cache
from jspec.engine.runner import DeviceRunner, exchange_of, init_state, new_state, place_state
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.transfer import layout_of
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from jspec.serving.trace import TraceEvent, TraceKind
from jspec.speculative.step import StepProgram
from jspec.text.stream import IdsOnlyStream
from tests.support.flat_limits import with_limits

ROOT = Path(__file__).resolve().parent.parent
FEW_STEPS, MANY_STEPS, SLOPES = 2, 34, 5
WARM_SECONDS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One mode at one batch, loaded and compiled. committed: L of every row."""

    workload: Workload
    models: LoadedModels
    program: StepProgram
    limits: ServeLimits
    mesh: jax.sharding.Mesh
    dtype: Any
    executables: dict[Any, Any]
    committed: int
    exchange: Exchange | None = None

    def empty(self) -> EngineState:
        how: Any = {"mesh": self.mesh, "kv_dtype": self.dtype, "exchange": self.exchange}
        return new_state(self.program, self.limits, **how)

    def state(self, committed: int | None = None) -> EngineState:
        """Return a state with every slot full: L committed tokens (default: the bench's) per row.

        K and V are random: a chip that reads zeros takes less power, and keeps a higher clock.
        """
        state = self.empty()
        state = replace(state, kv=tuple(randomized(cache, i) for i, cache in enumerate(state.kv)))
        slots, width = state.rows.page_table.shape
        each = min(self.limits.pool.num_pages // self.limits.pool.num_slots, width)
        table = np.zeros((slots, width), np.int32)
        table[1:, :each] = 1 + np.arange((slots - 1) * each).reshape(slots - 1, each)
        lens = np.full((slots,), self.committed if committed is None else committed, np.int32)
        lens[0] = 0
        rows = replace(
            state.rows,
            page_table=jnp.asarray(table),
            window_tables={  # rows may share pages there: the traffic is the same
                space.window: jnp.asarray(table % (space.num_pages + 1))
                for space in self.limits.pool.windows
            },
            seq_lens=jnp.asarray(lens),
            root_ids=1 + jnp.arange(slots, dtype=jnp.int32),
        )
        return place_state(replace(state, rows=rows), self.program, self.mesh)


def prepare(
    workload: Workload,
    mode: str,
    batch: int,
    folder: Path,
    engine: Any,
    *,
    smaller: tuple[int, ...] = (),
) -> Bench:
    """Make dummy weights, and compile nothing yet. smaller: more batches to compile, ascending."""
    workload.write_configs(folder)
    arguments = workload.arguments(mode, folder, acceptance=3.0)
    arguments |= {"max_running_requests": batch, **engine}
    args = EngineArgs.from_mapping(arguments)
    cache = args.compilation_cache_dir
    if cache != "":
        enable_persistent_cache(Path(cache or Path.home() / ".cache" / "jspec" / "programs"))
    devices = jax.devices()[: args.tp_size]
    mesh = Parallel(tensor=args.tp_size).mesh(devices)
    models = load_models(args, resolve_paths(args), mesh=mesh)
    groups = models.target.cache_groups + models.drafter.cache_groups
    limits = size_pool(models.config, groups, devices=devices, ops=models.target.ops)
    limits = with_limits(
        limits,
        decode_buckets=(*smaller, batch),
        prefill_buckets=(limits.programs.chunk_size,),
        num_slots=batch,
    )
    program = StepProgram(
        target=models.target,
        drafter=models.drafter,
        draft_shape=limits.draft_shape,  # with the algorithm of the checkpoint
    )
    return Bench(
        workload=workload,
        models=models,
        program=program,
        limits=limits,
        mesh=mesh,
        dtype=jnp.dtype(models.config.dtype),
        executables={},
        committed=workload.prompt_len + workload.long_run // 2,
        exchange=exchange_of(program, mesh),
    )


def compiled(bench: Bench) -> Bench:
    """Compile a plain decode program per batch, and the one prefill program that they need."""
    program, limits = bench.program, bench.limits
    shards = Parallel.of(bench.mesh).tensor
    state = jax.eval_shape(lambda: init_state(program, limits, shards=shards, kv_dtype=bench.dtype))
    peers = None if bench.exchange is None else bench.exchange.abstract
    state = replace(state, peers=peers)
    keys = (
        ProgramKey(StepKind.PREFILL, limits.programs.chunk_size, SAMPLING),
        *(ProgramKey(StepKind.DECODE, batch, PLAIN) for batch in limits.programs.decode_buckets),
    )
    executables = compile_all(
        program,
        limits,
        mesh=bench.mesh,
        params=bench.models.params,
        state=state,
        keys=keys,
    )
    return replace(bench, executables=executables)


def step_of(bench: Bench, state: EngineState, batch: int | None = None) -> Step:
    """Return the next step of all rows or the first `batch`, with the drafter's own tree."""
    slots = jnp.arange(1, (batch or bench.limits.pool.num_slots) + 1, dtype=jnp.int32)
    rows, draft = rows_of(state, slots), take_rows(state.draft, slots)
    propose = jax.jit(on_mesh(bench.program.drafter.propose, bench.mesh))
    _, tree = propose(bench.models.params["draft"], state.draft_kv, draft, rows)
    return Step(program=bench.program, params=bench.models.params, rows=rows, tree=tree)


# Times.


class DecodeRuns:
    """A bench's decode programs, dispatched back to back over one donated state. Every run starts
    from the same lengths, lens i32[slots + 1].
    """

    def __init__(self, bench: Bench, state: EngineState, lens: np.ndarray) -> None:
        self.state = state
        self._bench = bench
        self._lens = lens

    def of(self, batch: int, options: StepOptions = PLAIN, **values: int) -> Callable[[int], None]:
        """Return a function that runs n steps of the first `batch` rows. values: by field of the
        step's arguments, of every row; 0 by default.
        """
        key = ProgramKey(StepKind.DECODE, batch, options)
        packed = layout_of(key, self._bench.limits)
        fields = {
            name: np.full(shape, values.get(name, 0), np.int32) for name, shape in packed.fields
        }
        fields["slots"][:] = np.arange(1, batch + 1)
        flat = jnp.asarray(packed.pack(fields)[None])

        def run(count: int) -> None:
            rows, params = self.state.rows, self._bench.models.params
            fresh = jax.device_put(self._lens, rows.seq_lens.sharding)
            self.state = replace(self.state, rows=replace(rows, seq_lens=fresh))
            for _ in range(count):
                self.state, _ = self._bench.executables[key](params, self.state, flat)
            jax.block_until_ready(self.state)

        return run


def slope_ms(run: Callable[[int], None]) -> float:
    """Return milliseconds of a step: the difference of two runs over the difference of their steps,
    which excludes the host's cost of starting and ending a run.
    """
    times = []
    for count in (FEW_STEPS, MANY_STEPS):
        started = time.perf_counter()
        run(count)
        times.append(time.perf_counter() - started)
    return 1e3 * (times[1] - times[0]) / (MANY_STEPS - FEW_STEPS)


def warm(*runs: Callable[[int], None]) -> None:
    """Run for WARM_SECONDS: a card that multiplies for a second or two lowers its clock to stay
    within its power, as it does under an engine.
    """
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        for run in runs:
            run(MANY_STEPS)


def first_length(bench: Bench, committed: int) -> int:
    """Return the first length of a run of MANY_STEPS with `committed` tokens on average."""
    grown = MANY_STEPS * (bench.program.draft_shape.simulate_acceptance or 1.0)
    return max(committed - int(grown / 2), 1)


def whole_step(bench: Bench, batch: int | None = None) -> tuple[float, Callable[[int], None]]:
    """Return milliseconds of the step's own program, back to back, and a function to run more."""
    state = bench.state(first_length(bench, bench.committed))
    runs = DecodeRuns(bench, state, np.asarray(state.rows.seq_lens))
    run = runs.of(batch or bench.limits.pool.num_slots)
    warm(run)
    return statistics.median(slope_ms(run) for _ in range(SLOPES)), run


def engine_step_ms(bench: Bench, batch: int | None = None) -> float:
    """Return milliseconds between two results through scheduler, loop and runner, with all rows
    decoding. batch: requests; default: as many as slots.
    """
    batch, workload = batch or bench.limits.pool.num_slots, bench.workload
    runner = DeviceRunner(
        limits=bench.limits,
        params=bench.models.params,
        state=bench.empty(),
        executables=bench.executables,
        mesh=bench.mesh,
        vocab_size=workload.target.vocab_size,
    )
    rng = np.random.default_rng(0)
    new = SamplingParams(max_new_tokens=workload.long_run, temperature=0.0, ignore_eos=True)
    requests = []
    for i in range(batch):
        prompt = rng.integers(0, workload.target.vocab_size, workload.prompt_len).tolist()
        requests.append(Request(request_id=str(i), prompt_ids=tuple(prompt), sampling=new, seed=i))
    trace: list[TraceEvent] = []

    async def serve() -> None:
        scheduler = Scheduler(bench.limits, make_stream=lambda _: IdsOnlyStream())
        loop = EngineLoop(scheduler, runner, trace=trace)
        streams = loop.submit(requests)

        async def drain(stream: Any) -> None:
            async for _ in stream:
                pass

        await asyncio.gather(*(drain(stream) for stream in streams))
        await loop.close()

    asyncio.run(serve())
    ends = [event.ended for event in trace if event.kind is TraceKind.COLLECT]
    # Prefill steps alternate with decode steps; then all rows decode, until the first one is done.
    num_prefills = -(-batch * workload.prompt_len // bench.limits.programs.chunk_size)
    draft_shape = bench.program.draft_shape
    num_decodes = workload.long_run / (draft_shape.simulate_acceptance or 1.0) - num_prefills
    first = min(2 * num_prefills + 2, len(ends) - 3)
    gaps = [
        b - a for a, b in itertools.pairwise(ends[first : first + max(int(num_decodes / 2), 3)])
    ]
    return 1e3 * statistics.median(gaps)


# One cell, and the table.


def profile(bench: Bench, *, trace: bool, put: Callable[[dict[str, Any]], None]) -> None:
    """Time everything, and call `put` with the results so far after each part."""
    found: dict[str, Any] = {"committed": bench.committed, "parts": {}}
    batch = bench.limits.pool.num_slots
    whole, run = whole_step(bench)
    put(found := {**found, "whole_ms": round(whole, 4)})
    state = bench.state()
    step = step_of(bench, state)
    floors = floors_ms(step, committed=bench.committed)
    times: dict[str, float] = {}
    for part in parts(step, state):
        cell: dict[str, Any] = {}
        try:
            times[part.name] = part_ms(
                part,
                step,
                bench.mesh,
                floor_ms=floors.get(part.name, 0.0),
                compiler_options=compiler_options(
                    ProgramKey(StepKind.DECODE, batch, PLAIN),
                    bench.limits,
                    platform=jax.default_backend(),
                    ops=bench.program.ops,
                ),
            )
            cell = {"ms": round(times[part.name], 4)}
        except Exception as error:  # the other parts are still measured
            cell = {"error": describe_error(error)}
        found["parts"][part.name] = {**cell, "floor_ms": round(floors.get(part.name, 0.0), 4)}
        put(found)
    if {ATTENTION, ATTENTION_AND_WRITES} <= set(times):
        both = times.pop(ATTENTION_AND_WRITES)
        times[KV_WRITES] = both - times[ATTENTION]
        del found["parts"][ATTENTION_AND_WRITES]
        found["parts"][KV_WRITES] = {
            "ms": round(times[KV_WRITES], 4),
            "floor_ms": round(floors[KV_WRITES], 4),
        }
    through = engine_step_ms(bench)
    found |= {
        "sum_of_parts_ms": round(sum(times.values()), 4),
        "floor_ms": round(sum(floors.values()), 4),
        "engine_step_ms": round(through, 4),
        "host_gap_ms": round(through - whole, 4),
    }
    put(found)
    if trace:
        text = bench.executables[ProgramKey(StepKind.DECODE, batch, PLAIN)].as_text()
        put(found | {"largest_operations": largest_operations(text, run)})


def profile_cell(
    workload: Workload,
    mode: str,
    batch: int,
    options: argparse.Namespace,
    put: Callable[[dict[str, Any]], None],
) -> None:
    """Profile one cell, and free its device memory."""
    with tempfile.TemporaryDirectory() as folder:
        bench = prepare(workload, mode, batch, Path(folder), engine_arguments(options.engine))
        profile(compiled(bench), trace=options.trace, put=put)


def table(name: str, cell: dict[str, Any]) -> str:
    """Return Markdown: each part's milliseconds, its floor, and their ratio."""
    lines = [f"| {name} | ms | floor | times |", "|---|---|---|---|"]
    rows = [(part, row.get("ms"), row["floor_ms"]) for part, row in cell["parts"].items()]
    rows.append(("sum of parts", cell.get("sum_of_parts_ms"), cell.get("floor_ms", 0.0)))
    rows.append(("whole step, device", cell.get("whole_ms"), cell.get("floor_ms", 0.0)))
    rows.append(("host gap", cell.get("host_gap_ms"), 0.0))
    rows.append(("whole step, engine", cell.get("engine_step_ms"), cell.get("floor_ms", 0.0)))
    for part, ms, floor in rows:
        times = f"{ms / floor:.2f}" if ms is not None and floor else ""
        lines.append(
            f"| {part} | {'failed' if ms is None else f'{ms:.4f}'} | {floor:.4f} | {times} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every cell was profiled."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--cells", nargs="+", metavar="MODE/B", help="chain/8 tree/64; unset: all")
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell starts after this")
    parser.add_argument("--trace", action="store_true", help="list the largest operations too")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "step_profile.json"
    )
    options = parser.parse_args(argv)
    workload = WORKLOADS[options.model]
    every = [f"{mode}/{batch}" for mode in MODES for batch in workload.batches]
    cells: dict[str, Any] = {}
    deadline = time.monotonic() + options.seconds
    for name in options.cells or every:
        mode, _, batch = name.partition("/")

        def put(cell: dict[str, Any], name: str = name) -> None:
            cells[name] = dict(cell)
            write_result(options.output, {"cells": cells})

        print(f"profiling {name}", flush=True)
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("out of time")
            profile_cell(workload, mode, int(batch), options, put)
            print(table(name, cells[name]), flush=True)
        except Exception as error:  # the other cells are still measured
            put({**cells.get(name, {}), "error": describe_error(error)})
            print(f"{name}: {describe_error(error)}", flush=True)
    return 0 if all("error" not in cell for cell in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
