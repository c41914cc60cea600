"""Acceptance of drafting by lookup (NGRAM) with and without a corpus.

    python -m benchmarks.lookup [--prompts 24] [--max-tokens 2000000] [--out FILE.json]

The bundled target continues held-out modules of the standard library; the corpus is the source of
the other modules, as a .jsonl file with a document per line. Chain 7/1/8 and tree 4/4/16,
temperature 0 and 1; acceptance length as in `benchmarks.acceptance`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.acceptance import row_of, sampled, settings
from benchmarks.environment import write_result
from benchmarks.heldout import heldout_prompts
from jspec import Engine
from jspec.training.data.corpus import Split, of_split, standard_library

SHAPES = ((7, 1, 8), (4, 4, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=2_000_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lookup.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "stdlib.jsonl")
        for steps, topk, nodes in SHAPES:
            for path in (None, str(corpus)):
                started = time.monotonic()
                with Engine(
                    speculative_algorithm="NGRAM",
                    speculative_num_steps=steps,
                    speculative_eagle_topk=topk,
                    speculative_num_draft_tokens=nodes,
                    speculative_ngram_external_corpus_path=path,
                    speculative_ngram_external_corpus_max_tokens=args.max_tokens,
                    max_running_requests=args.batch,
                    max_queued_requests=4 * args.prompts,
                ) as engine:
                    ready = round(time.monotonic() - started, 1)
                    prompts = heldout_prompts(
                        engine.tokenizer, count=args.prompts, length=args.prompt_tokens
                    )
                    for temperature in (0.0, 1.0):
                        results = sampled(engine, prompts, temperature, new_tokens=args.new_tokens)
                        row = row_of(results, engine.limits.draft_shape.num_steps)
                        row |= {
                            "temperature": temperature,
                            "shape": f"{steps}/{topk}/{nodes}",
                            "has_corpus": path is not None,
                            "startup_seconds": ready,
                        }
                        rows.append(row)
                        show(row)
    write_result(args.out, {"settings": settings(args), "rows": rows})


def write_corpus(path: Path) -> Path:
    """Write the standard library's training split, which has no module of the prompts."""
    documents = of_split(standard_library(), Split.TRAIN)
    lines = (json.dumps({"text": document.text}) for document in documents)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def show(row: dict[str, Any]) -> None:
    low, high = row["interval_95"]
    corpus = "with" if row["has_corpus"] else "without"
    print(
        f"{row['shape']:8} T={row['temperature']:g} {corpus:7} a corpus "
        f"{row['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]  looping {row['num_looping']}, "
        f"others {row['acceptance_length_free']}, ready after {row['startup_seconds']} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
