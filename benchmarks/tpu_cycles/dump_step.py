"""Compile one step program for an absent TPU and keep it as the compiler scheduled it.

    python -m benchmarks.tpu_cycles.dump_step DIR llama-3.1-8b v6e:2x2 3/1/4 'decode B=64'

DIR gets hlo.txt, with the cycles of each operation by XLA's cost model, and step.json: sizes and
versions. With --evaluate libtpu also evaluates the scheduled bundles of every operation, which is
closer but takes minutes, and aborts on copies into scalar memory, which every Mosaic kernel with
prefetched scalars has. So each kernel is replaced by an empty one with the same operands, results
and aliases, and its time is added from elsewhere (`step_time`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import pallas as pl

from benchmarks.tpu_cycles.hlo import STUB
from jspec.engine.programs.compilation import compiler_options, lower
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.transfer import shape_of
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.weight_format import QUANTIZATIONS
from tests.engine import step_compile
from tests.support.flat_limits import with_limits

_pallas_call = pl.pallas_call


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("model")
    parser.add_argument("topology")
    parser.add_argument("shape", metavar="S/K/N")
    parser.add_argument("program")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--page-size", type=int, help="unset: the default of the chip")
    parser.add_argument("--tokens", type=int, help="the prefill bucket")
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the target")
    parser.add_argument("--evaluate", action="store_true", help="cycles of the scheduled bundles")
    return parser.parse_args()


def empty_kernel(
    kernel: Any, out_shape: Any = None, *, name: str | None = None, **options: Any
) -> Any:
    """Return a call with the operands, results and aliases of `pallas_call`, which does nothing.

    The kernel's claim of vector memory is not kept: with it XLA found no room in programs that
    compile with the kernels themselves.
    """
    single = not isinstance(out_shape, (list, tuple))
    outs = [out_shape] if single else list(out_shape)
    known = name or getattr(kernel, "__name__", "kernel")
    aliases = dict(options.get("input_output_aliases") or {})

    def call(*args: Any) -> Any:
        flat = jax.tree.leaves(args)
        hbm = pl.BlockSpec(memory_space=pl.ANY)
        made = _pallas_call(
            lambda *_: None,
            out_shape=outs,
            in_specs=[hbm] * len(flat),
            out_specs=[hbm] * len(outs),
            input_output_aliases=aliases,
            name=STUB + re.sub(r"\W", "", known),
        )(*flat)
        return made[0] if single else list(made)

    return call


def dump(options: argparse.Namespace) -> dict[str, Any]:
    model = step_compile.first_layers(step_compile.MODELS[options.model], options.layers)
    device_kind = step_compile.devices_of(options.topology)[0].device_kind
    case = step_compile.make_case(
        model,
        options.topology,
        options.shape,
        page_size=options.page_size or OPS["tpu"].page_size_on(device_kind),
        ops=OPS["tpu"],
        rows=options.rows,
        drafter=options.drafter,
        quantization=options.quantization,
    )
    if options.tokens:
        limits = with_limits(case.limits, prefill_buckets=(options.tokens,))
        case = dataclasses.replace(case, limits=limits)
    keys = {str(key): key for key in program_keys(case.limits)}
    key = keys[options.program]
    program = dataclasses.replace(case.program, options=key.options)
    platform = case.mesh.devices.flat[0].platform
    started = time.monotonic()
    compiled = lower(
        shape_of(key, case.limits), program, mesh=case.mesh, params=case.params, state=case.state
    ).compile(
        compiler_options=compiler_options(key, case.limits, platform=platform, ops=program.ops)
    )
    (options.directory / "hlo.txt").write_text(compiled.as_text(), "utf-8")
    memory = compiled.memory_analysis()
    return {
        "model": options.model,
        "topology": options.topology,
        "shape": options.shape,
        "program": options.program,
        "rows": options.rows,
        "layers": model.num_layers,
        "devices": case.mesh.size,
        "page_size": case.limits.pool.page_size,
        "evaluated": options.evaluate,
        "seconds": round(time.monotonic() - started, 1),
        "weight_bytes": step_compile.num_bytes(case.local_weights()),
        "temp_bytes": memory.temp_size_in_bytes,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }


def main() -> None:
    options = parse()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.evaluate:  # libtpu reads its flags once, when a topology is first described
        flag = f"--xla_jf_dump_static_llo_profile_to={options.directory}/profile"
        os.environ["LIBTPU_INIT_ARGS"] = flag
    pl.pallas_call = empty_kernel
    report = dump(options)
    (options.directory / "step.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
