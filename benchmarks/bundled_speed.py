"""Speculation compared with plain decoding on this machine: the bundled pair at batch 1, start-up.

    python -m benchmarks.bundled_speed [--out benchmarks/results/bundled_speed_cpu.json]
    python -m benchmarks.bundled_speed --num-continuous-decode-steps 1 4
    python -m benchmarks.bundled_speed --heads OUT --shapes plain 5/1/6 DFLASH:7/1/8 DFLASH:7/4/16

Engines for plain decoding and for each S/K/N, each with the given numbers of rounds per step
("3/1/4 x4" is four; plain decoding with one is always included), exist at the same time and
alternate prompt by prompt, so that other load affects all alike. Reported are median ratios. Texts
are asserted to be equal. The host gap is the time between a result's arrival and the end of the
next dispatch, by overlap depth, from the recorded trace.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.acceptance import DRAFTERS
from benchmarks.environment import write_result
from benchmarks.heldout import heldout_prompts
from jspec import Engine
from jspec.engine.weights.loading import BUNDLED
from jspec.serving.trace import TraceEvent, TraceKind
from jspec.training.data.corpus import read_corpus

SHAPES = ("plain", "3/1/4", "5/1/6", "4/4/16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--corpus", type=Path, help="Of another Python; unset: the running one's")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-continuous-decode-steps", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help="plain, S/K/N, or a drafter of benchmarks.acceptance and its S/K/N, with : between",
    )
    parser.add_argument(
        "--heads", type=Path, default=BUNDLED, help="Folder of the drafters' weights"
    )
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 1, 2], help="of the host gap")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/bundled_speed_cpu.json")
    )
    args = parser.parse_args()
    rounds = args.num_continuous_decode_steps
    engines = {"plain": make_engine("plain", args.dtype)}
    for name, num_rounds in itertools.product(args.shapes, rounds):
        full_name = name if num_rounds == 1 else f"{name} x{num_rounds}"
        if full_name not in engines:
            engines[full_name] = make_engine(
                name, args.dtype, heads=args.heads, num_continuous_decode_steps=num_rounds
            )
    prompts = heldout_prompts(
        engines["plain"].tokenizer,
        count=args.prompts,
        length=args.prompt_tokens,
        seed=1,
        corpus=read_corpus(args.corpus) if args.corpus else None,
    )
    tables = {}
    for temperature in args.temperatures:
        tables[f"temperature {temperature:g}"] = compare(
            engines, prompts, temperature, new_tokens=args.new_tokens
        )
    startup = {name: round(engine.startup_seconds, 2) for name, engine in engines.items()}
    for engine in engines.values():
        engine.shutdown()
    gaps = {
        f"depth {depth}" + (f" x{num_rounds}" if num_rounds > 1 else ""): host_gap(
            depth, prompts[0], args.dtype, num_rounds=num_rounds
        )
        for depth, num_rounds in itertools.product(args.depths, rounds)
    }
    for name, gap in gaps.items():
        print(f"host gap, {name}: {gap}")
    write_result(args.out, {"speed": tables, "startup_seconds": startup, "host_gap": gaps})


def make_engine(name: str, dtype: str, *, heads: Path = BUNDLED, **more: Any) -> Engine:
    """Make an engine for one row with all programs. name: as in --shapes"""
    shared = {"max_running_requests": 1, "dtype": dtype, "compile_at_start": "common", **more}
    shared["disable_radix_cache"] = True  # the second run of a prompt is timed as the first
    if name == "plain":
        return Engine(speculative_algorithm="NONE", **shared)
    drafter, _, shape = name.rpartition(":")
    steps, topk, nodes = map(int, shape.split("/"))
    arguments, folder = DRAFTERS[drafter or "EAGLE3"]
    if folder is not None:
        arguments = {**arguments, "speculative_draft_model_path": str(heads / folder)}
    return Engine(
        **arguments,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        **shared,
    )


def compare(
    engines: dict[str, Engine],
    prompts: list[tuple[int, ...]],
    temperature: float,
    *,
    new_tokens: int,
) -> dict[str, Any]:
    """Return median decode tokens/s by engine and the median of per-prompt ratios to plain."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    lengths: dict[str, list[float]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    for i, prompt in enumerate(prompts):
        params = {
            "temperature": temperature,
            "max_new_tokens": new_tokens,
            "sampling_seed": i,
            "ignore_eos": True,
        }
        texts = {}
        for name, engine in engines.items():
            seconds, result = decode_seconds(engine, prompt, params)
            texts[name] = result["output_ids"]
            speeds[name].append((new_tokens - 1) / seconds)
            lengths[name].append(result["meta_info"].get("acceptance_length", 1.0))
            same[name] += texts[name] == texts["plain"]
    table = {}
    for name in engines:
        ratios = [a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)]
        table[name] = {
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
            "ratio_to_plain": round(statistics.median(ratios), 3),
            "acceptance_length": round(statistics.mean(lengths[name]), 3),
            "same_text_as_plain": f"{same[name]} of {len(prompts)}",
        }
        print(f"T={temperature:g} {name:9} {table[name]}", flush=True)
    return table


def decode_seconds(
    engine: Engine, prompt: tuple[int, ...], params: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """Return the seconds from the first token to the last, and the finished result."""
    stream = engine.generate(input_ids=prompt, sampling_params=params, stream=True)
    result: dict[str, Any] = next(stream)
    first = time.perf_counter()
    for chunk in stream:
        result = chunk
    return time.perf_counter() - first, result


def host_gap(
    depth: int, prompt: tuple[int, ...], dtype: str, *, num_rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of a decode step, all rounds included, and the host's share.

    The gap is from the end of collecting step t to the end of the next dispatch. At depth 0 the
    device is idle during it; at depth 1 and 2 it has queued work.
    """
    trace: list[TraceEvent] = []
    rounds = {"num_continuous_decode_steps": num_rounds}
    with make_engine("3/1/4", dtype, overlap_depth=depth, trace=trace, **rounds) as engine:
        params = {"temperature": 0, "max_new_tokens": 256, "ignore_eos": True}
        engine.generate(input_ids=prompt, sampling_params=params)
        trace.clear()
        engine.generate(input_ids=prompt, sampling_params=params)
    collects = [e for e in trace if e.kind is TraceKind.COLLECT]
    dispatches = [e for e in trace if e.kind is TraceKind.DISPATCH]
    steps = [b.ended - a.ended for a, b in itertools.pairwise(collects)]
    gaps = []
    for collect in collects[:-1]:
        after = [d.ended for d in dispatches if d.ended > collect.ended]
        if after:
            gaps.append(min(after) - collect.ended)
    waits = [e.ended - e.started for e in collects]
    return {
        "step_ms": round(1e3 * statistics.median(steps), 3),
        "host_gap_ms": round(1e3 * statistics.median(gaps), 3),
        "collect_wait_ms": round(1e3 * statistics.median(waits), 3),
    }


if __name__ == "__main__":
    main()
