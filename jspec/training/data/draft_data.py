"""The rows of a `jspec train-draft` run, from files and from the target, and their features."""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np

from jspec.errors import ConfigError
from jspec.files.output_files import whole_file
from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.tokenizer import Tokenizer
from jspec.training.data.examples import Reader, RowTable, held_out_from, rows_of
from jspec.training.data.feature_store import (
    FeatureStore,
    Key,
    key_of,
    open_features,
    write_features,
)
from jspec.training.data.token_stream import BatchAt, picks
from jspec.training.draft_loss import FeaturesOf
from jspec.training.draft_recipe import HeadRecipe, draft_vocabulary
from jspec.training.draft_settings import DRAFT_VOCAB, DraftJob
from jspec.training.heads.draft_head import DraftHead

STORES = ("train", "held_out")  # names of the feature stores of the two tables


class Sampling(Protocol):
    def sample(self, prompts: RowTable, lens: np.ndarray, *, seed: int) -> np.ndarray:
        """Return i32[R, T]: prompts whose tokens from lens[r] on are sampled from the target."""


def read_examples(job: DraftJob, spec: ModelSpec) -> tuple[RowTable, RowTable]:
    tokenizer = Tokenizer.from_directory(job.target)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"{job.target}: the tokenizer has {tokenizer.vocab_size} ids; expected at most "
            f"{spec.vocab_size}, the target's vocabulary"
        )
    reader = Reader(
        tokenizer=tokenizer,
        template=ChatTemplates.find(job.target, named=job.chat_template),
        vocab_size=spec.vocab_size,
        loss_on=job.loss_on,
        skips=job.skips_bad_lines,
    )
    if job.recipe.length > spec.max_position:
        raise ConfigError(
            f"length is {job.recipe.length}; expected at most {spec.max_position}, the target's "
            "context"
        )
    given = reader.read(job.data)
    if job.held_out is None:
        train, held_out = held_out_from(given)
    else:
        train, held_out = given, reader.read(job.held_out)
    length = job.recipe.length
    every = rows_of(held_out, length=length)
    chosen = np.linspace(0, len(every.ids) - 1, min(job.num_held_out_rows, len(every.ids)))
    return rows_of(train, length=length), every.part(chosen.astype(np.int64))


def draw_own_samples(
    job: DraftJob, train: RowTable, held_out: RowTable, *, sampling: Sampling
) -> tuple[RowTable, RowTable]:
    """Append num_own_samples rows sampled from the target, and an eighth of that to `held_out`."""
    count = job.num_own_samples
    if not count:
        return train, held_out
    found = []
    for name, table, number in zip(STORES, (train, held_out), (count, count // 8), strict=True):
        path = job.out / f"own_samples_{name}.npz"
        if not path.is_file():
            own = own_samples(table, sampling, count=max(number, 1), seed=job.recipe.loop.seed)
            with whole_file(path) as part:
                np.savez_compressed(part, ids=own.ids, lens=own.lens, weights=own.weights)
        with np.load(path) as stored:
            own = RowTable(**{name: stored[name] for name in ("ids", "lens", "weights")})
        found.append(joined_tables(table, own))
    return found[0], found[1]


def own_samples(table: RowTable, sampling: Sampling, *, count: int, seed: int) -> RowTable:
    """Return rows cut after 1/16 to 1/3 and continued by the target, whose tokens are learnt."""
    random = np.random.default_rng((seed, 2))
    length = table.ids.shape[1]
    rows = random.integers(0, len(table.ids), count)
    shortest, longest = max(length // 16, 1), max(length // 3, 1)
    lens = np.minimum(random.integers(shortest, longest + 1, count), table.lens[rows])
    ids = sampling.sample(table.part(rows), lens, seed=seed)
    weights = (np.arange(length) >= lens[:, None] - 1).astype(np.float32)
    weights[:, -1] = 0.0  # the next token is unknown
    return RowTable(ids=ids, lens=np.full(count, length, np.int32), weights=weights)


def joined_tables(first: RowTable, second: RowTable) -> RowTable:
    return RowTable(
        ids=np.concatenate((first.ids, second.ids)),
        lens=np.concatenate((first.lens, second.lens)),
        weights=np.concatenate((first.weights, second.weights)),
    )


def vocabulary(job: DraftJob, spec: ModelSpec, table: RowTable) -> np.ndarray:
    """Return i32[U] target ids that the head can draft: the most frequent, or all."""
    size = spec.vocab_size
    if job.kind.has_draft_vocabulary:
        size = job.draft_vocab_size or min(DRAFT_VOCAB, spec.vocab_size)
    ids = [row[:n] for row, n in zip(table.ids, table.lens, strict=True)]
    return draft_vocabulary([np.concatenate(ids)], vocab_size=spec.vocab_size, size=size)


def check_features(job: DraftJob, tables: tuple[RowTable, RowTable], head: DraftHead) -> None:
    """Raise ConfigError for a features_dir that cannot be created or has other features."""
    if job.features_dir is None:
        return
    try:
        job.features_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"features_dir is {str(job.features_dir)!r}: {error.strerror}; expected a directory"
        ) from error
    if not job.num_own_samples:
        for name, table in zip(STORES, tables, strict=True):
            open_features(job.features_dir / name, features_key(job, table, head))


def features_key(job: DraftJob, table: RowTable, head: DraftHead) -> Key:
    dtype = job.recipe.compute_dtype
    return key_of(job.target, table, aux_layer_ids=head.aux_layer_ids, dtype=dtype)


def read_features(
    job: DraftJob,
    name: str,
    table: RowTable,
    head: DraftHead,
    *,
    features_of: FeaturesOf,
    target_params: Params,
) -> FeatureStore | None:
    """Return the features in features_dir, computing missing ones; None without features_dir."""
    if job.features_dir is None:
        return None
    folder, key = job.features_dir / name, features_key(job, table, head)
    if (found := open_features(folder, key)) is None:
        print(f"features of {name}: compiling", flush=True)
        run = jax.jit(lambda params, batch: features_of(params, batch))
        write_features(
            folder,
            table,
            key,
            lambda batch: run(target_params, batch),
            batch_size=job.recipe.batch_size,
            progress=lambda done, total: print(f"features of {name}: {done}/{total}", flush=True),
        )
        found = open_features(folder, key)
    return found


def batches(table: RowTable, store: FeatureStore | None, recipe: HeadRecipe) -> BatchAt:
    rows = picks(len(table.ids), batch_size=recipe.batch_size, seed=recipe.loop.seed)
    return lambda step: whole_batch(table, store, rows(step))


def whole_batch(
    table: RowTable, store: FeatureStore | None, rows: np.ndarray | slice = slice(None)
) -> dict[str, np.ndarray]:
    return {**table.batch(rows), **(store.batch(rows) if store else {})}
