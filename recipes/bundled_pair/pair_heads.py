r"""Small heads for the bundled target: EAGLE-1, three MTP layers, and a small language model.

    python -m recipes.bundled_pair.pair --data DATA --out OUT --stage samples
    python -m recipes.bundled_pair.pair_heads --data DATA --out OUT --head eagle1 \
        --budget-seconds 100

DATA and OUT are the pair's: DATA with corpus and tokenizer, OUT with `target/` and the target's
samples.

    OUT/draft_eagle1/, OUT/draft_mtp/, OUT/draft_lm/    the weights, ready to serve
    OUT/report_eagle1.json, ...                         held-out loss by step, sizes, seconds
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspec.spec.model_spec import ModelSpec
from jspec.training.data.token_stream import fixed_crops
from jspec.training.draft_loss import features_on_the_fly
from jspec.training.draft_recipe import HeadRecipe, all_count, train_head
from jspec.training.heads.draft_head import DraftHead
from jspec.training.heads.head_eagle1 import eagle1_head
from jspec.training.heads.head_lm import lm_head_of
from jspec.training.heads.head_mtp import mtp_head
from jspec.training.loop import LoopConfig, Result, write_report
from recipes.bundled_pair.pair import (
    Job,
    load_target,
    mixed_batches,
    num_parameters,
    read_samples,
)
from recipes.bundled_pair.pair_sizes import PairSizes
from recipes.bundled_pair.target import load_streams

TARGET_DTYPE = jnp.bfloat16  # of the target's forward, as for the pair's head


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    head: DraftHead
    folder: str
    recipe: HeadRecipe


def make(name: str, target: ModelSpec, *, loop: LoopConfig, tiny: bool) -> Made:
    recipe = HeadRecipe(
        loop=loop, batch_size=4 if tiny else 32, length=64 if tiny else 512, num_depths=4
    )
    if name == "eagle1":
        return Made(
            head=eagle1_head(target, intermediate_size=512), folder="draft_eagle1", recipe=recipe
        )
    if name == "mtp":
        head = mtp_head(target, num_layers=3, intermediate_size=192)
        return Made(head=head, folder="draft_mtp", recipe=replace(recipe, num_depths=3))
    lm = lm_head_of(target, hidden_size=64, intermediate_size=192, num_layers=3, head_dim=32)
    # float32: the table's gradient is a sum over all occurrences of a token
    recipe = replace(recipe, num_depths=1, compute_dtype=jnp.float32)
    return Made(head=lm, folder="draft_lm", recipe=recipe)


HEADS = ("eagle1", "mtp", "lm")


def in_rows(table: np.ndarray, *, length: int) -> np.ndarray:
    """Cut rows into rows of `length`, dropping remainders: [R, T] -> [R * (T // length), length].

    Rows may start in the middle of a text: the teacher is the target's distribution over the row.
    """
    pieces = table.shape[1] // length
    return table[:, : pieces * length].reshape(-1, length)


def run(job: Job, name: str, loop: LoopConfig, *, tiny: bool) -> Result:
    _, train_stream, held_out_stream = load_streams(job.data)
    target, params = load_target(job)
    made = make(name, target, loop=loop, tiny=tiny)
    samples, held_out_samples = (
        in_rows(table, length=made.recipe.length) for table in read_samples(job)
    )
    count = 4 * made.recipe.batch_size
    held_out_text = fixed_crops(held_out_stream, count=count, length=made.recipe.length)
    chosen = np.linspace(0, len(held_out_samples) - 1, min(count, len(held_out_samples)))
    held_out = np.concatenate((held_out_text, held_out_samples[chosen.astype(np.int64)]))
    everything = np.arange(target.vocab_size, dtype=np.int32)
    result = train_head(
        made.head,
        params,
        made.recipe,
        features_of=features_on_the_fly(
            target, made.head, length=made.recipe.length, dtype=TARGET_DTYPE
        ),
        draft_ids=everything,
        batch_at=mixed_batches(train_stream, samples, made.recipe),
        held_out=all_count(held_out),
    )
    folder = job.out / made.folder
    made.head.save(
        folder, result.params, draft_ids=everything, dtype=ml_dtypes.bfloat16, target=target
    )
    write_report(job.out / f"report_{name}.json", {made.folder: report(made, result, folder)})
    return result


def report(made: Made, result: Result, folder: Path) -> dict[str, Any]:
    recipe = made.recipe
    return {
        "held_out": result.metrics,
        "best_step": result.step,
        "num_steps": result.num_steps,
        "tokens_a_step": recipe.batch_size * recipe.length,
        "seconds": round(result.seconds, 1),
        "num_parameters": num_parameters(result.params),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "held_out_by_step": list(result.curve),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bundled_pair.pair_heads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--head", choices=HEADS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="corpus and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="target and samples; the head")
    parser.add_argument("--num-steps", type=int, default=20000)
    parser.add_argument("--budget-seconds", type=float, default=None)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--size", choices=("bundled", "tiny"), default="bundled")
    args = parser.parse_args(argv)
    loop = LoopConfig(
        num_steps=args.num_steps,
        peak_learning_rate=args.learning_rate,
        warmup_steps=200,
        weight_decay=0.01,
        budget_seconds=args.budget_seconds,
        log_every=min(100, args.eval_every),
        eval_every=args.eval_every,
    )
    sizes = PairSizes.tiny() if args.size == "tiny" else PairSizes.bundled()
    run(Job(data=args.data, out=args.out, sizes=sizes), args.head, loop, tiny=args.size == "tiny")


if __name__ == "__main__":
    main()
