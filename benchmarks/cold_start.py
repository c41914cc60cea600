"""How soon a cold engine serves, and what building the rest of its programs costs meanwhile.

    python -m benchmarks.cold_start [--model llama-3.1-8b] [--mode chain] [--out FILE]

The compilation cache is an empty folder and the weights are made, not read. Reported: seconds until
the engine is ready for any request, until all programs are there, and the longest gaps between two
chunks of one stream while the rest is built and afterwards. Then a second, warm start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe
from benchmarks.workloads import WORKLOADS, Workload
from jspec import Engine


def gaps(
    engine: Any, workload: Workload, rng: np.random.Generator, *, seconds: float
) -> list[float]:
    """Seconds between the chunks of streams that run one after the other for so long."""
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        prompt = rng.integers(0, workload.target.vocab_size, workload.prompt_len).tolist()
        params = {"temperature": 0, "max_new_tokens": workload.long_run, "ignore_eos": True}
        last = None
        for _ in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now
    return found


def in_ms(found: list[float]) -> dict[str, float]:
    """p50, p99 and the longest of some gaps."""
    return {
        "p50_ms": round(1e3 * float(np.percentile(found, 50)), 2),
        "p99_ms": round(1e3 * float(np.percentile(found, 99)), 2),
        "longest_ms": round(1e3 * max(found), 2),
        "count": len(found),
    }


def run(model: str, mode: str) -> dict[str, Any]:
    workload = WORKLOADS[model]
    with tempfile.TemporaryDirectory() as folder:
        workload.write_configs(Path(folder))
        arguments = workload.arguments(mode, Path(folder), acceptance=3.0)
        arguments |= {"compilation_cache_dir": f"{folder}/programs", "compile_at_start": "auto"}
        started = time.perf_counter()
        engine = Engine(**arguments)
        result: dict[str, Any] = {"ready_seconds": round(time.perf_counter() - started, 2)}
        info = engine.get_server_info()
        result["programs_at_ready"] = info["num_programs"]
        rng, meanwhile = np.random.default_rng(0), []
        while info["num_programs"] < info["num_programs_wanted"]:
            meanwhile += gaps(engine, workload, rng, seconds=1.0)
            info = engine.get_server_info()
        result["all_seconds"] = round(time.perf_counter() - started, 2)
        result["programs"] = info["num_programs"]
        if meanwhile:
            result["gaps_meanwhile"] = in_ms(meanwhile)
        result["gaps_afterwards"] = in_ms(gaps(engine, workload, rng, seconds=3.0))
        engine.shutdown()
        started = time.perf_counter()
        again = Engine(**arguments)
        result["warm_seconds"] = round(time.perf_counter() - started, 2)
        again.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=WORKLOADS)
    parser.add_argument("--mode", default="chain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {**run(options.model, options.mode), "environment": describe()}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
