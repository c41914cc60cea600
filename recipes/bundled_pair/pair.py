"""The recipe of the bundled pair: corpus, tokenizer, target, samples, head, report.

    python -m recipes.bundled_pair.pair --stage all --data DIR --out DIR [--budget-seconds 720]

Stages can be run one by one, on different machines, and repeatedly: each reads the output of those
before it, and `target` and `head` resume from their checkpoints.

    corpus     DATA/corpus.jsonl.xz, manifest.json   the running Python's standard library
    tokenizer  DATA/tokenizer.json                   byte-level BPE over the training part
    target     OUT/target/                           a LlamaForCausalLM with its tokenizer
    samples    OUT/samples.npz                       the target's samples at several temperatures
    head       OUT/head/                             a LlamaForCausalLMEagle3
    report     OUT/report.json                       acceptance on held-out prompts, a short table

--budget-seconds limits the stages of one call together (27% target, 7% samples, 66% head if all
three run); without it, `--size` sets the numbers of steps.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from jspec.errors import ConfigError
from jspec.models.files import checkpoint
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.layer import Params
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from jspec.training.data import corpus as corpora
from jspec.training.data.token_stream import BatchAt, TokenStream, crops, fixed_crops, joined, rows
from jspec.training.draft_loss import features_on_the_fly, make_frozen
from jspec.training.draft_recipe import HeadRecipe, all_count, draft_vocabulary, train_head
from jspec.training.heads.head_eagle3 import TrainedEagle3, eagle3_head
from jspec.training.loop import write_report
from recipes.bundled_pair.acceptance import measure_acceptance
from recipes.bundled_pair.pair_sizes import PairSizes
from recipes.bundled_pair.sampler import Prompts, draw_prompts, sample_rows
from recipes.bundled_pair.target import (
    bundled_config,
    export_target,
    load_streams,
    train_target,
)
from recipes.bundled_pair.tokenizer_training import load_tokenizer, save_tokenizer, train_tokenizer

STAGES = ("corpus", "tokenizer", "target", "samples", "head", "report")
TIMED = {"target": 0.27, "samples": 0.07, "head": 0.66}
TRAIN_TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 1.0, 1.0)  # low temperatures soon repeat themselves
HELD_OUT_TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    data: Path
    out: Path
    sizes: PairSizes
    stdlib: Path | None = None
    budgets: dict[str, float] | None = None

    def budget(self, stage: str) -> float | None:
        return (self.budgets or {}).get(stage)

    def checkpoints(self, stage: str) -> Path:
        return self.out / "checkpoints" / stage


def split_budget(seconds: float | None, stages: tuple[str, ...]) -> dict[str, float]:
    """Return the budgets of the timed stages of a call; a single one gets all of it.

    100 s: all three get 27, 7, 66; target and samples alone 79.4, 20.6.
    """
    timed = [stage for stage in stages if stage in TIMED]
    if seconds is None or not timed:
        return {}
    total = sum(TIMED[stage] for stage in timed)
    return {stage: seconds * TIMED[stage] / total for stage in timed}


def run_corpus(job: Job) -> None:
    documents = corpora.standard_library(root=job.stdlib)
    corpora.write_corpus(job.data, documents, python_version=_version_of(job.stdlib))


def _version_of(stdlib: Path | None) -> str | None:
    if stdlib is None:
        return None
    release = stdlib.resolve().name.removeprefix("python")
    installed = stdlib.resolve().parents[1].name
    return installed if installed.startswith(release) else release


def run_tokenizer(job: Job) -> None:
    documents = corpora.of_split(corpora.read_corpus(job.data), corpora.Split.TRAIN)
    texts = (document.text for document in documents)
    tokenizer = train_tokenizer(texts, vocab_size=job.sizes.vocab_size)
    save_tokenizer(tokenizer, job.data, max_length=2048)


def target_config(tokenizer: Tokenizer, sizes: PairSizes) -> ModelSpec:
    return bundled_config(tokenizer, **(sizes.layers or {}))


def run_target(job: Job) -> None:
    tokenizer, train_stream, held_out_stream = load_streams(job.data)
    recipe = job.sizes.target
    loop = replace(recipe.loop, budget_seconds=job.budget("target"))
    config = target_config(tokenizer, job.sizes)
    tokens_a_step = recipe.batch_size * recipe.length
    print(
        f"target: {len(train_stream.ids)} training tokens, {len(held_out_stream.ids)} held out, "
        f"{tokens_a_step} a step, {len(train_stream.ids) // tokens_a_step} steps an epoch"
    )
    result = train_target(
        config,
        replace(recipe, loop=loop),
        train_stream=train_stream,
        held_out_stream=held_out_stream,
        checkpoint_dir=job.checkpoints("target"),
    )
    export_target(job.out / "target", config, result.params, tokenizer=tokenizer)
    report = {
        "held_out": result.metrics,
        "best_step": result.step,
        "num_steps": result.num_steps,
        "epochs": round(result.num_steps * tokens_a_step / len(train_stream.ids), 2),
        "seconds": round(result.seconds, 1),
        "num_parameters": num_parameters(result.params),
    }
    write_report(job.out / REPORT_FILE, {"target": report})


def num_parameters(params: Params) -> int:
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def load_target(job: Job) -> tuple[ModelSpec, Params]:
    config = load_model_spec(job.out / "target")
    params = checkpoint.load_target(job.out / "target", config, dtype=ml_dtypes.bfloat16)
    return config, jax.tree.map(jnp.asarray, params)


def train_prompts(job: Job, stream: TokenStream) -> Prompts:
    """Return prompts of 1/16 to 3/4 of a row, so that the head sees all prompt lengths."""
    length = job.sizes.head.length
    return draw_prompts(
        stream,
        count=job.sizes.num_samples,
        length=length,
        shortest=length // 16,
        longest=3 * length // 4,
        temperatures=TRAIN_TEMPERATURES,
        seed=7,
    )


def held_out_prompts(job: Job, stream: TokenStream) -> Prompts:
    return draw_prompts(
        stream,
        count=job.sizes.num_held_out_samples,
        length=job.sizes.head.length,
        shortest=job.sizes.report_prompt_len,
        longest=job.sizes.report_prompt_len,
        temperatures=HELD_OUT_TEMPERATURES,
        seed=11,
    )


def run_samples(job: Job) -> None:
    _, train_stream, held_out_stream = load_streams(job.data)
    config, params = load_target(job)
    held_out, train = held_out_prompts(job, held_out_stream), train_prompts(job, train_stream)
    budget, start = job.budget("samples"), time.monotonic()

    def draw(prompts: Prompts) -> np.ndarray:
        return sample_rows(
            config,
            params,
            prompts,
            batch_size=job.sizes.sample_batch_size,
            dtype=jnp.bfloat16,
            should_stop=lambda: budget is not None and time.monotonic() - start > budget,
        )

    tables = {"held_out": draw(held_out), "train": draw(train)}
    np.savez_compressed(
        job.out / "samples.npz",
        **{name: table.astype(np.uint16) for name, table in tables.items()},  # type: ignore[arg-type]
    )
    sizes = {name: list(table.shape) for name, table in tables.items()}
    write_report(job.out / REPORT_FILE, {"samples": sizes})
    tokenizer = load_tokenizer(job.data)
    for row in range(len(HELD_OUT_TEMPERATURES)):
        prompt_len = held_out.prompt_lens[row]
        ids = tables["held_out"][row]
        print(f"--- temperature {held_out.temperatures[row]:.1f}, prompt's last 48 tokens:")
        print(tokenizer.decode(ids[max(prompt_len - 48, 0) : prompt_len].tolist()))
        print("--- continued by the target:")
        print(tokenizer.decode(ids[prompt_len : prompt_len + 160].tolist()))


def read_samples(job: Job) -> tuple[np.ndarray, np.ndarray]:
    path = job.out / "samples.npz"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected samples (run the stage 'samples')")
    with np.load(path) as tables:
        return tables["train"].astype(np.int32), tables["held_out"].astype(np.int32)


def run_head(job: Job) -> None:
    _, train_stream, held_out_stream = load_streams(job.data)
    target, params = load_target(job)
    samples, held_out_samples = read_samples(job)
    sizes, recipe = job.sizes, job.sizes.head
    draft_ids = draft_vocabulary(
        [train_stream.ids, samples], vocab_size=target.vocab_size, size=sizes.draft_vocab_size
    )
    head = eagle3_head(
        target,
        draft_vocab_size=sizes.draft_vocab_size,
        intermediate_size=sizes.head_intermediate_size,
        aux_layer_ids=sizes.aux_layer_ids,
    )
    held_out_text = fixed_crops(
        held_out_stream, count=len(held_out_samples) // 4, length=recipe.length
    )
    loop = replace(recipe.loop, budget_seconds=job.budget("head"))
    result = train_head(
        head,
        params,
        replace(recipe, loop=loop),
        features_of=features_on_the_fly(
            target, head, length=recipe.length, dtype=recipe.compute_dtype
        ),
        draft_ids=draft_ids,
        batch_at=mixed_batches(train_stream, samples, recipe),
        held_out=all_count(np.concatenate((held_out_text, held_out_samples))),
        checkpoint_dir=job.checkpoints("head"),
    )
    head.save(
        job.out / "head",
        result.params,
        draft_ids=draft_ids,
        dtype=ml_dtypes.bfloat16,
        target=target,
    )
    report = {
        "held_out": result.metrics,
        "best_step": result.step,
        "num_steps": result.num_steps,
        "seconds": round(result.seconds, 1),
        "num_parameters": num_parameters(result.params),
        "draft_vocabulary_covers": round(float(np.isin(train_stream.ids, draft_ids).mean()), 4),
    }
    write_report(job.out / REPORT_FILE, {"head": report})


def mixed_batches(text: TokenStream, samples: np.ndarray, recipe: HeadRecipe) -> BatchAt:
    num_samples = round(recipe.batch_size * recipe.sample_share)
    seed, num_text = recipe.loop.seed, recipe.batch_size - num_samples
    parts = []
    if num_text:
        parts.append(crops(text, batch_size=num_text, length=recipe.length, seed=seed))
    if num_samples:
        parts.append(rows(samples, batch_size=num_samples, seed=seed))
    together = joined(parts)
    return lambda step: all_count(together(step))


def load_head(job: Job, target: ModelSpec, params: Params) -> tuple[HeadSpec, Params]:
    config = load_eagle3_config(job.out / "head", target=target)
    return config, load_eagle3(
        job.out / "head", config, dtype=ml_dtypes.bfloat16, target_params=params
    )


def run_report(job: Job) -> None:
    """Report acceptance of `report_new_tokens` per held-out sample, and the sizes on disk."""
    _, _, held_out_stream = load_streams(job.data)
    target, target_params = load_target(job)
    config, head = load_head(job, target, target_params)
    samples = read_samples(job)[1][:, : job.sizes.report_prompt_len + job.sizes.report_new_tokens]
    draft_ids = head.pop("draft_ids")
    head.pop("embed")
    prompts = held_out_prompts(job, held_out_stream)
    tables = {
        f"chain_{num_steps}_{'shared_noise' if draft_noise else 'top_k'}": measure_acceptance(
            target,
            TrainedEagle3(config),
            jax.tree.map(jnp.asarray, head),
            make_frozen(target_params, draft_ids),
            samples=samples,
            prompts=prompts,
            num_steps=num_steps,
            batch_size=32,
            dtype=jnp.bfloat16,
            draft_noise=draft_noise,
        )
        for num_steps in (job.sizes.chain_steps, job.sizes.chain_steps + 2)
        for draft_noise in (True, False)
    }
    megabytes = {
        name: round(sum(f.stat().st_size for f in (job.out / name).iterdir()) / 1e6, 2)
        for name in ("target", "head")
    }
    write_report(job.out / REPORT_FILE, {"acceptance": tables, "megabytes": megabytes})
    print_table(tables, megabytes)


def print_table(tables: dict[str, Any], megabytes: dict[str, float]) -> None:
    print(f"{'chain':20} {'T':>4} {'mean emitted':>13}  agreement by depth")
    for name, table in tables.items():
        for temperature, row in table.items():
            depths = " ".join(f"{value:.3f}" for value in row["agreement"])
            print(f"{name:20} {temperature:>4} {row['mean_emitted']:13.3f}  {depths}")
    print(f"megabytes: {megabytes}, together {sum(megabytes.values()):.2f}")


RUN = {
    "corpus": run_corpus,
    "tokenizer": run_tokenizer,
    "target": run_target,
    "samples": run_samples,
    "head": run_head,
    "report": run_report,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bundled_pair.pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--stage", action="append", required=True, choices=(*STAGES, "all"), help="repeatable"
    )
    parser.add_argument("--data", type=Path, required=True, help="corpus and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="weights, samples, report")
    parser.add_argument("--size", choices=("bundled", "tiny"), default="bundled")
    parser.add_argument("--stdlib", type=Path, default=None, help="another Python's lib folder")
    parser.add_argument("--budget-seconds", type=float, default=None)
    args = parser.parse_args(argv)
    stages = STAGES if "all" in args.stage else tuple(s for s in STAGES if s in args.stage)
    job = Job(
        data=args.data,
        out=args.out,
        sizes=PairSizes.tiny() if args.size == "tiny" else PairSizes.bundled(),
        stdlib=args.stdlib,
        budgets=split_budget(args.budget_seconds, stages),
    )
    job.out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        start = time.monotonic()
        RUN[stage](job)
        print(f"stage {stage} took {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
