"""Launches a layer of a decode step, counted in programs compiled for an H200 that is not there.

    python -m benchmarks.step_launches --model qwen3-30b-a3b [--cells plain/1 plain/64 chain/1]

A step is compiled with the model's first two and first four layers; what the second has beside the
first is two layers'. Counted are the instructions outside of fusions that XLA launches something
for: fusions, products, kernels, copies. Bitcasts, tuples and the like launch nothing. Needs what
docs/kernels.md lists for compiling for a GPU; no GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import argparse
import dataclasses
import json
import re
from collections import Counter

import jax
import jax.numpy as jnp

from jspec.engine.programs.compilation import ProgramShape, compiler_options, lower
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.runner import init_state
from jspec.messages.plan import StepKind
from jspec.pallas_kernels.choose import OPS
from tests.engine.step_compile import ALGORITHMS, MODELS, first_layers, make_case

SHAPES = {"plain": "0/1/1", "chain": "3/1/4"}  # and of every drafter: a chain, too
LAYERS = (2, 4)
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = .*?[\]\})] (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
FREE = {
    "bitcast", "tuple", "get-tuple-element", "parameter", "constant", "call", "conditional",
    "while", "after-all", "opt-barrier", "partition-id", "replica-id", "iota",
}  # fmt: skip


def launches(text: str) -> Counter[str]:
    """Of a compiled module: how many instructions of each name launch something."""
    found: Counter[str] = Counter()
    inside = True
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            # a fusion's body, or a reduction's, is one launch where it is called
            inside = not re.match(r"%?(fused|wrapped|region|gemm_fusion|\S*_sub_comp)", line)
            continue
        match = INSTRUCTION.match(line)
        if inside and match and match["op"] not in FREE:
            found[named(match)] += 1
    return found


def named(match: re.Match[str]) -> str:
    """What it is, without the number that XLA gives every instruction."""
    stem = re.sub(r"[._]\d+", "", match["name"])
    target = re.search(r'custom_call_target="([^"]+)"', match["rest"])
    kernel = re.search(r'name\s*=\s*\\?"(\w+)', match["rest"])
    source = re.search(r'op_name="([^"]*)"', match["rest"])
    words = [match["op"], stem]
    if target:
        words = [target[1], kernel[1] if kernel else stem]
    if source:
        words.append("/".join(source[1].split("/")[-3:]))
    return " | ".join(words)


def compiled_text(
    model: str, shape: str, *, rows: int, layers: int, drafter: str = "eagle3"
) -> str:
    """The decode step of `rows` rows."""
    case = make_case(
        first_layers(MODELS[model], layers),
        "h200",
        shape,
        page_size=64,
        ops=OPS["gpu"],
        drafter=drafter,
    )
    limits = dataclasses.replace(
        case.limits, num_slots=rows, decode_buckets=(rows,), num_pages=64 * 22
    )
    state = jax.eval_shape(
        lambda: init_state(case.program, limits, shards=1, kv_dtype=jnp.bfloat16)
    )
    (key, *_) = [key for key in program_keys(limits) if key.kind is StepKind.DECODE]
    program = dataclasses.replace(case.program, features=key.features)
    options = compiler_options(key, limits, platform="gpu", ops=program.ops)
    options["xla_gpu_enable_command_buffer"] = ""  # as in the entry, not in calls
    lowered = lower(
        ProgramShape.of(key, limits), program, mesh=case.mesh, params=case.params, state=state
    )
    return lowered.compile(compiler_options=options).as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--cells", nargs="+", default=["plain/1"], help="plain/1 chain/8 mtp/1")
    parser.add_argument("--dump", help="a folder for the compiled texts")
    options = parser.parse_args()
    for cell in options.cells:
        mode, rows = cell.split("/")
        counts = []
        for layers in LAYERS:
            text = compiled_text(
                options.model,
                SHAPES.get(mode, "3/1/4"),
                rows=int(rows),
                layers=layers,
                drafter=mode if mode in ALGORITHMS else "eagle3",
            )
            if options.dump:
                with open(f"{options.dump}/{options.model}-{mode}-{rows}-{layers}.txt", "w") as out:
                    out.write(text)
            counts.append(launches(text))
        fewer, more = counts
        each = {name: (more[name] - fewer[name]) / (LAYERS[1] - LAYERS[0]) for name in more}
        each = {name: count for name, count in each.items() if count}
        for name, count in sorted(each.items()):
            print(f"{count:5.1f}  {name}")
        print(
            json.dumps({"cell": cell, "a layer": sum(each.values()), "step": sum(fewer.values())})
        )


if __name__ == "__main__":
    main()
