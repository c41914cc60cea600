"""A decode step launch by launch on a GPU: what each of a layer's launches takes, and what follows.

    python -m benchmarks.step_trace --models qwen3-30b-a3b gpt-oss-20b [--rows 1] [--layers 4 12]
                                    [--out step_trace.json]

The model is cut to its first layers, at every width as it is, with random weights; rows hold
CONTEXT tokens. `step_ms` is of the whole step, dispatched back to back as an engine runs it, with
CUDA graphs; `layer_us` the difference of the longer and the shorter model over the layers that it
has more. The launches are those of the shorter model, from a profiler's trace of the same step
compiled without CUDA graphs: in it a launch has a name. `microseconds` runs from a launch's start
to its end, `gap` from the end of the one before; who starts early has a negative one.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode_floor import floor_ms
from benchmarks.environment import write_result
from benchmarks.random_pools import randomized
from benchmarks.workloads import GPT_OSS_20B, LLAMA_8B, QWEN3_30B_A3B, TINY_MOE
from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.device import sharding
from jspec.engine.programs.compilation import ProgramShape, compile_with, compiler_options, lower
from jspec.engine.programs.program_keys import ProgramKey, program_keys
from jspec.engine.runner import init_state, place_state
from jspec.engine.transfer import layout_of
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.layers.linear import Shard
from jspec.messages.plan import StepKind
from jspec.models.decoder import Decoder
from jspec.pallas_kernels.choose import OPS
from jspec.spec.model_spec import ModelSpec
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.step import StepProgram

MODELS = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "llama-3.1-8b": LLAMA_8B,
    "tiny-moe": TINY_MOE,
}
CONTEXT, PAGE, PAGES_A_ROW = 1168, 64, 20
STEPS, SLOPES = 64, 5


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode program with its weights, and a state that it may have."""

    program: StepProgram
    limits: ServeLimits
    mesh: Any
    params: Any

    @property
    def key(self) -> ProgramKey:
        return next(key for key in program_keys(self.limits) if key.kind is StepKind.DECODE)

    def state(self) -> Any:
        """Every slot with CONTEXT tokens in pages of its own, of random numbers."""
        empty = init_state(self.program, self.limits, shards=1, kv_dtype=jnp.bfloat16)
        state = place_state(empty, self.mesh)
        kv = tuple(randomized(pages, i) for i, pages in enumerate(state.kv))
        slots, width = state.rows.page_table.shape
        table = np.zeros((slots, width), np.int32)
        each = min(width, PAGES_A_ROW)
        table[1:, :each] = 1 + np.arange((slots - 1) * each).reshape(slots - 1, each)
        lens = np.full((slots,), CONTEXT, np.int32)
        lens[0] = 0
        rows = dataclasses.replace(
            state.rows,
            page_table=jnp.asarray(table),
            seq_lens=jnp.asarray(lens),
            root_ids=1 + jnp.arange(slots, dtype=jnp.int32),
        )
        return place_state(dataclasses.replace(state, kv=kv, rows=rows), self.mesh)

    def compiled(self, *, with_graphs: bool) -> Any:
        ops = self.program.ops
        platform = jax.default_backend()
        options = compiler_options(self.key, self.limits, platform=platform, ops=ops)
        if platform == "gpu" and not with_graphs:
            options["xla_gpu_enable_command_buffer"] = ""
        program = dataclasses.replace(self.program, features=self.key.features)
        state = jax.eval_shape(
            lambda: init_state(self.program, self.limits, shards=1, kv_dtype=jnp.bfloat16)
        )
        shape = ProgramShape.of(self.key, self.limits)
        lowered = lower(shape, program, mesh=self.mesh, params=self.params, state=state)
        return compile_with(lowered, options)

    def batch(self) -> jax.Array:
        packed = layout_of(self.key, self.limits)
        fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
        fields["slots"][:] = np.arange(1, self.limits.num_slots + 1)
        return jnp.asarray(packed.pack(fields))


def make_step(model: ModelSpec, *, rows: int) -> Step:
    mesh = sharding.make_mesh(jax.devices()[:1])
    ops = OPS["gpu" if jax.default_backend() == "gpu" else "xla"]
    target = Decoder(model, ops, Shard(1, sharding.TENSOR_AXIS), ())
    spec = SpeculativeConfig.plain()
    program = StepProgram(target=target, drafter=NoDrafter(), spec=spec)
    limits = ServeLimits(
        spec=spec,
        num_slots=rows,
        num_pages=rows * PAGES_A_ROW,
        page_size=PAGE,
        context_length=PAGES_A_ROW * PAGE,
        decode_buckets=(rows,),
        prefill_buckets=(1024,),
        prefill_rows=16,
    )
    params = dummy_params(
        program.tables, mesh=mesh, vocab_size=model.vocab_size, dtype=jnp.bfloat16
    )
    return Step(program=program, limits=limits, mesh=mesh, params=params)


def run(step: Step, executable: Any, state: Any, count: int) -> Any:
    flat, lens = step.batch(), np.asarray(state.rows.seq_lens)
    for _ in range(count):
        state, _ = executable(step.params, state, flat)
    jax.block_until_ready(state)
    fresh = jax.device_put(np.minimum(lens, CONTEXT), state.rows.seq_lens.sharding)
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, seq_lens=fresh))


def step_ms(step: Step, executable: Any) -> list[float]:
    """Of SLOPES pairs of runs, the second with STEPS more than the first."""
    state = run(step, executable, step.state(), STEPS)
    found = []
    for _ in range(SLOPES):
        seconds = []
        for count in (8, 8 + STEPS):
            started = time.perf_counter()
            state = run(step, executable, state, count)
            seconds.append(time.perf_counter() - started)
        found.append(1e3 * (seconds[1] - seconds[0]) / STEPS)
    return found


def traced(step: Step, executable: Any) -> list[tuple[str, float, float]]:
    """(name, start, microseconds) of every launch of the fourth of four steps, in order."""
    state = run(step, executable, step.state(), 4)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(step, executable, state, 4)
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = [
            (str(dict(event.stats)["hlo_op"]), event.start_ns / 1e3, event.duration_ns / 1e3)
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
            if "hlo_op" in dict(event.stats)
        ]
    events.sort(key=lambda event: event[1])
    return events[-(len(events) // 4) :]


def described(events: list[tuple[str, float, float]], text: str) -> list[dict[str, Any]]:
    """The launches with the names of their kernels, from the compiled text, and the gaps before."""
    pattern = re.compile(r'%?([\w.-]+) = .*?op_name="[^"]*?([^"/]*)/(?:pallas_call|mpmd_map)"')
    kernels = dict(pattern.findall(text))
    rows, before = [], None
    for name, start, took in events:
        row: dict[str, Any] = {"name": kernels.get(name, name), "microseconds": round(took, 2)}
        if before is not None:
            row["gap"] = round(start - before, 2)
        rows.append(row)
        before = start + took
    return rows


def measured(name: str, *, rows: int, layers: tuple[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name, "rows": rows, "layers": list(layers)}
    medians, floors = [], []
    for count in layers:
        whole = MODELS[name]
        model = dataclasses.replace(whole, layers=whole.layers[:count])
        step = make_step(model, rows=rows)
        all_ms = step_ms(step, step.compiled(with_graphs=True))
        medians.append(statistics.median(all_ms))
        floors.append(floor_ms(model, batch=rows, nodes=1, context=CONTEXT, itemsize=2))
        found[f"step_ms_{count}"] = [round(ms, 4) for ms in all_ms]
        if count == layers[0] and jax.default_backend() == "gpu":
            plain = step.compiled(with_graphs=False)
            found["launches"] = described(traced(step, plain), plain.as_text() or "")
        del step
    more = layers[1] - layers[0]
    found["layer_us"] = round(1e3 * (medians[1] - medians[0]) / more, 2)
    found["layer_floor_us"] = round(1e3 * (floors[1] - floors[0]) / more, 2)
    found["rest_us"] = round(1e3 * medians[0] - layers[0] * found["layer_us"], 1)
    found["whole_ms"] = round(
        medians[0] + (whole.num_layers - layers[0]) * found["layer_us"] / 1e3, 4
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 12])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells = []
    for name in options.models:
        for rows in options.rows:
            first, second = options.layers
            cell = measured(name, rows=rows, layers=(first, second))
            for row in cell.get("launches", ()):
                print(f"{row['microseconds']:7.2f} gap {row.get('gap', 0):6.2f}  {row['name']}")
            print({k: v for k, v in cell.items() if k != "launches"}, flush=True)
            cells.append(cell)
            if options.out:
                write_result(options.out, {"cells": cells})


if __name__ == "__main__":
    main()
