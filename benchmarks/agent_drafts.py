"""Agents' traffic under every way of drafting: acceptance, speed, and past answers.

    python -m benchmarks.agent_drafts [--drafters NAME ...] [--agents 16] [--turns 20] [--out FILE]

Each agent works on tasks of one pool in an order of its own. A turn appends a snippet of held-out
source (a tool's output), asks for it again and gives its first tokens, as in an edit; the answer
becomes part of the next prompt. The bundled target on a CPU, all agents at once. Tokens are counted
per second of the process's CPU time, which other work on the machine hardly changes.

The text is the same for all drafters: `text` is its digest. Rows of other drafters that FILE has
are kept. `past_answers` replays the text without a model: a chain of 7 drafts from the longest
match in the row's own text, or also in the answers that requests had finished before, ranked by
match length, then by how often a continuation followed; all answers, or those to other tasks alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import write_result
from benchmarks.heldout import heldout_prompts, results_path
from jspec import Engine

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


async def run_agent(
    engine: Engine,
    tasks: list[tuple[int, ...]],
    words: dict[str, list[int]],
    params: dict[str, Any],
) -> list[Turn]:
    turns, prompt = [], list(words["start"])
    for task in tasks:
        prompt += [*words["task"], *task, *words["again"], *task[:REPEATED]]
        result: Any = await engine.async_generate(input_ids=prompt, sampling_params=params)
        turns.append(Turn(tuple(prompt), tuple(result["output_ids"])))
        prompt += result["output_ids"]
    return turns


def run(
    arguments: dict[str, Any], *, agents: int, turns: int, temperature: float
) -> tuple[dict[str, Any], list[list[Turn]]]:
    sizes: dict[str, Any] = {"max_running_requests": agents, "disable_logprobs": True}
    with Engine(compile_at_start="common", **sizes, **arguments) as engine:
        encode = engine.tokenizer.encode
        words = {
            "start": encode("# Edit these files.\n"),
            "task": encode("\n# file\n", add_special_tokens=False),
            "again": encode("\n# edited\n", add_special_tokens=False),
        }
        pool = heldout_prompts(engine.tokenizer, count=2 * turns, length=SNIPPET)
        params = {"temperature": temperature, "max_new_tokens": ANSWER, "ignore_eos": True}
        engine.generate("def ", params)

        async def run_all() -> list[list[Turn]]:
            order = [np.random.default_rng(i).permutation(len(pool))[:turns] for i in range(agents)]
            return await asyncio.gather(
                *(
                    run_agent(
                        engine,
                        [pool[k] for k in order[i]],
                        words,
                        {**params, "sampling_seed": i},
                    )
                    for i in range(agents)
                )
            )

        before, clocks = engine.stats.counters, (time.perf_counter(), time.process_time())
        done = asyncio.run(run_all())
        seconds, cpu_seconds = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
        after = engine.stats.counters
    emitted = after.full_num_emitted - before.full_num_emitted
    count = after.full_verify_ct - before.full_verify_ct
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "tokens_per_cpu_second": round(agents * turns * ANSWER / cpu_seconds, 1),
        "acceptance_length": round(emitted / count, 3) if count else 1.0,
    }, done


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
    parser.add_argument("--out", type=Path, default=results_path("agent_drafts_cpu"))
    args = parser.parse_args()
    sizes = {"agents": args.agents, "turns": args.turns}
    for temperature in args.temperatures:
        for name in args.drafters:
            found, done = run(DRAFTERS[name], **sizes, temperature=temperature)
            text = json.dumps([[turn.answer for turn in turns] for turns in done])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            row = {"drafter": name, "temperature": temperature, **found, "text": digest}
            print(row, flush=True)
            past = past_answers(done, temperature) if name == "plain" else []
            keep(args.out, {**sizes, "answer": ANSWER}, row, past)


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
