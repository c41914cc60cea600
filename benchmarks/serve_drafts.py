"""Drafters served under load at the acceptance lengths of a published table.

    python -m benchmarks.serve_drafts [--modes chain dflash8 ...] [--task mt-bench]
    python -m benchmarks.serve_drafts --model tiny --points c2:4 r8:4     (a smoke test on a CPU)

A server process (benchmarks.serve_load) for each drafter: dummy weights in Qwen3-8B's shapes, no
prefix cache, the same requests for all. It compiles only what greedy requests of this load need,
decodes of BATCHES rows and prompts of PROMPTS tokens: other sizes are padded to these. The result
file is complete after every point.

Acceptance lengths are simulated. DSpark's paper has those of chains of 7 drafts for Qwen3-8B at
temperature 1, bonus token included; other depths follow from the chance of one draft that gives
the same length, and trees accept TREE_GAIN times their chain's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import serve_load
from benchmarks.workloads import DRAFTERS, MODES, WORKLOADS
from jspec import Engine
from jspec.__main__ import run as run_command
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.engine import building
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.weights.loading import LoadedModels, ModelPaths, load_models
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN, SAMPLING, StepOptions
from jspec.server import serve

ROOT = Path(__file__).resolve().parent.parent
BATCHES, PROMPTS = (1, 8, 32), (768, 1024, 2048)  # in addition to the largest of each
RUN = ("chain", "dflash8", "dspark7", "dflash16", "dflash8-tree16", "dflash8-tree32", "plain")
PUBLISHED_DEPTH = 7
PUBLISHED: Mapping[str, Mapping[str, float]] = {  # task: drafter: acceptance length
    "mt-bench": {"chain": 2.66, "dflash": 3.11, "dspark": 3.72},
    "humaneval": {"chain": 4.33, "dflash": 4.64, "dspark": 5.52},
    "gsm8k": {"chain": 5.30, "dflash": 5.33, "dspark": 6.17},
}
# Of the bundled target's DFlash head at temperature 1, by nodes (docs/drafters.md): a tree's
# acceptance length divided by that of a chain with rejection sampling, as the table has.
TREE_GAIN = {16: 1.21, 32: 1.33}
START_SECONDS = 45.0  # left at least, to start another server

Cell = dict[str, Any]


# The server: the real one, with few programs.


def load_few(
    prompts: tuple[int, ...], args: EngineArgs, paths: ModelPaths, /, *, mesh: Any
) -> LoadedModels:
    """Load models, with few sizes of batches and prompts to compile programs for."""
    models = load_models(args, paths, mesh=mesh)
    of = models.config
    batches = [size for size in of.decode_buckets if size in BATCHES]
    prompts = tuple(size for size in of.prefill_buckets if size in prompts)
    config = replace(
        of,
        decode_buckets=tuple(sorted({*batches, of.decode_buckets[-1]})),
        prefill_buckets=tuple(sorted({*prompts, of.prefill_buckets[-1]})),
    )
    return replace(models, config=config)


def few_programs(
    decodes: StepOptions, limits: ServeLimits, _when: str = ""
) -> tuple[ProgramKey, ...]:
    """Return prefills without log-probabilities, decodes with exactly these options, and every
    program of another kind that the engine wants at its start."""
    options = {StepKind.PREFILL: SAMPLING, StepKind.DECODE: decodes}
    found = program_keys(limits)
    return tuple(key for key in found if options.get(key.kind, key.options) == key.options)


class FewPrograms(Engine):
    """An engine that compiles few programs, and none while it serves.

    decodes: PLAIN for greedy requests alone, else SAMPLING. prompts: sizes of prefills.
    """

    decodes, prompts = PLAIN, PROMPTS

    def _build_runner(self, progress: Any) -> Any:
        building.programs_at_start = partial(few_programs, self.decodes)  # type: ignore[assignment]
        building.later_programs = lambda *_: ()
        load = partial(load_few, self.prompts)
        return building.build_runner(self.args, progress=progress, load=load)


def serve_few(config: str) -> None:
    serve.Engine = FewPrograms  # type: ignore[misc]
    run_command(["serve", "--config", config])


# The acceptance lengths.


def chain_length(chance: float, depth: int) -> float:
    """Return the mean tokens of a verification if each draft is right with `chance`, bonus too."""
    return sum(chance**i for i in range(depth + 1))


def chance_of(length: float, depth: int) -> float:
    """Return the chance that gives a chain of `depth` drafts this acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_less = chain_length(middle, depth) < length
        low, high = (middle, high) if is_less else (low, middle)
    return low


def acceptance_of(mode: str, task: str) -> float:
    """Return the acceptance length to simulate; 1 for plain decoding.

    In:  "chain" (3/1/4), "mt-bench"    Out: 2.29, of 2.66 with 7 drafts
    """
    shape = DRAFTERS[mode].shape if mode in DRAFTERS else MODES[mode]
    if shape is None:
        return 1.0
    steps, topk, nodes = shape
    published = PUBLISHED[task]
    name = next((name for name in published if mode.startswith(name)), None)
    if name is None or (topk > 1 and nodes not in TREE_GAIN):
        raise ValueError(f"no acceptance length is published for {mode!r}; expected one of {RUN}")
    length = chain_length(chance_of(published[name], PUBLISHED_DEPTH), steps)
    if topk > 1:
        length *= TREE_GAIN[nodes]
    return round(min(length, steps + 1), 2)


# The run.


def run_mode(mode: str, options: argparse.Namespace, row: Cell, put: Any) -> Mapping[str, Any]:
    """Start a server for one drafter and measure all points. Returns /server_info."""
    left = options.deadline - time.monotonic()
    of_mode = argparse.Namespace(
        **{**vars(options), "mode": mode, "acceptance": row["acceptance"], "seconds": left}
    )
    program = ("-m", "benchmarks.serve_drafts", "--serve")
    with (
        tempfile.TemporaryDirectory() as name,
        serve_load.started(of_mode, Path(name), program=program) as server,
    ):
        info = server.info()
        row["startup_seconds"] = info.get("startup_seconds")
        pattern = serve_load.pattern_of(of_mode)
        for point in map(serve_load.Point.parse, options.points):
            cell = serve_load.repeated(server, point, pattern, of_mode, deadline=options.deadline)
            row["points"][point.name] = cell
            put(info)
        row |= serve_load.counted(server)
        put(info)
    return info


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure all drafters; return 0 if each has all points, without an error."""
    pattern = asdict(replace(serve_load.pattern_of(options), to_body=str))
    kept = ("prompt_len", "new_tokens", "jitter", "seed", "temperature")
    result: Cell = {
        "model": options.model,
        "task": options.task,
        "pattern": {name: pattern[name] for name in kept},
        "rows": {},
    }

    def put(info: Mapping[str, Any]) -> None:
        if info:
            found = serve_load.environment(info, argv, module="serve_drafts")
            result["environment"] = found
        serve_load.write(options.output, result)

    for mode in options.modes:
        row: Cell = {"acceptance": acceptance_of(mode, options.task), "points": {}}
        result["rows"][mode] = row
        if time.monotonic() + START_SECONDS > options.deadline:
            row["skipped"] = "out of time"
            put({})
            continue
        print(f"{mode}, acceptance {row['acceptance']}", flush=True)
        try:
            run_mode(mode, options, row, put)
        except Exception as error:  # the other drafters are still wanted
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            put({})
            print(row["error"], flush=True)
    print(table(result["rows"]))
    return int(not all(is_whole(row) for row in result["rows"].values()))


def is_whole(row: Cell) -> bool:
    is_done = not {"error", "skipped"} & set(row)
    return is_done and all(cell.get("num_errors") == 0 for cell in row["points"].values())


def table(rows: Mapping[str, Cell]) -> str:
    """Return Markdown: a line per drafter and load, p50 / p99 in milliseconds."""
    lines = ["| drafter (acceptance) | load | tokens/s | first token | a token after it |"]
    lines.append("|---|---|---|---|---|")
    for mode, row in rows.items():
        for name, cell in row["points"].items():
            if "skipped" in cell:
                continue
            first, later = (f"{cell[key][0]} / {cell[key][1]}" for key in ("ttft_ms", "tpot_ms"))
            rate = cell["output_tokens_per_second"]
            lines.append(f"| {mode} ({row['acceptance']}) | {name} | {rate} | {first} | {later} |")
        whys = {"error", "skipped"} & set(row)
        lines += [f"| {mode} | | {row[why][:80]} | | |" for why in whys]
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="qwen3-8b")
    parser.add_argument("--modes", nargs="+", default=list(RUN), choices=RUN)
    parser.add_argument("--task", choices=PUBLISHED, default="mt-bench")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--points",
        nargs="+",
        default=["c1:4", "c8:24", "c32:64", "c64:128", "r8:48"],
        help="cCLIENTS or rRATE, :REQUESTS",
    )
    parser.add_argument("--repeats", type=int, default=1, help="of each point, other seeds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=460.0, help="no point starts after this")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "serve_drafts.json"
    )
    options = parser.parse_args(argv)
    options.deadline = time.monotonic() + options.seconds
    options.engine = ["disable_logprobs=true", *options.engine]
    unused = dict.fromkeys(("url", "trace", "text", "vocab_size", "prompt_len", "new_tokens"))
    for name, value in {**unused, "prefix_len": 0, "jitter": 0.5}.items():
        setattr(options, name, value)  # of serve_load
    return options


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:2] == ["--serve", "--config"]:
        serve_few(words[2])
        return 0
    return run(parse(words), words)


if __name__ == "__main__":
    sys.exit(main())
