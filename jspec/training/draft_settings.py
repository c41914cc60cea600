"""The settings of one run of `jspec train-draft`, and the head that they give."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.errors import ConfigError
from jspec.spec.head_spec import default_aux_layer_ids
from jspec.spec.model_spec import ModelSpec
from jspec.training.data.examples import LossOn
from jspec.training.draft_loss import LossWeights
from jspec.training.draft_recipe import HeadRecipe
from jspec.training.heads.draft_head import DraftHead, inner_size
from jspec.training.heads.head_block import default_block_layer_ids, trained_block
from jspec.training.heads.head_eagle1 import eagle1_head
from jspec.training.heads.head_eagle3 import eagle3_head
from jspec.training.heads.head_mtp import mtp_head
from jspec.training.heads.head_parallel import parallel_head

DRAFT_VOCAB = 32000  # as in published EAGLE-3 heads


class Kind(enum.Enum):
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    NEXTN = "NEXTN"  # layers for multi-token prediction, one per depth
    DFLASH = "DFLASH"
    DFLASH2 = "DFLASH2"
    DSPARK = "DSPARK"
    PEAGLE = "PEAGLE"

    @property
    def runs_blocks(self) -> bool:
        return self in BLOCKS or self is Kind.PEAGLE

    @property
    def has_draft_vocabulary(self) -> bool:
        return self in (Kind.EAGLE3, Kind.PEAGLE)

    @property
    def loss_weights(self) -> LossWeights:
        return PUBLISHED_LOSSES.get(self, LossWeights())


BLOCKS = (Kind.DFLASH, Kind.DFLASH2, Kind.DSPARK)
NUM_LAYERS = dict.fromkeys(BLOCKS, 5) | {Kind.PEAGLE: 4}  # as published
RANK = 256
BLOCK_DECAY = math.exp(-1 / 4)  # of a block of 8
PUBLISHED_LOSSES = {
    Kind.DFLASH: LossWeights(overlap=0.0, decay=BLOCK_DECAY),
    Kind.DFLASH2: LossWeights(overlap=0.0, decay=BLOCK_DECAY),
    # 0.9 times the L1 distance, which is twice the unshared mass
    Kind.DSPARK: LossWeights(cross=0.1, overlap=1.8, decay=BLOCK_DECAY),
    # the shares of a row's positions that its sampling keeps at each depth
    Kind.PEAGLE: LossWeights(overlap=0.0, decay=0.7, least=0.2),
}
# The kinds that a setting belongs to.
SETTINGS_OF: dict[str, tuple[Kind, ...]] = {
    "draft_vocab_size": (Kind.EAGLE3, Kind.PEAGLE),
    "aux_layer_ids": (Kind.EAGLE3, Kind.PEAGLE, *BLOCKS),
    "num_layers": (Kind.PEAGLE, *BLOCKS),
    "mask_token_id": (Kind.PEAGLE, *BLOCKS),
    "rank": (Kind.DSPARK, Kind.DFLASH2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftJob:
    """The settings of a run. None: derived while preparing."""

    target: Path
    data: Path
    out: Path
    kind: Kind
    recipe: HeadRecipe
    held_out: Path | None = None
    skips_bad_lines: bool = False
    chat_template: str | None = None
    loss_on: LossOn = LossOn.ALL
    num_own_samples: int = 0
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    is_chained: bool = False
    aux_layer_ids: tuple[int, ...] | None = None
    num_layers: int | None = None
    mask_token_id: int | None = None
    rank: int | None = None  # of a Markov head or a selector
    features_dir: Path | None = None
    num_devices: int | None = None
    num_held_out_rows: int = 64
    export_dtype: Any = ml_dtypes.bfloat16

    def settings(self) -> dict[str, Any]:
        words = {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in asdict(replace(self, out=Path())).items()
            if name not in ("out", "features_dir", "skips_bad_lines")  # the rows are compared
        }
        words["export_dtype"] = np.dtype(self.export_dtype).name
        words["recipe"]["compute_dtype"] = np.dtype(self.recipe.compute_dtype).name
        flat = json.loads(json.dumps(words, default=str))
        loop, recipe = flat["recipe"].pop("loop"), flat.pop("recipe")
        for unimportant in ("log_every", "eval_every", "checkpoint_every"):
            del loop[unimportant]
        loop["learning_rate"] = loop.pop("peak_learning_rate")  # the flag's name
        return {**flat, **recipe, **loop}


def make_head(job: DraftJob, spec: ModelSpec) -> DraftHead:
    """Return the requested head. Raises ConfigError for settings that do not fit this target."""
    inner = job.intermediate_size or inner_size(spec)
    if job.is_chained and job.kind is not Kind.NEXTN:
        raise ConfigError(
            f"chained is set, but the head is {job.kind.value}; expected it unset: it belongs to "
            "NEXTN, whose layers it chains"
        )
    for name, kinds in SETTINGS_OF.items():
        if job.kind not in kinds and getattr(job, name) is not None:
            raise ConfigError(
                f"{name} is {getattr(job, name)}, but the head is {job.kind.value}; expected "
                f"it unset: it belongs to {', '.join(kind.value for kind in kinds)}"
            )
    if job.kind is Kind.EAGLE:
        return eagle1_head(spec, intermediate_size=inner)
    if job.kind is Kind.NEXTN:
        return mtp_head(
            spec,
            num_layers=job.recipe.num_depths,
            intermediate_size=inner,
            chained=job.is_chained,
        )
    ids = _aux_layer_ids(job, spec)
    if job.kind is Kind.EAGLE3:
        size = _draft_vocab_size(job, spec)
        return eagle3_head(spec, draft_vocab_size=size, intermediate_size=inner, aux_layer_ids=ids)
    mask = spec.vocab_size - 1 if job.mask_token_id is None else job.mask_token_id
    if not 0 <= mask < spec.vocab_size:
        raise ConfigError(f"mask_token_id is {mask}; expected an id below {spec.vocab_size}")
    common: dict[str, Any] = {
        "num_layers": job.num_layers or NUM_LAYERS[job.kind],
        "intermediate_size": inner,
        "aux_layer_ids": ids,
        "mask_token_id": mask,
    }
    if job.kind is Kind.PEAGLE:
        return parallel_head(spec, draft_vocab_size=_draft_vocab_size(job, spec), **common)
    rank = job.rank or RANK
    return trained_block(
        spec,
        num_depths=job.recipe.num_depths,
        markov_rank=rank if job.kind is Kind.DSPARK else None,
        selector_rank=rank if job.kind is Kind.DFLASH2 else None,
        **common,
    )


def _draft_vocab_size(job: DraftJob, spec: ModelSpec) -> int:
    size = job.draft_vocab_size or min(DRAFT_VOCAB, spec.vocab_size)
    if not 1 <= size <= spec.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}; expected 1 to {spec.vocab_size}, the target's vocabulary"
        )
    return size


def _aux_layer_ids(job: DraftJob, spec: ModelSpec) -> tuple[int, ...]:
    if job.aux_layer_ids is not None:
        ids = job.aux_layer_ids
    elif job.kind in BLOCKS:
        ids = default_block_layer_ids(spec.num_layers, count=job.num_layers or NUM_LAYERS[job.kind])
    else:
        ids = default_aux_layer_ids(spec.num_layers)
    is_plain = job.kind is Kind.EAGLE3
    if not all(0 <= i <= spec.num_layers for i in ids) or (is_plain and ids[0] == 1):
        first = ", the first not 1, which readers take for the output of a layer"
        raise ConfigError(
            f"aux_layer_ids is {ids}; expected ids in [0, {spec.num_layers}]{first * is_plain}"
        )
    return tuple(ids)
