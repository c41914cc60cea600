"""Random JSON schemas with the bundled pair: validity, equality with plain decoding, and cost.

    python -m benchmarks.grammar [--schemas 200] [--concurrency 32] [--out FILE]

Schemas are drawn with their own checks, which are independent of the library that makes the masks.
Three runs on one machine: with drafts, without, and with drafts but without grammars.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jspec
from benchmarks.environment import describe

Check = Callable[[Any], bool]
PROMPT = '"""Answers of a service, number {index}."""\nANSWER = '
NEW_TOKENS = 160


def draw(rng: random.Random, depth: int = 0) -> tuple[dict[str, Any], Check]:
    """Return a schema of few bytes, and a check of whether a value conforms to it."""
    kinds = ["integer", "enum", "boolean", "string"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "integer":
        low, high = sorted(rng.sample(range(-50, 1000), 2))
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
        return schema, lambda x: type(x) is int and low <= x <= high
    if kind == "enum":
        words = [f"w{rng.randrange(1000)}" for _ in range(rng.randint(1, 5))]
        return {"enum": words}, lambda x: x in words
    if kind == "boolean":
        return {"type": "boolean"}, lambda x: isinstance(x, bool)
    if kind == "string":
        most = rng.randint(1, 12)
        return {
            "type": "string",
            "maxLength": most,
        }, lambda x: isinstance(x, str) and len(x) <= most
    if kind == "array":
        item, is_item = draw(rng, depth + 1)
        most = rng.randint(1, 3)
        return {
            "type": "array",
            "items": item,
            "maxItems": most,
        }, lambda x: isinstance(x, list) and len(x) <= most and all(map(is_item, x))
    parts = {f"k{i}": draw(rng, depth + 1) for i in range(rng.randint(1, 4))}
    schema = {
        "type": "object",
        "properties": {name: part for name, (part, _) in parts.items()},
        "required": list(parts),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    return (
        schema,
        lambda x: (
            isinstance(x, dict)
            and set(x) == set(parts)
            and all(is_part(x[name]) for name, (_, is_part) in parts.items())
        ),
    )


def run(
    schemas: Sequence[dict[str, Any] | None], *, concurrency: int, **arguments: Any
) -> tuple[list[str], list[str], float, float]:
    """Return (texts, finish reasons, output tokens/s, acceptance length)."""
    prompts = [PROMPT.format(index=i) for i in range(len(schemas))]
    params = [
        {"json_schema": schema, "max_new_tokens": NEW_TOKENS, "sampling_seed": i, "temperature": 1}
        for i, schema in enumerate(schemas)
    ]
    with jspec.Engine(
        max_running_requests=concurrency, max_queued_requests=len(schemas), **arguments
    ) as engine:
        engine.generate(prompts[:2], params[:2])  # compile the programs of grammars
        before = engine.stats.counters
        started = time.monotonic()
        answers = engine.generate(prompts, params)
        seconds = time.monotonic() - started
        counters = engine.stats.counters
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    verify_ct = counters.verify_ct - before.verify_ct
    accepted = counters.num_accepted - before.num_accepted
    return (
        [answer["text"] for answer in answers],
        [answer["meta_info"]["finish_reason"]["type"] for answer in answers],
        tokens / seconds,
        1 + accepted / max(verify_ct, 1),
    )


def is_valid(text: str, check: Check) -> bool:
    try:
        return check(json.loads(text))
    except ValueError:
        return False


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, print one JSON object and return it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(args.schemas)]
    schemas: list[dict[str, Any] | None] = [schema for schema, _ in drawn]
    settings: dict[str, Any] = {"concurrency": args.concurrency, "dtype": "float32"}
    texts, ends, speed, acceptance = run(schemas, **settings)
    plain, _, plain_speed, _ = run(schemas, **settings, speculative_algorithm="NONE")
    _, _, free_speed, free_acceptance = run([None] * len(schemas), **settings)
    ended = [i for i, end in enumerate(ends) if end == "stop"]
    result = {
        **describe(),
        "num_schemas": len(schemas),
        "num_ended": len(ended),
        "num_cut_by_length": ends.count("length"),
        "num_valid": sum(is_valid(texts[i], drawn[i][1]) for i in ended),
        "num_same_without_drafts": sum(map(str.__eq__, texts, plain)),
        "tokens_per_second": round(speed, 1),
        "acceptance_length": round(acceptance, 3),
        "plain_tokens_per_second": round(plain_speed, 1),
        "free_tokens_per_second": round(free_speed, 1),
        "free_acceptance_length": round(free_acceptance, 3),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
