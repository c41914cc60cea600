"""Agents' traffic under every way of drafting: acceptance, speed, and past answers.

    python -m benchmarks.agent_drafts [--drafters NAME ...] [--agents 16] [--turns 20] [--out FILE]
    python -m benchmarks.agent_drafts --model llama-3.1-8b --accepted FILE --scale 4 --out OTHER

Each agent works on tasks of one pool in an order of its own. A turn appends a snippet of held-out
source (a tool's output), asks for it again and gives its first tokens, as in an edit; the answer
becomes part of the next prompt. The bundled target, all agents at once. Tokens are counted per
second and, for a CPU, per second of the process's CPU time, which other work on the machine hardly
changes.

--model: the same traffic over a real model's shapes with random weights, whose text means nothing:
the acceptance length of each drafter is simulated, and is the one that FILE has for it, measured
with the bundled target. --scale multiplies the lengths of snippets and answers. No more than a few
programs are compiled (benchmarks.serve_drafts).

The text is the same for all drafters: `text` is its digest. Rows of other drafters that FILE has
are kept. --replay: `past_answers` replays the text of plain decoding without a model: a chain of 7
drafts from the longest match in the row's own text, or also in the answers that requests had
finished before, ranked by match length, then by how often a continuation followed; all answers, or
those to other tasks alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import write_result
from benchmarks.heldout import heldout_prompts, results_path
from benchmarks.serve_drafts import FewPrograms
from benchmarks.workloads import WORKLOADS
from jspec import Engine
from jspec.cli.measurement.figures import percentile
from jspec.engine.weights.loading import BUNDLED
from jspec.messages.step_options import SAMPLING
from jspec.text.tokenizer.tokenizer import Tokenizer

TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"speculative_algorithm": "NONE"},
    "EAGLE3 3/1/4": {},
    "EAGLE3 3/4/16": TREE,
    "NGRAM 7/1/8": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "EAGLE3 3/1/8 and a lookup": {"speculative_lookup": "ngram"},
    "EAGLE3 3/4/16 and a lookup": {"speculative_lookup": "ngram", **TREE},
}
SNIPPET, REPEATED, ANSWER = 32, 8, 24  # tokens
LONGEST, NUM_DRAFTS = 12, 7  # of the replay


@dataclass(frozen=True)
class Turn:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    seconds: float = 0.0


async def run_agent(
    engine: Engine,
    tasks: list[tuple[int, ...]],
    words: dict[str, list[int]],
    params: dict[str, Any],
) -> list[Turn]:
    turns, prompt = [], list(words["start"])
    for task in tasks:
        prompt += [*words["task"], *task, *words["again"], *task[:REPEATED]]
        prompt = [i % engine.vocab_size for i in prompt]  # a real model's is larger
        started = time.perf_counter()
        result: Any = await engine.async_generate(input_ids=prompt, sampling_params=params)
        seconds = time.perf_counter() - started
        turns.append(Turn(tuple(prompt), tuple(result["output_ids"]), seconds))
        prompt += result["output_ids"]
    return turns


class AgentsEngine(FewPrograms):
    prompts = (128, 256, 1024)


class SamplingAgentsEngine(AgentsEngine):
    decodes = SAMPLING


def run(
    arguments: dict[str, Any], *, agents: int, turns: int, temperature: float, scale: int = 1
) -> tuple[dict[str, Any], list[list[Turn]]]:
    """Run all agents once to warm up, for one turn, and once to measure. Returns figures, turns."""
    sizes: dict[str, Any] = {"max_running_requests": agents, "disable_logprobs": True}
    make = SamplingAgentsEngine if temperature else AgentsEngine
    tokenizer = Tokenizer.from_directory(BUNDLED / "target")
    words = {
        "start": tokenizer.encode("# Edit these files.\n"),
        "task": tokenizer.encode("\n# file\n", add_special_tokens=False),
        "again": tokenizer.encode("\n# edited\n", add_special_tokens=False),
    }
    pool = heldout_prompts(tokenizer, count=2 * turns, length=scale * SNIPPET)
    answer = scale * ANSWER
    params = {"temperature": temperature, "max_new_tokens": answer, "ignore_eos": True}

    async def run_all(engine: Engine, turns: int) -> list[list[Turn]]:
        order = [np.random.default_rng(i).permutation(len(pool))[:turns] for i in range(agents)]
        tasks = [[pool[k] for k in each] for each in order]
        own = [{**params, "sampling_seed": i} for i in range(agents)]
        ways = zip(tasks, own, strict=True)
        return await asyncio.gather(*(run_agent(engine, each, words, p) for each, p in ways))

    with make(**{**sizes, **arguments}) as engine:
        asyncio.run(run_all(engine, 1))
        engine.flush_cache()
        before, clocks = engine.stats.counters, (time.perf_counter(), time.process_time())
        done = asyncio.run(run_all(engine, turns))
        seconds, cpu_seconds = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
        after = engine.stats.counters
    emitted = after.full_num_emitted - before.full_num_emitted
    count = after.full_verify_ct - before.full_verify_ct
    waits = [turn.seconds for each in done for turn in each]
    return {
        "startup_seconds": round(engine.startup_seconds, 2),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "tokens_per_second": round(agents * turns * answer / seconds, 1),
        "tokens_per_cpu_second": round(agents * turns * answer / cpu_seconds, 1),
        "turn_ms": [round(1e3 * percentile(waits, percent), 2) for percent in (50, 99)],
        "acceptance_length": round(emitted / count, 3) if count else 1.0,
    }, done


def arguments_of(
    drafter: str, temperature: float, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Return engine arguments for the bundled target, or for --model with the acceptance length
    that the file --accepted has for this drafter. Raises ValueError if it has none."""
    own = DRAFTERS[drafter]
    if options.model is None:
        return {"dtype": options.dtype, **own}
    workload = WORKLOADS[options.model]
    workload.write_configs(folder)
    arguments = workload.arguments("plain", folder, acceptance=1.0)
    arguments |= {"disable_radix_cache": False}
    arguments["max_total_tokens"] = options.agents * arguments["context_length"]
    if drafter == "plain":
        return {**arguments, **own}
    wanted = {"drafter": drafter, "temperature": temperature}
    rows = json.loads(options.accepted.read_text(encoding="utf-8"))["rows"]
    accepted = [row["acceptance_length"] for row in rows if wanted.items() <= row.items()]
    if not accepted:
        raise ValueError(f"{options.accepted.name} has no row with {wanted}; expected one")
    arguments |= {"speculative_algorithm": "EAGLE3", "simulate_acceptance": accepted[0], **own}
    if arguments["speculative_algorithm"] == "EAGLE3":
        arguments["speculative_draft_model_path"] = str(folder / "draft")
    return arguments


def follows(text: np.ndarray, context: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Return the longest match of the context's end in a text, and what follows it most often.

    Among continuations that are as frequent, the latest.
    """
    best = np.zeros(text.size, np.int64)
    agrees = np.ones(text.size, bool)
    for i in range(min(LONGEST, context.size)):
        shifted = np.full(text.size, -1)
        shifted[i:] = text[: text.size - i]
        agrees &= shifted == context[-1 - i]
        if not agrees.any():
            break
        best += agrees
    best = best[:-1] if text.size else best
    if not best.size or not best.max():
        return 0, ()
    ends = np.flatnonzero(best == best.max())[::-1]
    found = Counter(tuple(text[e + 1 : e + 1 + NUM_DRAFTS].tolist()) for e in ends)
    return int(best.max()), max(found, key=lambda key: found[key])


def replay(done: list[list[Turn]], *, capacity: int, recurring: bool = True) -> float:
    """Return the acceptance length of lookups with a store of the last `capacity` answer tokens.

    0: the row's own text alone. A turn of all agents has the answers of all earlier turns, without
    those to its own task unless `recurring`.
    """
    emitted = verified = 0
    past: list[tuple[tuple[int, ...], np.ndarray]] = []  # (end of the prompt, answer), latest last
    for turns in zip(*done, strict=True):
        for turn in turns:
            task = turn.prompt[-REPEATED:]
            answers = [ids for other, ids in past if recurring or other != task]
            store = np.concatenate([np.zeros(0, np.int64), *answers])[-capacity:]
            text = np.array(turn.prompt + turn.answer)
            at, end = len(turn.prompt) + 1, text.size  # prefill emits the first
            while at < end:
                context = text[:at]
                length, drafts = follows(context, context)
                if capacity:
                    other_length, found = follows(store, context)
                    drafts = found if other_length > length else drafts
                accepted = 0
                for token in drafts[: end - at]:
                    if token != text[at + accepted]:
                        break
                    accepted += 1
                at += accepted + 1
                if at <= end:  # the last may be cut
                    emitted, verified = emitted + accepted + 1, verified + 1
        past += [(turn.prompt[-REPEATED:], np.array((*turn.answer, -1))) for turn in turns]
    return round(emitted / verified, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", choices=sorted(WORKLOADS), help="unset: the bundled target")
    parser.add_argument("--accepted", type=Path, help="a result of the bundled target, for --model")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--replay", action="store_true", help="past_answers, with plain")
    parser.add_argument("--out", type=Path, default=results_path("agent_drafts_cpu"))
    args = parser.parse_args()
    if args.model is not None and args.accepted is None:
        parser.error("--model simulates acceptance lengths; expected --accepted FILE with it")
    sizes = {"agents": args.agents, "turns": args.turns}
    settings = {"model": args.model or "bundled", **sizes, "answer": args.scale * ANSWER}
    for temperature, name in itertools.product(args.temperatures, args.drafters):
        with tempfile.TemporaryDirectory() as folder:
            arguments = arguments_of(name, temperature, args, Path(folder))
            found, done = run(arguments, **sizes, temperature=temperature, scale=args.scale)
        gc.collect()  # weights and pools, before the next engine's are made
        text = json.dumps([[turn.answer for turn in turns] for turns in done])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        row = {"drafter": name, "temperature": temperature, **found, "text": digest}
        print(row, flush=True)
        past = past_answers(done, temperature) if name == "plain" and args.replay else []
        keep(args.out, settings, row, past)


def past_answers(done: list[list[Turn]], temperature: float) -> list[dict[str, Any]]:
    cases = ((0, True), (2_000, True), (100_000, True), (100_000, False))
    return [
        {
            "temperature": temperature,
            "stored_tokens": capacity,
            "tasks_recur": recurring,
            "acceptance_length": replay(done, capacity=capacity, recurring=recurring),
        }
        for capacity, recurring in cases
    ]


def keep(
    path: Path, settings: dict[str, Any], row: dict[str, Any], past: list[dict[str, Any]]
) -> None:
    """Write a drafter's row to the file, beside those of other drafters that it has."""
    known = json.loads(path.read_text()) if path.exists() else {}

    def is_other(each: dict[str, Any]) -> bool:
        return any(each[name] != row[name] for name in ("drafter", "temperature"))

    rows = [*filter(is_other, known.get("rows", [])), row]
    write_result(
        path, {**settings, "rows": rows, "past_answers": past or known.get("past_answers", [])}
    )


if __name__ == "__main__":
    main()
