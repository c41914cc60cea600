"""Acceptance of the bundled target's drafts on held-out modules, through the engine.

    python -m benchmarks.acceptance [--prompts 100] [--out benchmarks/results/acceptance.json]
    python -m benchmarks.acceptance --drafters EAGLE3 EAGLE NEXTN NGRAM STANDALONE \
        --shapes 3/1/4 3/4/12 --shared-noise-only
    python -m benchmarks.acceptance --heads OUT --drafters DFLASH DSPARK DFLASH2 PEAGLE \
        EAGLE3_ALIKE --shapes 7/1/8 7/4/16 7/8/32 7/8/64 --shared-noise-only --forced

100 prompts of 256 tokens, 128 generated; chain 3/1/4, chain 5/1/6, tree 4/4/16; temperature 0 and
1; drafts ranked with shared noise and by plain top-k. Acceptance length includes the bonus token
and excludes prefill's token and the last, truncated step. The interval is a bootstrap over prompts.
Looping outputs (more than half of the 8-grams seen before) are also reported separately.

EAGLE, NEXTN and STANDALONE use the small heads and the small language model of the bundled pair
(--heads: a folder with other weights). SELF is STANDALONE with the target itself as the draft, the
upper bound. DFLASH, DSPARK, DFLASH2 and PEAGLE are heads that draft a block at once, EAGLE3_ALIKE
is an EAGLE-3 head trained like them; none is bundled.

--forced adds to the rows of chains what the head's logits over the same texts give: the expected
acceptance length of rejection sampling (p/q), and that of a chain with a leaf beside every node.

Held-out files are those of the running Python; --corpus names a folder that the pair's stage
`corpus` wrote, so that machines measure on the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import forced
from benchmarks.environment import write_result
from benchmarks.heldout import bootstrap_interval, heldout_prompts, repeated_share
from jspec import Engine
from jspec.engine.weights.loading import BUNDLED
from jspec.training.data.corpus import read_corpus

SHAPES = ("3/1/4", "5/1/6", "4/4/16")
DRAFTERS: dict[str, tuple[dict[str, Any], str | None]] = {  # arguments, folder of the weights
    "EAGLE3": ({}, None),
    "EAGLE": ({"speculative_algorithm": "EAGLE"}, "draft_eagle1"),
    "NEXTN": ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, "draft_mtp"),
    "EAGLE3_ALIKE": ({}, "draft_eagle3"),
    "DFLASH": ({"speculative_algorithm": "DFLASH"}, "draft_dflash"),
    "DFLASH2": ({"speculative_algorithm": "DFLASH"}, "draft_dflash2"),
    "DSPARK": ({"speculative_algorithm": "DFLASH"}, "draft_dspark"),
    "PEAGLE": ({"speculative_algorithm": "EAGLE3"}, "draft_peagle"),
    "NGRAM": ({"speculative_algorithm": "NGRAM"}, None),
    "STANDALONE": ({"speculative_algorithm": "STANDALONE"}, "draft_lm"),
    "SELF": (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(BUNDLED / "target"),
        },
        None,
    ),
}
LOOPING = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=["EAGLE3"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="S/K/N")
    parser.add_argument("--heads", type=Path, default=BUNDLED, help="Folder of draft_eagle1, ...")
    parser.add_argument("--corpus", type=Path, help="Of another Python; unset: the running one's")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--shared-noise-only", action="store_true")
    parser.add_argument("--forced", action="store_true", help="For EAGLE-3 and block heads")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/acceptance.json"))
    args = parser.parse_args()
    for drafter in args.drafters:
        folder = DRAFTERS[drafter][1]
        if folder is not None and not (args.heads / folder).is_dir():
            parser.error(
                f"{drafter} needs {args.heads / folder}, which does not exist; train it with "
                "recipes.bundled_pair.pair_heads and name the folder by --heads"
            )
    rows: list[dict[str, Any]] = []
    for drafter in args.drafters:
        for shape in args.shapes:
            for noise in (True,) if args.shared_noise_only else (True, False):
                rows += measured(args, drafter=drafter, shape=shape, noise=noise)
                write_result(args.out, {"settings": settings(args), "rows": rows})
    print(table(rows))


def measured(
    args: argparse.Namespace, *, drafter: str, shape: str, noise: bool
) -> list[dict[str, Any]]:
    """Measure one engine at every temperature, or at 1 only without shared noise."""
    steps, topk, nodes = (int(number) for number in shape.split("/"))
    arguments, folder = DRAFTERS[drafter]
    if folder is not None:
        arguments = {**arguments, "speculative_draft_model_path": str(args.heads / folder)}
    rows = []
    with Engine(
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        speculative_draft_noise=noise,
        max_running_requests=args.batch,
        dtype=args.dtype,
        disable_logprobs=True,
        max_queued_requests=4 * args.prompts,
        max_total_tokens=args.batch * (args.prompt_tokens + args.new_tokens + 64),
        **arguments,
    ) as engine:
        prompts = heldout_prompts(
            engine.tokenizer,
            count=args.prompts,
            length=args.prompt_tokens,
            corpus=read_corpus(args.corpus) if args.corpus else None,
        )
        for temperature in args.temperatures if noise else (1.0,):
            results = sampled(engine, prompts, temperature, new_tokens=args.new_tokens)
            row = row_of(results, engine.limits.draft_shape.num_steps)
            if args.forced and topk == 1 and noise:
                ids = np.asarray(
                    [(*p, *r["output_ids"]) for p, r in zip(prompts, results, strict=True)]
                )
                texts = forced.Texts(ids, args.prompt_tokens, temperature)
                head = BUNDLED / "draft" if folder is None else args.heads / folder
                row["forced"] = forced.compare(head, texts, num_steps=steps)
            row |= {
                "temperature": temperature,
                "drafter": drafter,
                "shape": shape,
                "shared_noise": noise,
            }
            rows.append(row)
            show(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: a line per drafter and S/K/N, a column per temperature; shared noise."""
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        if row["shared_noise"]:
            low, high = row["interval_95"]
            text = f"{row['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"
            cells.setdefault((row["drafter"], row["shape"]), {})[row["temperature"]] = text
    lines = ["| Drafter | S/K/N | temperature 0 | temperature 1 |", "|---|---|---|---|"]
    for (drafter, shape), found in cells.items():
        cold, hot = (found.get(heat, "") for heat in (0.0, 1.0))
        lines.append(f"| `{drafter}` | {shape} | {cold} | {hot} |")
    return "\n".join(lines)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    left_out = ("out", "heads", "corpus")
    return {name: value for name, value in vars(args).items() if name not in left_out}


def sampled(
    engine: Engine, prompts: list[tuple[int, ...]], temperature: float, *, new_tokens: int
) -> list[dict[str, Any]]:
    params = [
        {
            "temperature": temperature,
            "max_new_tokens": new_tokens,
            "sampling_seed": i,
            "ignore_eos": True,
        }
        for i in range(len(prompts))
    ]
    results: list[dict[str, Any]] = engine.generate(input_ids=prompts, sampling_params=params)
    return results


def row_of(results: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Return one cell. At temperature 0, shared noise and top-k give the same drafts."""
    pairs: list[tuple[float, float]] = []
    looping: list[tuple[float, float]] = []
    free: list[tuple[float, float]] = []
    for result in results:
        meta = result["meta_info"]
        full = meta["spec_verify_ct"] - 1  # the last step is usually cut by max_new_tokens
        pair = (meta["acceptance_length"] * full, full)
        pairs.append(pair)
        (looping if repeated_share(result["output_ids"]) > LOOPING else free).append(pair)
    histogram = [
        sum(r["meta_info"]["spec_correct_drafts_histogram"][i] for r in results)
        for i in range(num_steps + 1)
    ]
    mean, low, high = bootstrap_interval(pairs)
    return {
        "acceptance_length": round(mean, 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "histogram": histogram,
        "agreement_by_depth": agreement(histogram),
        "repeated_8gram_share": round(
            sum(repeated_share(r["output_ids"]) for r in results) / len(results), 3
        ),
        "num_looping": len(looping),
        "acceptance_length_looping": round(bootstrap_interval(looping)[0], 3) if looping else None,
        "acceptance_length_free": round(bootstrap_interval(free)[0], 3) if free else None,
    }


def agreement(histogram: list[int]) -> list[float]:
    """Return P(level d accepted | earlier levels accepted) for each depth d."""
    out = []
    for depth in range(1, len(histogram)):
        reached = sum(histogram[depth - 1 :])
        out.append(round(sum(histogram[depth:]) / reached, 3) if reached else 0.0)
    return out


def show(row: dict[str, Any]) -> None:
    low, high = row["interval_95"]
    noise = "shared noise" if row["shared_noise"] else "plain top-k"
    print(
        f"{row['drafter']:10} {row['shape']:8} T={row['temperature']:g} {noise:13} "
        f"{row['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]  by depth "
        f"{row['agreement_by_depth']}  8-grams repeated {row['repeated_8gram_share']:.2f}, "
        f"looping {row['num_looping']} ({row['acceptance_length_looping']}), "
        f"others {row['acceptance_length_free']} {row.get('forced', '')}",
        flush=True,
    )


if __name__ == "__main__":
    main()
