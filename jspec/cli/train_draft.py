"""`jspec train-draft`: flags to a `training.draft_job`, and the engine that evaluates its head."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cli.flags import FlagParser
from jspec.engine.weights.loading import BUNDLED
from jspec.errors import ConfigError, OutputError
from jspec.serving.engine import Engine
from jspec.training.data.examples import SHORTEST, LossOn, RowTable
from jspec.training.draft_job import HEAD, SETTINGS, run_job
from jspec.training.draft_recipe import HeadRecipe
from jspec.training.draft_settings import DraftJob, Kind
from jspec.training.loop import LoopConfig

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
SAMPLE_TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 1.0, 1.0)  # low ones soon loop, high ones vary more
COUNTS = (
    *("num_steps", "batch_size", "length", "log_every", "eval_every", "checkpoint_every"),
    *("held_out_rows", "num_depths", "draft_vocab_size", "intermediate_size", "devices"),
    *("num_layers", "num_roots", "rank"),
)
# (for a GPU or TPU, for a CPU): a laptop finishes a step of the small ones in seconds.
DEFAULTS = {
    "num_steps": (10000, 500),
    "batch_size": (8, 4),
    "length": (512, 128),
    "held_out_rows": (64, 16),
    "log_every": (20, 5),
    "eval_every": (500, 100),
    "checkpoint_every": (500, 50),
    "serve_prompts": (16, 4),
}
SERVED_STEPS = 3  # S of the chain that measures acceptance, where each depth is a forward
# The engine's algorithm for a kind of head with another name.
ALGORITHMS = {
    Kind.NEXTN: "EAGLE",
    Kind.DFLASH2: "DFLASH",
    Kind.DSPARK: "DFLASH",
    Kind.PEAGLE: "EAGLE3",
}
# The depths of heads that draft blocks: a block of 8 rows, or of 7 that all predict.
BLOCK_DEPTHS = 7


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Append defaults that are values; None is described in words, and switches are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.dest in DEFAULTS:
            on_device, on_cpu = DEFAULTS[action.dest]
            return f"{action.help} (default: {on_device}, on a CPU {on_cpu})"
        is_value = action.default is not None and action.default is not False
        return super()._get_help_string(action) if is_value else action.help


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="jspec train-draft",
        allow_abbrev=False,
        formatter_class=_Help,
        description="Train a draft head for a target on JSON lines; see docs/training.md.",
    )
    _add_data(parser.add_argument_group("Target, data and output"))
    _add_head(parser.add_argument_group("Head"))
    _add_schedule(parser.add_argument_group("Schedule"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-path", type=Path, default=None, help="Target model; unset: the bundled one")
    add("--data", type=Path, required=True, help="JSON lines with text, messages or conversations")
    add(
        "--skip-bad-lines",
        action="store_true",
        help="Leave out bad lines and print how many; unset: the first one is an error",
    )
    add("--held-out", type=Path, help="JSON lines for evaluation; unset: every 20th line of --data")
    add("--held-out-rows", type=int, help="Held-out rows used for evaluation")
    add("--out", type=Path, required=True, help="New directory for head, checkpoints and report")
    add(
        "--resume", action="store_true", help="Continue an earlier run from its checkpoint in --out"
    )
    add(
        "--loss-on",
        choices=[each.value for each in LossOn],
        default="all",
        help="Tokens with a loss. all: every token; assistant: the assistant's tokens, every line "
        "must be a chat",
    )
    add("--chat-template", help="Jinja file with the chat template; unset: the target's own")
    add(
        "--own-samples", type=int, default=0, help="Rows sampled from the target, added to the data"
    )
    add("--features-dir", type=Path, help="Directory that caches the target's hidden states")
    add("--dtype", choices=DTYPES, help="Compute type; unset: bfloat16, float32 on a CPU")
    add("--devices", type=int, help="Number of devices that share every batch; unset: all")


def _add_head(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--algorithm",
        choices=[kind.value for kind in Kind],
        default="EAGLE3",
        help="Algorithm of the head",
    )
    add(
        "--num-depths",
        type=int,
        help="Tokens drafted ahead: layers for NEXTN (unset: 3), masks for DFLASH, DFLASH2, DSPARK "
        "and PEAGLE (unset: 7), else unrolled steps (unset: 5)",
    )
    add(
        "--chained",
        action="store_true",
        help="NEXTN: each layer reads the output of the one before",
    )
    add(
        "--draft-vocab-size",
        type=int,
        help="EAGLE3, PEAGLE: size of the draft vocabulary; unset: 32000, or the whole vocabulary",
    )
    add(
        "--aux-layer-ids",
        type=int,
        nargs="+",
        help="Captured target layers, by the layer whose input it is. Unset: 2, L/2, L-3 for "
        "EAGLE3 and PEAGLE; as many as the head's layers, evenly from 2 to L-2, for DFLASH, "
        "DFLASH2 and DSPARK",
    )
    add("--num-layers", type=int, help="DFLASH, DFLASH2, DSPARK: layers, unset: 5; PEAGLE: 4")
    add(
        "--num-roots",
        type=int,
        help="DFLASH, DFLASH2, DSPARK, PEAGLE: blocks trained in each row, at random anchors; "
        "unset: length / depths",
    )
    add("--mask-token-id", type=int, help="Token of the masks; unset: the vocabulary's last id")
    add("--rank", type=int, help="DSPARK, DFLASH2: rank of Markov head or selector; unset: 256")
    add(
        "--intermediate-size",
        type=int,
        help="Intermediate size of the head's MLP; unset: the target's",
    )
    add(
        "--export-dtype",
        choices=DTYPES,
        default="bfloat16",
        help="Data type of the exported weights",
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-steps", type=int, help="Training steps, unless --budget-seconds ends them")
    add("--batch-size", type=int, help="Rows per step, over all devices")
    add("--length", type=int, help="Tokens per row")
    add(
        "--learning-rate",
        type=float,
        default=1e-3,
        help="Peak learning rate; after warmup it decays to 0",
    )
    add("--warmup-steps", type=int, default=100, help="Steps of linear warmup")
    add("--weight-decay", type=float, default=0.01, help="Weight decay of AdamW")
    add("--budget-seconds", type=float, help="Time limit; the schedule still decays fully")
    add("--log-every", type=int, help="Steps between log lines")
    add("--eval-every", type=int, help="Steps between evaluations")
    add("--checkpoint-every", type=int, help="Steps between checkpoints")
    add("--serve-prompts", type=int, help="Held-out prompts served per evaluation")
    add("--seed", type=int, default=0, help="Seed of weights, rows and samples")


def set_defaults(options: argparse.Namespace, *, on_cpu: bool) -> str:
    """Set defaults of missing options; return a line about them on a CPU, else ""."""
    unset = [name for name in DEFAULTS if getattr(options, name) is None]
    for name in unset:
        setattr(options, name, DEFAULTS[name][on_cpu])
    if not unset or not on_cpu:
        return ""
    chosen = ", ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in unset)
    return f"on a CPU the defaults are small: {chosen}"


def check_numbers(options: argparse.Namespace) -> None:
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
    for name in ("warmup_steps", "weight_decay", "own_samples", "serve_prompts"):
        value = getattr(options, name)
        if not value >= 0:
            raise ConfigError(f"{name} is {value}; expected 0 or more")
    for name in ("learning_rate", "budget_seconds"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; expected more than 0")
    if not 0 <= options.seed < 2**31:
        raise ConfigError(f"seed is {options.seed}; expected 0 to {2**31 - 1}")
    if options.devices is not None and options.devices > len(jax.devices()):
        raise ConfigError(
            f"devices is {options.devices}; expected at most {len(jax.devices())}, which jax finds"
        )


def job_of(options: argparse.Namespace) -> DraftJob:
    on_cpu = jax.devices()[0].platform == "cpu"
    small = set_defaults(options, on_cpu=on_cpu)
    check_numbers(options)
    kind = Kind(options.algorithm)
    usual = BLOCK_DEPTHS if kind.runs_blocks else 3 if kind is Kind.NEXTN else 5
    depths = options.num_depths or usual
    if options.length < SHORTEST:
        raise ConfigError(f"length is {options.length}; expected at least {SHORTEST} tokens")
    if not 1 <= depths <= options.length - 2:
        raise ConfigError(
            f"num_depths is {depths}; expected 1 to {options.length - 2}, two less than the length"
        )
    loop = LoopConfig(
        peak_learning_rate=options.learning_rate,
        max_grad_norm=0.5,
        **{
            name: getattr(options, name)
            for name in (
                *("num_steps", "warmup_steps", "weight_decay", "budget_seconds", "seed"),
                *("log_every", "eval_every", "checkpoint_every"),
            )
        },
    )
    if small:
        print(small, flush=True)
    dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    recipe = HeadRecipe(
        loop=loop,
        batch_size=options.batch_size,
        length=options.length,
        num_depths=depths,
        num_roots=(options.num_roots or -(-options.length // depths)) if kind.runs_blocks else 0,
        loss_weights=kind.loss_weights,
        compute_dtype=DTYPES[dtype],
    )
    ids = options.aux_layer_ids
    return DraftJob(
        target=options.model_path or BUNDLED / "target",
        data=options.data,
        out=options.out,
        kind=kind,
        recipe=recipe,
        held_out=options.held_out,
        skips_bad_lines=options.skip_bad_lines,
        chat_template=options.chat_template,
        loss_on=LossOn(options.loss_on),
        num_own_samples=options.own_samples,
        draft_vocab_size=options.draft_vocab_size,
        intermediate_size=options.intermediate_size,
        is_chained=options.chained,
        aux_layer_ids=tuple(ids) if ids else None,
        num_layers=options.num_layers,
        mask_token_id=options.mask_token_id,
        rank=options.rank,
        features_dir=options.features_dir,
        num_devices=options.devices,
        num_held_out_rows=options.held_out_rows,
        export_dtype=np.dtype(DTYPES[options.export_dtype]),
    )


def serve_settings(kind: Kind, *, num_depths: int) -> dict[str, Any]:
    """Return the flags of a chain: of all depths if they are drafted in one forward."""
    num_steps = num_depths if kind.runs_blocks else min(SERVED_STEPS, num_depths)
    words: dict[str, Any] = {
        "speculative_algorithm": ALGORITHMS.get(kind, kind.value),
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_steps + 1,
    }
    return words | ({"enable_multi_layer_eagle": True} if kind is Kind.NEXTN else {})


class EngineServing:
    def __init__(self, job: DraftJob, *, num_prompts: int) -> None:
        self._job, self._num_prompts = job, num_prompts
        self._dtype = np.dtype(job.recipe.compute_dtype).name

    def _engine(self, **settings: Any) -> Engine:
        rows = min(self._job.recipe.batch_size, 32)
        length = self._job.recipe.length
        return Engine(
            model_path=str(self._job.target),
            dtype=self._dtype,
            max_running_requests=rows,
            max_queued_requests=1 << 20,
            max_total_tokens=rows * (length + 64),
            **settings,
        )

    def sample(self, prompts: RowTable, lens: np.ndarray, *, seed: int) -> np.ndarray:
        rows, length = prompts.ids.shape
        print(f"sampling {rows} rows from the target", flush=True)
        params = [
            {
                "temperature": SAMPLE_TEMPERATURES[row % len(SAMPLE_TEMPERATURES)],
                "max_new_tokens": int(length - lens[row]),
                "sampling_seed": seed * rows + row,
                "ignore_eos": True,
            }
            for row in range(rows)
        ]
        inputs = [prompts.ids[row, : lens[row]].tolist() for row in range(rows)]
        with self._engine() as engine:
            results = engine.generate(input_ids=inputs, sampling_params=params)
        said = [[*ids, *result["output_ids"]] for ids, result in zip(inputs, results, strict=True)]
        return np.asarray(said, np.int32)

    def acceptance(self, head: Path, prompts: RowTable) -> dict[str, float]:
        """Return acceptance lengths at temperatures 0 and 1; prompts are first halves of rows."""
        if not self._num_prompts:
            return {}
        count = min(self._num_prompts, len(prompts.ids))
        lens = np.maximum(prompts.lens[:count] // 2, 1)
        new_tokens = self._job.recipe.length // 2
        words = serve_settings(self._job.kind, num_depths=self._job.recipe.num_depths)
        found = {}
        print(f"serving {count} held-out prompts with the head so far", flush=True)
        with self._engine(speculative_draft_model_path=str(head), **words) as engine:
            for temperature in (0.0, 1.0):
                results = engine.generate(
                    input_ids=[prompts.ids[row, : lens[row]].tolist() for row in range(count)],
                    sampling_params=[
                        {
                            "temperature": temperature,
                            "max_new_tokens": new_tokens,
                            "sampling_seed": row,
                            "ignore_eos": True,
                        }
                        for row in range(count)
                    ],
                )
                emitted = [
                    (meta["acceptance_length"] * (meta["spec_verify_ct"] - 1))
                    for meta in (result["meta_info"] for result in results)
                ]
                steps_taken = sum(r["meta_info"]["spec_verify_ct"] - 1 for r in results)
                found[f"served_T{temperature:g}"] = sum(emitted) / max(steps_taken, 1)
        return found


def run_train_draft(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(list(argv))
    job = job_of(options)
    serving = EngineServing(job, num_prompts=options.serve_prompts)
    try:
        run_job(job, resume=options.resume, serving=serving)
    except (KeyboardInterrupt, OutputError):
        if (job.out / SETTINGS).is_file():
            again = "" if options.resume else " with --resume"
            print(f"the same command{again} continues from the last checkpoint", file=sys.stderr)
        raise
    words = serve_settings(job.kind, num_depths=job.recipe.num_depths)
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in words.items()
    )
    given = {"--model-path": options.model_path, "--chat-template": options.chat_template}
    paths = {**given, "--speculative-draft-model-path": job.out / HEAD}
    named = [f"{flag} {shlex.quote(str(path))}" for flag, path in paths.items() if path is not None]
    print(
        f"the head is in {job.out / HEAD}; serve it with\n  jspec serve {' '.join(named)} {flags}"
    )
    return 0
