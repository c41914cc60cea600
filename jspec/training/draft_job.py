"""One run of `jspec train-draft`: from a target and a file of examples to a servable head.

OUT/settings.json   the run's settings; a resumed run must have the same
OUT/checkpoints/    state of the loop (orbax); a resumed run continues from the last one
OUT/head/           config.json, model.safetensors: for --speculative-draft-model-path
OUT/report.json     loss and accuracy by depth on held-out rows, and served acceptance
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jspec.errors import ConfigError, OutputError
from jspec.files.json_files import read_object
from jspec.files.output_files import remove, write_text, writing
from jspec.models.files.checkpoint import (
    check_directory,
    check_target,
    load_model_spec,
    load_target,
)
from jspec.models.layer import Params
from jspec.training.data.draft_data import (
    STORES,
    Sampling,
    batches,
    check_features,
    draw_own_samples,
    read_examples,
    read_features,
    vocabulary,
    whole_batch,
)
from jspec.training.data.examples import RowTable
from jspec.training.data.feature_store import fingerprint
from jspec.training.data_parallel import Placement
from jspec.training.draft_loss import features_on_the_fly, stored_features
from jspec.training.draft_recipe import train_head
from jspec.training.draft_settings import DraftJob, make_head
from jspec.training.loop import Result, write_report

SETTINGS, REPORT, HEAD, CHECKPOINTS = "settings.json", "report.json", "head", "checkpoints"


class Serving(Sampling, Protocol):
    """The engine's part of a run, passed in because the engine is in a higher folder."""

    def acceptance(self, head: Path, prompts: RowTable) -> dict[str, float]: ...


def run_job(job: DraftJob, *, resume: bool, serving: Serving) -> Result:
    """Train, export and report. KeyboardInterrupt leaves the last checkpoint."""
    check_directory("model_path", job.target)
    spec = load_model_spec(job.target)
    check_target(job.target, spec)
    head = make_head(job, spec)
    placement = Placement.over(jax.devices()[: job.num_devices], batch_size=job.recipe.batch_size)
    examples = read_examples(job, spec)
    check_features(job, examples, head)
    claim(job, resume=resume, contents=contents_of(job, *examples))
    tables = draw_own_samples(job, *examples, sampling=serving)
    tell(job, tables)
    dtype = job.recipe.compute_dtype
    params = jax.tree.map(jnp.asarray, load_target(job.target, spec, dtype=dtype))
    draft_ids = vocabulary(job, spec, tables[0])
    features_of = features_on_the_fly(spec, head, length=job.recipe.length, dtype=dtype)
    stores = [
        read_features(job, name, table, head, features_of=features_of, target_params=params)
        for name, table in zip(STORES, tables, strict=True)
    ]
    if all(stores):
        features_of = stored_features
        params = {name: params[name] for name in ("embed", "norm", "lm_head")}
    kept = partial(head.save, draft_ids=draft_ids, dtype=job.export_dtype, target=spec)

    def save(folder: Path, trained: Params) -> None:
        kept(folder, head.whole(trained, params, draft_ids))

    result = train_head(
        head,
        params,
        job.recipe,
        features_of=features_of,
        draft_ids=draft_ids,
        batch_at=batches(tables[0], stores[0], job.recipe),
        held_out=whole_batch(tables[1], stores[1]),
        checkpoint_dir=job.out / CHECKPOINTS,
        placement=placement,
        also=served_acceptance(job, tables[1], serving, save=save),
    )
    export(job.out / HEAD, lambda folder: save(folder, result.params))
    report = {
        "held_out": result.metrics,
        "best_step": result.step,
        "num_steps": result.num_steps,
        "seconds": round(result.seconds, 1),
        "num_train_tokens": int(tables[0].lens.sum()),
        "num_parameters": sum(x.size for x in jax.tree.leaves(result.params)),
        "held_out_by_step": list(result.curve),
    }
    write_report(job.out / REPORT, report)
    return result


def tell(job: DraftJob, tables: tuple[RowTable, RowTable]) -> None:
    rows, recipe = len(tables[0].ids), job.recipe
    print(
        f"{job.kind.value}: {rows} rows of up to {recipe.length} tokens to train on, "
        f"{len(tables[1].ids)} held out; {recipe.batch_size} rows a step, "
        f"{rows / recipe.batch_size:.3g} steps an epoch; compiling the first step",
        flush=True,
    )


def contents_of(job: DraftJob, rows: RowTable, held_out: RowTable) -> dict[str, str]:
    def digest(table: RowTable) -> str:
        return hashlib.sha256(table.ids.tobytes() + table.weights.tobytes()).hexdigest()

    return {
        "data_sha256": digest(rows),
        "held_out_sha256": digest(held_out),
        "target_sha256": fingerprint(job.target),
    }


def claim(job: DraftJob, *, resume: bool, contents: dict[str, str]) -> None:
    """Create the output directory, or check that a resumed run has equal settings and inputs."""
    path, asked = job.out / SETTINGS, job.settings() | contents
    if not resume:
        if job.out.exists():
            raise ConfigError(
                f"out is {str(job.out)!r}, which exists; expected a new directory, or --resume"
            )
        try:
            job.out.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"out is {str(job.out)!r}: {error.strerror}; expected a new directory"
            ) from error
        try:
            write_text(path, json.dumps(asked, indent=1) + "\n")
        except OutputError:
            remove(job.out)  # the same command may be run again
            raise
        return
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected what an earlier run began")
    known = read_object(path)
    for name in sorted(known.keys() | asked.keys()):
        if known.get(name) != asked.get(name):
            before = "it unset" if known.get(name) is None else repr(known[name])
            raise ConfigError(
                f"{name} is {asked.get(name)!r}; expected {before}, with which {job.out} started"
            )


def served_acceptance(
    job: DraftJob, held_out: RowTable, serving: Serving, *, save: Callable[[Path, Params], None]
) -> Callable[[Params], dict[str, Any]]:
    def measure(params: Params) -> dict[str, Any]:
        folder = job.out / "evaluated"
        export(folder, lambda part: save(part, params))
        return serving.acceptance(folder, held_out)

    return measure


def export(folder: Path, save: Callable[[Path], None]) -> None:
    """Write a temporary folder and rename it, so that `folder` is whole. Raises OutputError."""
    part = folder.with_name(f"{folder.name}.part")
    remove(part)
    try:
        with writing(folder):
            save(part)
            remove(folder)
            part.replace(folder)
    except BaseException:
        remove(part)
        raise
