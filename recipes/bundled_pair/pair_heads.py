r"""Further drafts for the bundled target.

Small ones: EAGLE-1, three MTP layers, and a small language model. Heads that draft a block at once,
with as many trained parameters as the pair's EAGLE-3 head: DFlash, DFlash2, DSpark and P-EAGLE. And
`eagle3`, the pair's own head by the same batches and loss, to compare those with.

    python -m recipes.bundled_pair.pair --data DATA --out OUT --stage samples
    python -m recipes.bundled_pair.pair_heads --data DATA --out OUT --head eagle1 \
        --budget-seconds 100

DATA and OUT are the pair's: DATA with corpus and tokenizer, OUT with `target/` and the target's
samples.

    OUT/draft_eagle1/, OUT/draft_dflash/, ...    the weights, ready to serve
    OUT/report_eagle1.json, ...                  held-out loss by step, sizes, seconds
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
from jspec.training.draft_recipe import HeadRecipe, all_count, draft_vocabulary, train_head
from jspec.training.heads.draft_head import DraftHead
from jspec.training.heads.head_block import trained_block
from jspec.training.heads.head_eagle1 import eagle1_head
from jspec.training.heads.head_eagle3 import eagle3_head
from jspec.training.heads.head_lm import lm_head_of
from jspec.training.heads.head_mtp import mtp_head
from jspec.training.heads.head_parallel import parallel_head
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
from recipes.bundled_pair.tokenizer_training import load_tokenizer

TARGET_DTYPE = jnp.bfloat16  # of the target's forward, as for the pair's head


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    head: DraftHead
    recipe: HeadRecipe
    draft_vocab_size: int | None = None  # the most frequent ids; None: all


# A byte that UTF-8 never has, so no text of the corpus has its token.
MASK_TOKEN = "\u00ff"
# Sizes with which a head has at most the parameters that are trained in the pair's EAGLE-3 head.
# DFlash has room for 496 columns, with which training failed on an H200 within 2,000 steps, for an
# unknown reason (CUDA_ERROR_LAUNCH_FAILED, jax 0.11.2, XLA without its Triton products).
BLOCK_SIZES: dict[str, dict[str, Any]] = {
    "dflash": {"intermediate_size": 480},
    "dflash2": {"intermediate_size": 320, "selector_rank": 32},
    "dspark": {"intermediate_size": 368, "markov_rank": 32},
}
BLOCK_LAYERS, PARALLEL_LAYERS, PARALLEL_INNER = 3, 2, 272
DEPTHS = 7  # of a block of 8 rows
HEADS = ("eagle1", "mtp", "lm", *BLOCK_SIZES, "peagle", "eagle3")


def make(
    name: str, target: ModelSpec, *, loop: LoopConfig, batch_size: int, tiny: bool, mask: int
) -> Made:
    length = 64 if tiny else 512
    recipe = HeadRecipe(loop=loop, batch_size=batch_size, length=length, num_depths=4)
    if name == "eagle1":
        return Made(head=eagle1_head(target, intermediate_size=512), recipe=recipe)
    if name == "mtp":
        head = mtp_head(target, num_layers=3, intermediate_size=192)
        return Made(head=head, recipe=replace(recipe, num_depths=3))
    if name == "lm":
        lm = lm_head_of(target, hidden_size=64, intermediate_size=192, num_layers=3, head_dim=32)
        # float32: the table's gradient is a sum over all occurrences of a token
        return Made(head=lm, recipe=replace(recipe, num_depths=1, compute_dtype=jnp.float32))
    sizes = PairSizes.tiny() if tiny else PairSizes.bundled()
    draft_vocab_size = sizes.draft_vocab_size
    common: dict[str, Any] = {"aux_layer_ids": sizes.aux_layer_ids}
    if name == "eagle3":
        inner = sizes.head_intermediate_size
        eagle3 = eagle3_head(
            target, draft_vocab_size=draft_vocab_size, intermediate_size=inner, **common
        )
        recipe = replace(recipe, num_depths=5)
        return Made(head=eagle3, recipe=recipe, draft_vocab_size=draft_vocab_size)
    recipe = replace(recipe, num_depths=DEPTHS, num_roots=recipe.length // DEPTHS)
    common["mask_token_id"] = mask
    if name == "peagle":
        parallel = parallel_head(
            target,
            draft_vocab_size=draft_vocab_size,
            num_layers=PARALLEL_LAYERS,
            intermediate_size=PARALLEL_INNER,
            **common,
        )
        return Made(head=parallel, recipe=recipe, draft_vocab_size=draft_vocab_size)
    block = trained_block(
        target, num_layers=BLOCK_LAYERS, num_depths=DEPTHS, **common, **BLOCK_SIZES[name]
    )
    return Made(head=block, recipe=recipe)


def in_rows(table: np.ndarray, *, length: int) -> np.ndarray:
    """Cut rows into rows of `length`, dropping remainders: [R, T] -> [R * (T // length), length].

    Rows may start in the middle of a text: the teacher is the target's distribution over the row.
    """
    pieces = table.shape[1] // length
    return table[:, : pieces * length].reshape(-1, length)


def run(job: Job, name: str, loop: LoopConfig, *, batch_size: int, tiny: bool) -> Result:
    _, train_stream, held_out_stream = load_streams(job.data)
    target, params = load_target(job)
    mask = load_tokenizer(job.data).token_to_id(MASK_TOKEN)
    made = make(name, target, loop=loop, batch_size=batch_size, tiny=tiny, mask=mask)
    samples, held_out_samples = (
        in_rows(table, length=made.recipe.length) for table in read_samples(job)
    )
    count = 4 * made.recipe.batch_size
    held_out_text = fixed_crops(held_out_stream, count=count, length=made.recipe.length)
    chosen = np.linspace(0, len(held_out_samples) - 1, min(count, len(held_out_samples)))
    held_out = np.concatenate((held_out_text, held_out_samples[chosen.astype(np.int64)]))
    draft_ids = draft_vocabulary(
        [train_stream.ids, samples],
        vocab_size=target.vocab_size,
        size=made.draft_vocab_size or target.vocab_size,
    )
    result = train_head(
        made.head,
        params,
        made.recipe,
        features_of=features_on_the_fly(
            target, made.head, length=made.recipe.length, dtype=TARGET_DTYPE
        ),
        draft_ids=draft_ids,
        batch_at=mixed_batches(train_stream, samples, made.recipe),
        held_out=all_count(held_out),
    )
    folder = job.out / f"draft_{name}"
    made.head.save(
        folder, result.params, draft_ids=draft_ids, dtype=ml_dtypes.bfloat16, target=target
    )
    write_report(job.out / f"report_{name}.json", {folder.name: report(made, result, folder)})
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
    parser.add_argument("--batch-size", type=int, default=32, help="Rows of 512 tokens a step")
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
    job, is_tiny = Job(data=args.data, out=args.out, sizes=sizes), args.size == "tiny"
    run(job, args.head, loop, batch_size=args.batch_size, tiny=is_tiny)


if __name__ == "__main__":
    main()
