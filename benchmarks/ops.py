"""Every op of a kernel bundle at the real models' shapes: its time, its floor, and XLA's time.

    python -m benchmarks.ops [--op attention moe] [--model llama-3.1-8b]
    python -m benchmarks.ops --op attention --size batch=8 queries=4 context=2048
    python -m benchmarks.ops --op attention --tuning stages=3 --tuning loader=producer,consumers=2
    python -m benchmarks.ops --model tiny --bundle reference --op add_norm --size tokens=4

A case is one op at one size (benchmarks/op_cases.py). Its program calls the op of the platform's
bundle on several sets of arguments, one after the other, so that the L2 cache serves none of them.
The result is compared with XLA's first, and the time of one that differs is an error. The floor is
the bytes that a call must read at 4.49 TB/s, or its products at 790 TFLOP/s where that takes
longer, both measured on one H200. Each --tuning replaces fields of the tuning that the op would
choose. The result file is complete after every case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from benchmarks import mixer_cases, op_cases
from benchmarks.environment import write_result
from benchmarks.op_cases import MODELS, Arrays, Case, Sizes
from benchmarks.timing import (
    FLOPS_PER_SECOND,
    READ_BYTES_PER_SECOND,
    num_copies,
    seconds_per_run,
)
from jspec.device.fp8 import FP8Weight
from jspec.pallas_kernels.bundles import OPS as BUNDLES
from jspec.pallas_kernels.ops import Ops

OPS = {**op_cases.OPS, **mixer_cases.OPS}
DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-9b", "glm-4.7-flash")
RESULTS = Path(__file__).parent / "results"
PLANNED: Mapping[str, Any] = {}  # the tuning that the op chooses

Row = dict[str, Any]


def choosers(op: str) -> list[tuple[ModuleType, str]]:
    """Return the functions that choose an op's GPU tuning. Raises ValueError for an op without
    any."""
    from jspec.pallas_kernels import ops_gpu
    from jspec.pallas_kernels.attention import gpu as attention
    from jspec.pallas_kernels.attention import gpu_wide
    from jspec.pallas_kernels.delta_rule import gpu as delta_rule
    from jspec.pallas_kernels.delta_rule import gpu_chunks
    from jspec.pallas_kernels.fp8_product import gpu as fp8_product
    from jspec.pallas_kernels.gated_mlp import gpu as gated
    from jspec.pallas_kernels.prefill import gpu as prefill
    from jspec.pallas_kernels.sample import gpu as sample
    from jspec.pallas_kernels.sample import gpu_rank

    found: dict[str, list[tuple[ModuleType, str]]] = {
        "attention": [(attention, "choose_tuning"), (gpu_wide, "choose_wide_tuning")],
        "delta_rule": [(delta_rule, "choose_tuning")],
        "delta_prefill": [(gpu_chunks, "choose_chunks")],
        "latent": [(gpu_wide, "choose_wide_tuning")],
        "attention_fp8": [(attention, "choose_tuning")],
        "prefill": [(prefill, "choose_tuning")],
        "gated_mlp": [(gated, "choose_gated"), (ops_gpu, "choose_few_gated")],
        "fp8_product": [(fp8_product, "choose")],
        "experts": [(ops_gpu, "choose_experts")],
        "moe": [(ops_gpu, "choose_experts"), (ops_gpu, "choose_few")],
        "sample": [(sample, "choose_tuning")],
        "rank": [(gpu_rank, "choose_tuning")],
    }
    if op not in found:
        raise ValueError(f"op is {op!r}; expected one with a tuning: {', '.join(found)}")
    return found[op]


@contextmanager
def tuned(op: str, changes: Mapping[str, Any]) -> Iterator[None]:
    """Replace these fields of the tuning that the op chooses while a program is traced.

    Raises ValueError if no tuning with these fields was chosen: another kernel runs, or XLA's.
    """
    used = not changes

    def changed(choose: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal used
        tuning = choose(*args, **kwargs)
        if tuning is None or not changes.keys() <= {field.name for field in fields(tuning)}:
            return tuning
        used = True
        return replace(tuning, **changes)

    with ExitStack() as stack:
        for module, name in choosers(op) if changes else ():
            chosen = partial(changed, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, chosen))
        yield
    if not used:
        raise ValueError(f"no tuning with {', '.join(changes)} was chosen")


@dataclass(frozen=True)
class Arguments:
    """The sets of arguments of a case, on the device. read: of `structure`, flat."""

    read: list[list[jax.Array]]
    updated: list[Arrays]
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, case: Case, copies: int | None) -> Arguments:
        """Make the sets. copies: None for enough to exceed the L2 cache."""
        made = [case.make(0)]
        if copies is None:
            size = sum(x.nbytes for x in jax.tree.leaves(made))
            copies = num_copies(case.num_bytes, argument_bytes=size)
        made += [case.make(1000 * i) for i in range(1, copies)]
        read = [jax.tree.leaves(placed(arguments, case)) for arguments, _ in made]
        return cls(read, [state for _, state in made], jax.tree.structure(made[0][0]))


def placed(arguments: Arrays, case: Case) -> Arrays:
    """Return the arguments, the last one column-major if the case requires it."""
    if not case.column_major:
        return arguments
    *others, weight = arguments

    def turned(w: jax.Array) -> jax.Array:
        return jax.device_put(w, Format(Layout(major_to_minor=(1, 0)), w.sharding))

    if isinstance(weight, FP8Weight):
        return (*others, replace(weight, codes=turned(weight.codes)))
    return (*others, turned(weight))


def compiled(case: Case, ops: Ops, arguments: Arguments) -> Any:
    """Compile (updated arrays, read arrays) -> (updated arrays, results)."""

    def program(updated: list[Arrays], read: list[Any]) -> tuple[list[Arrays], list[Arrays]]:
        sets = [jax.tree.unflatten(arguments.structure, leaves) for leaves in read]
        done = [case.run(ops, *each) for each in zip(sets, updated, strict=True)]
        return [state for _, state in done], [result for result, _ in done]

    def abstract(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format)

    read = jax.tree.map(abstract, arguments.read)
    options = ops.compiler_options(decode_tokens=case.decode_tokens)
    lowered = jax.jit(program, donate_argnums=0).lower(arguments.updated, read)
    return lowered.compile(compiler_options=options or None)


def run_once(program: Any, arguments: Arguments) -> Arrays:
    """Return the first call's result and updated arrays; the arguments remain."""
    copies = jax.tree.map(jnp.copy, arguments.updated)
    updated, results = program(copies, arguments.read)
    return jax.tree.map(np.asarray, (results[0], updated[0]))


def seconds_per_call(program: Any, arguments: Arguments, *, samples: int) -> float:
    updated = jax.tree.map(jnp.copy, arguments.updated)

    def run() -> Any:
        nonlocal updated
        updated, results = program(updated, arguments.read)
        return updated, results

    return seconds_per_run(run, samples=samples) / len(arguments.read)


def difference(found: Arrays, wanted: Arrays, *, left_out: float = 0.0) -> float:
    """Return the largest difference, as a share of the largest value; infinite if ids differ.

    left_out: share of each array's rows, those that differ most, whose difference does not count
    """
    worst = 0.0
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not jnp.issubdtype(right.dtype, jnp.floating):
            worst = worst if np.array_equal(mine, right) else np.inf
            continue
        a, b = (np.asarray(x, np.float32) for x in (mine, right))
        rows = np.abs(a - b).reshape(a.shape[0], -1).max(axis=1) if left_out else np.abs(a - b)
        counted = np.sort(rows.ravel())[: rows.size - int(left_out * len(rows))]
        if np.isnan(rows).any():
            return np.nan
        share = np.max(counted, initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)
        worst = max(worst, float(share))
    return worst


def measure(
    op: str,
    case: Case,
    ops: Ops,
    *,
    tunings: Sequence[Mapping[str, Any]],
    samples: int = 7,
    copies: int | None = None,
) -> Iterator[Row]:
    """Return a row per tuning; a failing one has its error."""
    arguments = Arguments.of(case, copies)
    xla = compiled(case, BUNDLES["xla"], arguments)
    wanted = run_once(xla, arguments)
    xla_seconds = seconds_per_call(xla, arguments, samples=samples)
    floor = max(case.num_bytes / READ_BYTES_PER_SECOND, case.flops / FLOPS_PER_SECOND)
    for changes in tunings:
        row: Row = {"tuning": dict(changes)} if changes else {}
        try:
            with tuned(op, changes):
                program = compiled(case, ops, arguments)
            row["difference"] = difference(
                run_once(program, arguments), wanted, left_out=case.left_out
            )
            if not row["difference"] <= case.worst:
                raise ValueError(f"differs by {row['difference']:.3g}; expected {case.worst:g}")
            seconds = seconds_per_call(program, arguments, samples=samples)
            row |= {
                "microseconds": round(1e6 * seconds, 3),
                "xla_microseconds": round(1e6 * xla_seconds, 3),
                "floor_microseconds": round(1e6 * floor, 3),
                "share_of_floor": round(floor / seconds, 4),
                "times_xla": round(xla_seconds / seconds, 4),
            }
        except Exception as error:  # a candidate may fail in any way
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield row


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, Sizes, Case]]:
    """Yield (op, model, sizes, case) of all requested ones; an op skips models without it."""
    for op in options.op:
        build, defaults = OPS[op]
        for name in options.model:
            for sizes in [options.size] if options.size else defaults:
                try:
                    yield op, name, sizes, build(MODELS[name], **sizes)
                except ValueError:  # a dense model has no experts, and the other way round
                    continue


def named_values(words: Sequence[str]) -> dict[str, Any]:
    """In: ["batch=8", "loader=producer"]    Out: {"batch": 8, "loader": "producer"}"""
    found: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def described(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    return (
        f"{row['microseconds']:10.1f} us, {row['share_of_floor']:6.1%} of the floor, "
        f"{row['times_xla']:.2f} times as fast as XLA"
    )


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every case has its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS))
    parser.add_argument("--size", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tuning", action="append", default=[], metavar="NAME=VALUE,...")
    parser.add_argument("--bundle", choices=BUNDLES, default=None, help="default: the platform's")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--copies", type=int, help="sets of arguments; default: past the L2 cache")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case starts after this")
    parser.add_argument("--output", type=Path, default=RESULTS / "ops.json")
    options = parser.parse_args(argv)
    options.size = named_values(options.size)
    deadline = time.monotonic() + options.seconds
    platform = {"gpu": "gpu", "tpu": "tpu"}.get(jax.default_backend(), "xla")
    ops = BUNDLES[options.bundle or platform]
    tunings = [PLANNED, *(named_values(words.split(",")) for words in options.tuning)]
    rows: list[Row] = []
    for op, model, sizes, case in cases(options):
        name = f"{op} {model} {' '.join(f'{key}={value}' for key, value in sizes.items())}"
        of_case = {"op": op, "model": model, "sizes": dict(sizes)}
        if time.monotonic() > deadline:
            rows.append({**of_case, "error": "out of time"})
            continue
        try:
            how = {"samples": options.samples, "copies": options.copies}
            for row in measure(op, case, ops, tunings=tunings, **how):
                rows.append(of_case | row)
                print(f"{name} {row.get('tuning', '')}: {described(row)}", flush=True)
                write_result(options.output, {"bundle": ops.name, "rows": rows})
        except Exception as error:  # XLA's program may fail, too
            rows.append({**of_case, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            print(f"{name}: {rows[-1]['error']}", flush=True)
    if not rows:
        parser.error(f"no op of {options.op} has a case for {options.model}")
    write_result(options.output, {"bundle": ops.name, "rows": rows})
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
