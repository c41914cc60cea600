"""Loading a checkpoint: its files read raw, by safetensors alone, and onto the device by jspec.

    python -m benchmarks.load_checkpoint [--model llama-3.1-8b] [--layers 2 --vocab-size 16032]
    python -m benchmarks.load_checkpoint --checkpoint DIRECTORY

Without --checkpoint, random weights in the shapes of --model (with fewer --layers and a smaller
--vocab-size, for a small machine) are written into a temporary folder, in bfloat16, in several
files of about --shard-mib MiB, and deleted afterwards.

Each reading is a process of its own, --repeats times, all kinds in turn, and the fastest is kept,
since other work on the machine only adds: "raw" reads each file into one buffer, "safetensors"
reads every tensor into a dict of numpy arrays, "host" is jspec's host form (one thread, all of it
in numpy), "device" streams it onto the first device, as an engine does. Seconds are of the reading
alone, without imports; CPU seconds are of all its threads. Files may lie in the page cache; --cold
drops them from it first, where the system lets a process do so. Host memory is the largest resident
set beside what was resident before. On a CPU the device's memory is the host's, so "device" holds
the model there, once. Writes
benchmarks/results/load_checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.environment import write_result
from benchmarks.workloads import WORKLOADS
from jspec.device import sharding
from jspec.engine.weights.weight_stream import put_on, stream
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.files.tensor_files import HostArray
from jspec.models.params import Part
from jspec.models.registry import family_named, table_of
from jspec.spec.model_spec import ModelSpec

MIB = 2**20
RESULT = Path(__file__).parent / "results" / "load_checkpoint.json"


def write_random(path: Path, spec: ModelSpec, *, dtype: str, shard_mib: int) -> None:
    """A checkpoint of `spec` in `dtype`: config.json, an index, and files of random weights.

    A file ends with the tensor by which it passes `shard_mib` MiB.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = family_named(spec.family).to_json(spec) | {"torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(0)
    where: dict[str, str] = {}
    held: dict[str, HostArray] = {}

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(held, path / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(held, name))
        held.clear()

    for part in _stored_parts(spec):
        for name in part.names:
            held[name] = _random(rng, part.shape, np.dtype(dtype))
            if sum(value.nbytes for value in held.values()) >= shard_mib * MIB:
                flush()
    if held:
        flush()
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _stored_parts(spec: ModelSpec) -> Iterator[Part]:
    for weight in table_of(spec):
        if weight.layouts and weight.tied_to is None:
            yield from weight.layouts[0]


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    """Finite numbers of both signs: bits of floats below 2, without an exponent of all ones."""
    words = rng.integers(0, 2**16, size=(*shape, dtype.itemsize // 2), dtype=np.uint16)
    words[..., -1] &= 0xBFFF  # little-endian: the last word has sign and exponent
    return words.view(dtype).reshape(shape)


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def read_raw(path: Path) -> None:
    """Every byte, file by file, into one buffer of 16 MiB: what the disk or page cache gives."""
    buffer = bytearray(16 * MIB)
    for file in weight_files(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def read_safetensors(path: Path) -> dict[str, HostArray]:
    """Every tensor as safetensors' numpy interface gives it, all of them held."""
    tensors: dict[str, HostArray] = {}
    for file in weight_files(path):
        with safe_open(file, framework="np") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def read_host(path: Path) -> dict[str, Any]:
    """jspec's host form, in bfloat16."""
    return load_target(path, load_model_spec(path), dtype=ml_dtypes.bfloat16)


def read_device(path: Path) -> dict[str, Any]:
    """What an engine does: the weights at their places on the first device."""
    mesh = sharding.make_mesh(jax.devices()[:1])
    put = put_on(mesh, by_columns=False)
    return load_target(
        path,
        load_model_spec(path),
        dtype=ml_dtypes.bfloat16,
        place=lambda reads: stream(reads, put),
    )


KINDS: Mapping[str, Callable[[Path], Any]] = {
    "raw": read_raw,
    "safetensors": read_safetensors,
    "host": read_host,
    "device": read_device,
}


def drop_from_cache(path: Path) -> None:
    """Asks the system to forget the files' pages; only clean ones are, and only on Linux."""
    for file in weight_files(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(kind: str, path: Path) -> dict[str, float]:
    """One reading in this process: its seconds, and the MiB by which the resident set rose."""
    jax.block_until_ready(jnp.zeros(1))  # the device is up before the clock starts
    before = _status_mib("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    kept = KINDS[kind](path)
    found = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    del kept
    return {**found, "host_mib": max(_status_mib("VmHWM") - before, 0.0)}


def _status_mib(field: str) -> float:
    """Linux's own count of this program: getrusage's largest set counts the parent's as well."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def in_process(kind: str, path: Path) -> dict[str, float]:
    """`measure` in a process of its own."""
    module = "benchmarks.load_checkpoint"
    done = subprocess.run(
        [sys.executable, "-m", module, "--measure", kind, "--checkpoint", str(path.resolve())],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(path: Path, *, repeats: int, cold: bool) -> dict[str, Any]:
    """All kinds in turn, `repeats` times: the fastest of each, and the seconds of every run."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, found in runs.items():
            if cold:
                drop_from_cache(path)
            found.append(in_process(kind, path))
    gib = sum(file.stat().st_size for file in weight_files(path)) / 2**30
    table: dict[str, Any] = {}
    for kind, found in runs.items():
        best = min(found, key=lambda run: run["seconds"])
        table[kind] = {
            "seconds": round(best["seconds"], 3),
            "gib_per_second": round(gib / best["seconds"], 2),
            "cpu_seconds": round(best["cpu_seconds"], 3),
            "peak_host_mib": round(max(run["host_mib"] for run in found)),
            "all_seconds": [round(run["seconds"], 3) for run in found],
        }
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=list(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="at most the model's")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument("--checkpoint", type=Path, help="of a target; nothing is written")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache first")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=list(KINDS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure, args.checkpoint)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.checkpoint
        if path is None:
            workload = WORKLOADS[args.model]
            spec = workload.target
            if args.layers is not None:
                spec = replace(spec, layers=spec.layers[: args.layers])
            if args.vocab_size is not None:
                spec = replace(spec, vocab_size=args.vocab_size, eos_token_ids=())
            path = Path(folder) / "target"
            write_random(path, spec, dtype="bfloat16", shard_mib=args.shard_mib)
        files = [file.stat().st_size for file in weight_files(path)]
        found = {
            "checkpoint": {"files": len(files), "mib": round(sum(files) / MIB)},
            "pages": "dropped first" if args.cold else "cached",
            "loads": compare(path, repeats=args.repeats, cold=args.cold),
        }
    write_result(args.output, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
