"""Repeats the recipe of the bundled pair on any Python installation.

    python examples/train_bundled_pair.py [OUT] [--size tiny] [--budget-seconds 695]

Learns from the standard library of the Python that runs it. On one H200 the recorded run took 12.3
minutes for target, samples, head and report, corpus and tokenizer aside (`stage_seconds` in
benchmarks/results/bundled_pair_training.json); its budgets, 695 s together, decide how long the
first three take. `--size tiny` shows every stage on a laptop in about a minute and learns nothing
worth serving. OUT (runs/pair) gets target/, head/ and report.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.bundled_pair import pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/pair"))
    parser.add_argument("--size", choices=("bundled", "tiny"), default="bundled")
    parser.add_argument("--budget-seconds", type=float, default=None)
    args = parser.parse_args()
    arguments = ["--stage", "all", "--data", str(args.out), "--out", str(args.out)]
    arguments += ["--size", args.size]
    if args.budget_seconds is not None:
        arguments += ["--budget-seconds", str(args.budget_seconds)]
    pair.main(arguments)


if __name__ == "__main__":
    main()
