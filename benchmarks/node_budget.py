"""What a step's budget of nodes costs and keeps: the bundled pair, eight rows at once.

    python -m benchmarks.node_budget [--out benchmarks/results/node_budget_cpu.json]
    python -m benchmarks.node_budget --shapes 4/4/16 --batches 6
    python -m benchmarks.node_budget --dial

For each S/K/N three engines live side by side and take turns, batch by batch, so that whatever
else the machine does hits all of them alike: all N nodes of each row; half as many in total, given
to the rows by score (--speculative-total-nodes-per-row N/2); and the fixed shape with N/2 nodes a
row, which costs as much to verify. The text must be the same: it is asserted.

Tokens a row and step: plain steps, of which no draft was verified, count as well. CPU
milliseconds a step are of the whole process, prompts left out (a run of one token is taken off):
other load on the machine moves them less than the clock. Numbers are medians over batches, ratios
of one batch each.

--steps MODEL: how long a step takes at that model's shapes instead, random weights, of 64 rows (the
workload's most): 3/4/16 and 3/4/8 whole, under a budget of 6 and 4 nodes a row, and as trees that
have no more nodes. Milliseconds of its own program, dispatched back to back (step_profile).

    python -m benchmarks.node_budget --steps llama-3.1-8b --out node_budget_h200.json

--dial: tiny engines with the dial drafter instead, which is right at each depth as often as the
dial says and gives all rows equal scores: what a budget keeps when scores tell no row from another.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import write_result
from benchmarks.heldout import heldout_prompts
from benchmarks.step_profile import compiled, prepare, whole_step
from benchmarks.workloads import WORKLOADS, Workload
from jspec import Engine
from jspec.messages.features import PLAIN
from tests.speculative.engines import (
    DIAL_ACCEPTANCE,
    build,
    dial_for,
    make_request,
    plain_ids,
    serve,
    spec_of,
)

SHAPES = ("3/1/4", "5/1/6", "4/4/16")
BATCH = 8
# Of --steps: N of 3/4/N, and how many of them a row are verified; None: all.
STEPS = (
    ("3/4/16, all", 16, None),
    ("3/4/16, T = 6 B", 16, 6),
    ("3/4/6, all", 6, None),
    ("3/4/8, all", 8, None),
    ("3/4/8, T = 4 B", 8, 4),
    ("3/4/4, all", 4, None),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="S/K/N")
    parser.add_argument("--batches", type=int, default=6, help="of eight prompts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dial", action="store_true")
    parser.add_argument("--steps", metavar="MODEL", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/node_budget_cpu.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.steps is not None:
        workload = WORKLOADS[args.steps]
        settings = {"model": args.steps, "batch": max(workload.batches)}
        for name, nodes, total in STEPS:
            rows.append(step_row(workload, name, nodes, total))
            print(rows[-1], flush=True)
            write_result(args.out, {"settings": settings, "rows": rows})
        return
    if args.dial:
        rows = [row for shape in args.shapes for row in dialled(shape, args.batches)]
        write_result(args.out, {"settings": {"dial": DIAL_ACCEPTANCE}, "rows": rows})
        return
    for shape in args.shapes:
        engines = engines_of(shape)
        prompts = heldout_prompts(
            next(iter(engines.values())).tokenizer,
            count=BATCH * args.batches,
            length=args.prompt_tokens,
            seed=3,
        )
        for temperature in args.temperatures:
            found = compare(engines, prompts, temperature, new_tokens=args.new_tokens)
            rows += [{"shape": shape, "temperature": temperature, **row} for row in found]
            settings = {name: value for name, value in vars(args).items() if name != "out"}
            write_result(args.out, {"settings": settings, "rows": rows})
        for engine in engines.values():
            engine.shutdown()
    print(table(rows))


def step_row(workload: Workload, name: str, nodes: int, total: int | None) -> dict[str, Any]:
    """One step's time, of as many rows as the workload has at most."""
    engine = {
        "speculative_num_draft_tokens": nodes,
        "speculative_total_nodes_per_row": total,
    }
    with tempfile.TemporaryDirectory() as folder:
        batch = max(workload.batches)
        bench = compiled(prepare(workload, "tree", batch, Path(folder), engine))
        milliseconds, _ = whole_step(bench)
    return {"shape": name, "device_ms": round(milliseconds, 4)}


def engines_of(shape: str) -> dict[str, Engine]:
    """By name: all nodes, half of them by score, and a fixed shape with half of them."""
    steps, topk, nodes = (int(number) for number in shape.split("/"))
    half = nodes // 2
    fixed = (half - 1, 1, half) if topk == 1 else (steps, topk, half)
    return {
        "all": make_engine((steps, topk, nodes)),
        f"T = {half} B": make_engine(
            (steps, topk, nodes), speculative_total_nodes_per_row=nodes / 2
        ),
        f"fixed {'/'.join(map(str, fixed))}": make_engine(fixed),
    }


def make_engine(shape: tuple[int, int, int], **more: Any) -> Engine:
    steps, topk, nodes = shape
    return Engine(
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        max_running_requests=BATCH,
        compile_at_start="common",
        disable_radix_cache=True,  # the second run of a prompt is timed as the first
        **more,
    )


def compare(
    engines: dict[str, Engine],
    prompts: list[tuple[int, ...]],
    temperature: float,
    *,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """A row an engine."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for first in range(0, len(prompts), BATCH):
        texts: list[Any] = []
        for name, engine in engines.items():
            run, ids = measure(
                engine, prompts[first : first + BATCH], temperature, first, new_tokens=new_tokens
            )
            runs[name].append(run)
            texts.append(ids)
        if any(ids != texts[0] for ids in texts):
            raise AssertionError(f"texts differ in the batch of prompt {first}; expected the same")
    rows = []
    for name, of_engine in runs.items():
        pairs = list(zip(of_engine, runs["all"], strict=True))
        row = {key: round(median(run[key] for run in of_engine), 3) for key in of_engine[0]}
        row["tokens_to_all"] = round(
            median(a["tokens_a_step"] / b["tokens_a_step"] for a, b in pairs), 3
        )
        row["ms_to_all"] = round(
            median(a["cpu_ms_a_step"] / b["cpu_ms_a_step"] for a, b in pairs), 3
        )
        rows.append({"verified": name, **row})
        print(f"T={temperature:g} {name:14} {row}", flush=True)
    return rows


def measure(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    temperature: float,
    first: int,
    *,
    new_tokens: int,
) -> tuple[dict[str, float], list[Any]]:
    """One batch: what it emitted and cost a step, and its ids."""
    params = [
        {"temperature": temperature, "sampling_seed": first + i, "ignore_eos": True}
        for i in range(len(prompts))
    ]
    prompts_alone, _ = cpu_seconds(engine, prompts, params, 1)
    seconds, results = cpu_seconds(engine, prompts, params, new_tokens)
    metas = [result["meta_info"] for result in results]
    proposed = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    emitted = new_tokens - 1
    # Of rows: verifications, and plain steps of one token each.
    plain = sum(
        max(emitted - meta["spec_num_correct_drafts"] - meta["spec_verify_ct"], 0) for meta in metas
    )
    steps = plain + sum(meta["spec_verify_ct"] for meta in metas)
    run = {
        "tokens_a_step": len(prompts) * emitted / steps,
        "nodes_a_step": 1 + proposed / steps,
        "cpu_ms_a_step": 1e3 * (seconds - prompts_alone) / (steps / len(prompts)),
    }
    return run, [result["output_ids"] for result in results]


def cpu_seconds(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    params: list[dict[str, Any]],
    new_tokens: int,
) -> tuple[float, list[dict[str, Any]]]:
    started = time.process_time()
    results = engine.generate(
        input_ids=prompts,
        sampling_params=[{**own, "max_new_tokens": new_tokens} for own in params],
    )
    return time.process_time() - started, results


def dialled(shape: str, batches: int) -> list[dict[str, Any]]:
    """Tokens a row and step of the dial drafter, by what is verified."""
    steps, topk, nodes = (int(number) for number in shape.split("/"))
    half = nodes // 2
    fixed = (half - 1, 1, half) if topk == 1 else (steps, topk, half)
    kinds = {
        "all": spec_of(steps, topk, nodes),
        f"T = {half} B": replace(spec_of(steps, topk, nodes), total_nodes_per_row=nodes / 2),
        f"fixed {'/'.join(map(str, fixed))}": spec_of(*fixed),
    }
    rows = []
    for name, spec in kinds.items():
        engine = build(spec, page_size=16, variants=(PLAIN,))
        found = []
        for batch in range(batches):
            requests = [
                make_request(
                    i,
                    prompt_len=12,
                    seed=100 * batch + i,
                    temperature=1.0,
                    max_new_tokens=64,
                    ignore_eos=True,
                )
                for i in range(BATCH)
            ]
            texts = [plain_ids(request) for request in requests]
            served = serve(engine, requests, dial=dial_for(requests, texts))
            if list(served.ids) != texts:
                raise AssertionError("the text differs from plain decoding's")
            full = [n for n in served.accepted_together if len(n) == BATCH]
            found.append(1 + sum(map(sum, full)) / (BATCH * len(full)))
        row = {"shape": shape, "verified": name, "tokens_a_step": round(median(found), 3)}
        print(row, flush=True)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| S/K/N | temperature | verified | nodes a row and step | tokens a row and step | to all "
        "| CPU ms a step, to all |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['shape']} | {row['temperature']:g} | {row['verified']} | {row['nodes_a_step']:.2f}"
        f" | {row['tokens_a_step']:.2f} | {row['tokens_to_all']:.2f} | {row['ms_to_all']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
